// Collects the answers of several ranks to one question. The caller waits for all of them, or for the first failure.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>

#include "kvpool/base/error.h"
#include "kvpool/net/link.h"

namespace kvpool {

// Thread-safety: any thread may deliver an answer. Use the other public members under `mutex`, or when no answer is
// missing.
class RankPoll {
 public:
  explicit RankPoll(std::size_t answers) noexcept : missing(answers) {}
  RankPoll(const RankPoll&) = delete;
  RankPoll& operator=(const RankPoll&) = delete;

  void expect() noexcept;
  // Counts an answer, even if handling it fails; otherwise the caller would wait for ever. Null: success.
  void take(const Error* error) noexcept;
  // Takes an answer from JoinedRank. Throws kProtocol if it cannot be read, which ends the link.
  void take(const Message* answer, const Error* why);
  // Throws the first failure; std::bad_alloc when there was no memory to keep it.
  void rethrow_if_failed() const;

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t missing;
  bool failed = false;

 private:
  void take_failure_unread() noexcept;

  std::optional<Error> failure_;  // of the first rank that failed; empty if there was no memory for it
};

}  // namespace kvpool
