// The scheduler's side of the ranks of a logical instance: which ranks have joined, and the requests to them.
//
// Losing a rank loses its shard of every block, so the instance is lost: on_lost is called, once.
//
// Invariants
//   N5  Every request to a rank ends once: by its answer, or by the end of the link.
//   N6  A rank counts as joined from its admission to the end of its link; ranks are never replaced.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/blocks/parallel.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/pool/tier_mover.h"
#include "kvpool/ranks/rank_set.h"

namespace kvpool {

class JoinedRank;

class RankHub final : public RankSet, public TierMover {
 public:
  // Any thread may call `on_lost`.
  RankHub(const Sharding& sharding, MediumMap<std::uint32_t> blocks, std::function<void(const Error& why)> on_lost);
  ~RankHub() override;

  const Sharding& sharding() const noexcept { return sharding_; }
  // What the metadata of the instance says of its ranks.
  void introduce(PeerMetadata& metadata) const;
  // A rank joins. Throws kArgument (no such rank), kState (it has joined already, or the instance is lost),
  // kLayoutMismatch (it holds something else).
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata);
  std::vector<RankInfo> ranks() const;
  // Waits until all ranks have joined; false at the deadline. Throws kPeerLost when a rank is lost.
  bool wait_for_ranks(std::int64_t deadline_ns);
  // Throws kBusy unless all ranks are there, kPeerLost when one is lost.
  void check_complete() const;

  // --- RankSet ---
  std::vector<std::unique_ptr<RankWriter>> writers(std::uint64_t meeting) override;
  void meet(const GroupMeeting& meeting, const Waiting& waiting) override;
  void depart(std::uint64_t meeting, const Error& why, std::function<void()> clear) override;

  // --- TierMover ---
  // Copies blocks within every rank, and waits for every rank that was asked. Throws the error of the first rank that
  // failed: kState (a CUDA graph is being captured there), kOutOfMemory, kUnsupported, kBusy; kPeerLost when a rank,
  // and with it the instance, is lost meanwhile.
  void move(const Address* from, const Address* to, std::size_t n) override;

  // Tells the ranks that the scheduler leaves. Idempotent.
  void close() noexcept;

 private:
  void check_fits(const PeerMetadata& metadata) const;
  void move_part(const CopyBody& body);
  // Marks the instance as lost because of one rank, or, without a number, for another reason.
  void on_rank_closed(std::optional<std::uint32_t> rank, const Error& why);
  std::vector<std::shared_ptr<JoinedRank>> joined() const;

  const Sharding sharding_;
  const MediumMap<std::uint32_t> blocks_;
  const std::function<void(const Error&)> on_lost_;
  std::size_t needed_ = 0;  // ranks that hold a part of a block

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint32_t, std::shared_ptr<JoinedRank>> joined_;
  std::optional<Error> why_lost_;
  bool closed_ = false;
};

}  // namespace kvpool
