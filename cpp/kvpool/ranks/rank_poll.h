// The answers of several ranks to one question: who asks waits for all of them, or for the first failure.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>

#include "kvpool/base/error.h"
#include "kvpool/net/link.h"

namespace kvpool {

// Thread-safety: answers are taken in any thread. What is public otherwise: under `mutex`, or when nothing is missing.
class RankPoll {
 public:
  explicit RankPoll(std::size_t answers) noexcept : missing(answers) {}
  RankPoll(const RankPoll&) = delete;
  RankPoll& operator=(const RankPoll&) = delete;

  void expect() noexcept;
  // An answer has come, whatever becomes of it: who waits for the last one would wait for ever. Null: a good one.
  void take(const Error* error) noexcept;
  // As JoinedRank hands it on. Throws kProtocol for one that cannot be read, to end the link.
  void take(const Message* answer, const Error* why);
  // Throws the first failure; std::bad_alloc when there was no memory to keep it.
  void rethrow_if_failed() const;

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t missing;
  bool failed = false;

 private:
  void take_failure_unread() noexcept;

  std::optional<Error> failure_;  // of one that has failed; none: there was no memory for it
};

}  // namespace kvpool
