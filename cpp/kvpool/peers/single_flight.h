// One attempt at a time for each name: other callers for the same name wait for its outcome instead of trying, too.
//
// Thread-safety: all of it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"

namespace kvpool {

class SingleFlight {
 public:
  // Calls attempt() in this thread, or waits for the attempt of another thread for this name; throws what it threw. If
  // the attempt failed only because its caller gave up or had no time left, one of the waiting callers makes a new
  // attempt. Throws kPeerLost at the deadline, kCancelled.
  void run(const std::string& name, const Waiting& waiting, const std::function<void()>& attempt);

 private:
  struct Attempt {
    std::condition_variable ended;
    bool over = false;
    bool given_up = false;
    std::optional<Error> failure;
  };

  void lead(const std::string& name, const std::shared_ptr<Attempt>& mine, const Waiting& waiting,
            const std::function<void()>& attempt);
  bool follow(const std::string& name, Attempt& other, const Waiting& waiting);

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Attempt>> under_way_;
};

}  // namespace kvpool
