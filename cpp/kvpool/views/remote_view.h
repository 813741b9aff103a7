// A view that this pool has of one sequence's blocks at one peer: the other end of peer_views.h.
//
// Thread-safety: all of it; of two add() at the same time the blocks must not overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/wait.h"
#include "kvpool/sequences/block_runs.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class RemoteView {
 public:
  explicit RemoteView(std::shared_ptr<Session> session);
  // Closes it, and waits for nothing.
  ~RemoteView() { remove(kEverything); }
  RemoteView(const RemoteView&) = delete;
  RemoteView& operator=(const RemoteView&) = delete;

  // Returns when the peer holds the blocks. If it throws, the peer holds none of them, or soon will not: kPeerLost,
  // kDeadline, kCancelled, kBusy, and what holding them throws there.
  void add(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting);
  // Without waiting.
  void remove(const BlockRange& blocks) noexcept;
  // Whether the peer holds one of these blocks, or will when an add() that is under way succeeds.
  bool has_any(const BlockRange& blocks) const;

  std::uint64_t id() const noexcept { return id_; }
  Session& session() const noexcept { return *session_; }
  const std::shared_ptr<Session>& session_pointer() const noexcept { return session_; }

 private:
  static constexpr BlockRange kEverything{0, UINT64_MAX};

  const std::shared_ptr<Session> session_;
  const std::uint64_t id_;
  const std::uint32_t made_in_;  // fork generation
  mutable std::mutex mutex_;     // held while a removal is sent, so that it is sent before the blocks are added again
  std::vector<BlockRange> held_;
};

}  // namespace kvpool
