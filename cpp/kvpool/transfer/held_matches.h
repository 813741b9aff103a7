// The prompts and the keys that one peer has asked this pool for: the blocks of each are pinned, so that the peer can
// fetch them by their addresses.
//
// Invariant
//   Y4  A hold belongs to one incarnation of one peer. It ends once: when the peer says so, at its deadline, or with
//       the link, whichever comes first. Without a hold, the match pins nothing.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/served_call.h"
#include "kvpool/transfer/session_host.h"

namespace kvpool {

struct MatchCounts {
  std::size_t holds = 0;
  std::size_t blocks = 0;  // in all of them; one that several hold counts for each
};

class HeldMatches {
 public:
  // `host` outlives it.
  explicit HeldMatches(SessionHost& host) noexcept : host_(host) {}
  HeldMatches(const HeldMatches&) = delete;
  HeldMatches& operator=(const HeldMatches&) = delete;

  // Calls of the peer; the id of the call is that of the hold. The first two throw what the call is refused with: kBusy
  // above the limits, kProtocol for an id that is held, and as BlockHost::match_keys().
  void on_match(ServedCall& call, const MatchBody& body);
  void on_match_keys(ServedCall& call, const MatchKeysBody& body);
  // A hold that has ended, or never was, is no mistake of the peer.
  void on_unmatch(ServedCall& call);

  // Ends holds whose deadline has passed. Returns when to call it again; INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // The link has ended.
  void on_lost() noexcept;
  MatchCounts counts() const;

 private:
  struct Held {
    std::shared_ptr<void> hold;
    std::size_t blocks = 0;
    std::int64_t deadline_ns = 0;
  };
  std::uint32_t hold_ms(std::uint32_t wanted) const noexcept;
  void answer(ServedCall& call, Bytes&& bytes, std::uint32_t hold_ms, std::shared_ptr<void>&& hold, std::size_t blocks);
  void add(std::uint64_t id, Held&& held);
  void end(std::uint64_t id) noexcept;

  SessionHost& host_;
  mutable std::mutex mutex_;  // taken before the pool's
  std::unordered_map<std::uint64_t, Held> held_;
  std::size_t blocks_ = 0;
  bool lost_ = false;
};

}  // namespace kvpool
