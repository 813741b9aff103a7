#include "kvpool/ranks/instance_ranks.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/pool/pool.h"
#include "kvpool/ranks/group_route.h"
#include "kvpool/ranks/rank_channels.h"
#include "kvpool/ranks/rank_hub.h"
#include "kvpool/ranks/rank_set.h"

namespace kvpool {
namespace {

constexpr std::chrono::seconds kPartingTime{2};

// The logical block, as a layout and peer metadata describe it. REQUIRES: the format is known.
template <class Described>
KVShape shape_of(const Described& blocks) {
  const PageFormat& format = blocks.format;
  return {static_cast<std::uint32_t>(blocks.piece_bytes.size() / format.pieces_per_layer()),
          format.kv_heads,
          format.head_dim,
          format.dtype,
          blocks.block_tokens,
          format.tokens_first,
          format.fused};
}

// An instance whose only rank is this pool. Throws kLayoutMismatch when the format of its blocks is unknown.
Sharding one_rank(const Layout& layout) {
  if (!layout.format.known()) {
    throw Error(ErrorCode::kLayoutMismatch,
                "blocks of raw bytes cannot be shared among ranks: give the pool a KVLayout, which knows layers and "
                "heads");
  }
  return {shape_of(layout), Parallel{}};
}

Sharding sharding_of(const PeerMetadata& metadata) {
  if (!metadata.format.known()) {
    throw Error(ErrorCode::kLayoutMismatch,
                metadata.name + " has blocks of raw bytes: they cannot be shared among ranks");
  }
  Parallel parallel;
  if (metadata.is_group()) {
    parallel.tp = metadata.tp;
    parallel.pp = static_cast<std::uint32_t>(metadata.stage_layers.size());
    parallel.stage_layers = metadata.stage_layers;
  }
  return {shape_of(metadata), parallel};
}

[[noreturn]] void throw_one_rank() { throw Error(ErrorCode::kState, "this pool is an instance of one rank"); }

// `ranks` outlives it.
class PlannedGroup final : public GroupConnection {
 public:
  PlannedGroup(RankSet& ranks, GroupMeeting meeting, std::uint64_t peer_incarnation)
      : ranks_(ranks), meeting_(std::move(meeting)), peer_incarnation_(peer_incarnation) {}

  std::vector<std::shared_ptr<Route>> routes() override {
    std::vector<std::shared_ptr<Route>> routes;
    routes.push_back(make_group_route(meeting_.to_peer, ranks_.writers(meeting_.meeting)));
    return routes;
  }

  void meet(const std::string& address, const Waiting& waiting) override {
    GroupMeeting meeting = meeting_;
    // An instance of one rank is where its scheduler is.
    if (meeting.peer_ranks.empty()) meeting.peer_ranks.push_back({0, peer_incarnation_, address});
    ranks_.meet(meeting, waiting);
  }

  void depart(const Error& why, std::function<void()> clear) override {
    ranks_.depart(meeting_.meeting, why, std::move(clear));
  }

 private:
  RankSet& ranks_;
  const GroupMeeting meeting_;
  const std::uint64_t peer_incarnation_;  // of the peer's scheduler
};

std::shared_ptr<GroupConnection> plan_group(RankSet& ranks, const Sharding& own, const PeerMetadata& peer) {
  if (peer.meeting == 0) throw Error(ErrorCode::kProtocol, peer.name + " does not say which meeting this is");
  const Sharding theirs = sharding_of(peer);
  GroupMeeting group;
  group.meeting = peer.meeting;
  group.peer = peer.name;
  group.peer_ranks = peer.ranks;
  group.to_peer = std::make_shared<const ReshardPlan>(plan_reshard(own, theirs));
  group.from_peer = std::make_shared<const ReshardPlan>(plan_reshard(theirs, own));
  return std::make_shared<PlannedGroup>(ranks, std::move(group), peer.incarnation);
}

// A rank that belongs to an instance which was here before.
void check_meeting(const PeerMetadata& metadata) {
  if (metadata.meeting != 0) return;
  throw Error(ErrorCode::kPeerLost, "the instance that exported this rank is gone; another pool answers here now");
}

// A pool that is an instance of one rank: its channels to the ranks of peers are in its own process.
class OwnRanks final : public InstanceRanks {
 public:
  explicit OwnRanks(const RanksHost& host)
      : layout_(host.pool.layout()),
        incarnation_(host.incarnation),
        waits_(host.pool.executor()),
        channels_(host.routes, waits_, host.watches, host.writer_quarantine),
        ranks_(make_local_rank_set(channels_)) {
    channels_.start(host.endpoint);
    channels_.on_device_lost([&pool = host.pool](const Error& why) { pool.fail(why); });
  }

  void introduce(PeerMetadata&) const override {}
  void check_complete() const override {}

  std::shared_ptr<GroupConnection> plan(const PeerMetadata& peer) override {
    return peer.is_group() ? plan_group(*ranks_, one_rank(layout_), peer) : nullptr;
  }

  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) override {
    if (metadata.rank_of == incarnation_) {
      throw Error(ErrorCode::kArgument, "this pool is an instance of one rank: none can join");
    }
    check_meeting(metadata);
    return channels_.admit(link, metadata);
  }

  void refuse(const std::shared_ptr<Link>&, std::uint64_t meeting, const Error& why) override {
    channels_.depart(meeting, why, {});  // a channel was made of the link
  }

  std::vector<RankInfo> list() const override { throw_one_rank(); }
  bool wait_until_joined(std::int64_t) override { throw_one_rank(); }

  void close() noexcept override {
    struct Parting {
      std::mutex mutex;
      std::condition_variable changed;
      bool clear = false;
    };
    const auto parting = std::make_shared<Parting>();
    channels_.depart_all(Error(ErrorCode::kClosed, "the pool is closed"), [parting] {
      const std::lock_guard lock(parting->mutex);
      parting->clear = true;
      parting->changed.notify_all();
    });
    {
      std::unique_lock lock(parting->mutex);
      parting->changed.wait_for(lock, kPartingTime, [&] { return parting->clear; });
    }
    channels_.abandon();  // peers that have not answered are left to the writer quarantine
  }

  void stop() noexcept override { waits_.stop(); }

 private:
  const Layout& layout_;  // of the pool
  const std::uint64_t incarnation_;
  SerialExecutor waits_;  // what waits in one may wait for what goes on in another, of this pool or a peer
  RankChannels channels_;
  const std::unique_ptr<RankSet> ranks_;
};

MediumMap<std::uint32_t> blocks_of(const Pool& pool) {
  MediumMap<std::uint32_t> blocks{};
  for (const Medium medium : kMedia) blocks[medium] = static_cast<std::uint32_t>(pool.capacity(medium));
  return blocks;
}

// The scheduler of a logical instance: its ranks have joined from other processes.
class JoinedRanks final : public InstanceRanks {
 public:
  explicit JoinedRanks(const RanksHost& host)
      : pool_(host.pool),
        name_(host.name),
        incarnation_(host.incarnation),
        hub_(*host.pool.sharding(), blocks_of(host.pool), host.on_rank_lost) {
    pool_.set_mover(&hub_);
  }
  // A service whose making fails is not closed.
  ~JoinedRanks() override { pool_.set_mover(nullptr); }

  void introduce(PeerMetadata& metadata) const override { hub_.introduce(metadata); }
  void check_complete() const override { hub_.check_complete(); }

  std::shared_ptr<GroupConnection> plan(const PeerMetadata& peer) override {
    const auto incomplete = failure_of([&] { hub_.check_complete(); });
    // The peer reads it, too.
    if (incomplete) throw Error(incomplete->code(), name_ + ": " + incomplete->what());
    return plan_group(hub_, hub_.sharding(), peer);
  }

  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) override {
    if (metadata.rank_of == incarnation_) return hub_.admit(link, metadata);
    check_meeting(metadata);
    throw Error(ErrorCode::kArgument, "this is the scheduler of a logical instance: channels go to its ranks");
  }

  void refuse(const std::shared_ptr<Link>& link, std::uint64_t, const Error& why) override { link->close(why); }

  std::vector<RankInfo> list() const override { return hub_.ranks(); }
  bool wait_until_joined(std::int64_t deadline_ns) override { return hub_.wait_for_ranks(deadline_ns); }

  void close() noexcept override {
    hub_.close();  // ends a move that is under way
    pool_.set_mover(nullptr);
  }

  void stop() noexcept override {}

 private:
  Pool& pool_;
  const std::string& name_;
  const std::uint64_t incarnation_;
  RankHub hub_;
};

}  // namespace

std::unique_ptr<InstanceRanks> make_ranks(const RanksHost& host) {
  if (host.pool.sharding()) return std::make_unique<JoinedRanks>(host);
  return std::make_unique<OwnRanks>(host);
}

}  // namespace kvpool
