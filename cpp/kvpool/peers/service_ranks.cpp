// What is done when one of two peers has several ranks: docs/adr/0008-logical-instances.md.
#include <chrono>
#include <condition_variable>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"
#include "kvpool/pool/pool.h"

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

// An instance of one rank that is this pool. Throws kLayoutMismatch when nobody knows what its blocks hold.
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

}  // namespace

void ServiceImpl::make_ranks() {
  if (pool_.sharding()) {
    const std::array blocks{pool_.arena(Medium::kHbm)->blocks(), pool_.arena(Medium::kDram)->blocks()};
    hub_ = std::make_unique<RankHub>(*pool_.sharding(), blocks, [this](const Error& why) { on_rank_lost(why); });
    pool_.set_mover(hub_.get());
    return;
  }
  channels_ = std::make_unique<RankChannels>(routes_, channel_executor_, *writer_quarantine_);
  channels_->start(*endpoint_);
  channels_->on_device_lost([this](const Error& why) { pool_.fail(why); });
  own_rank_ = make_local_rank_set(*channels_);
}

std::shared_ptr<const GroupMeeting> ServiceImpl::plan_group(const PeerMetadata& metadata) const {
  if (!metadata.is_group() && hub_ == nullptr) return nullptr;
  if (hub_ != nullptr) {
    const auto incomplete = failure_of([&] { hub_->check_complete(); });
    // The peer reads it, too.
    if (incomplete) throw Error(incomplete->code(), options_.name + ": " + incomplete->what());
  }
  if (metadata.meeting == 0) throw Error(ErrorCode::kProtocol, metadata.name + " does not say which meeting this is");
  const Sharding own = hub_ != nullptr ? hub_->sharding() : one_rank(blocks_.layout());
  const Sharding peer = sharding_of(metadata);
  GroupMeeting group;
  group.meeting = metadata.meeting;
  group.peer = metadata.name;
  group.peer_ranks = metadata.ranks;
  group.to_peer = std::make_shared<const ReshardPlan>(plan_reshard(own, peer));
  group.from_peer = std::make_shared<const ReshardPlan>(plan_reshard(peer, own));
  return std::make_shared<const GroupMeeting>(std::move(group));
}

std::vector<std::shared_ptr<Route>> ServiceImpl::group_routes(const GroupMeeting& group) {
  std::vector<std::shared_ptr<Route>> routes;
  routes.push_back(make_group_route(group.to_peer, rank_set().writers(group.meeting)));
  return routes;
}

// A rank of this instance joins, or a rank of a peer comes to the only one of this.
std::shared_ptr<LinkHandler> ServiceImpl::admit_rank(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) {
  if (metadata.rank_of != epoch_) {
    if (metadata.meeting == 0) {
      throw Error(ErrorCode::kPeerLost, "the instance that exported this rank is gone; another pool answers here now");
    }
    if (channels_ != nullptr) return channels_->admit(link, metadata);
    throw Error(ErrorCode::kArgument, "this is the scheduler of a logical instance: channels go to its ranks");
  }
  if (hub_ == nullptr) throw Error(ErrorCode::kArgument, "this pool is an instance of one rank: none can join");
  return hub_->admit(link, metadata);
}

// After two schedulers have met by this link: lets the ranks of both meet. The side that has connected does it; when
// the link that stays is the other's, that one does.
void ServiceImpl::meet_ranks(const std::shared_ptr<Link>& link, const std::string& address, const Waiting& waiting) {
  std::optional<GroupMeeting> group;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.link != link || peer.group == nullptr) continue;
      group = *peer.group;
      // An instance of one rank is where its scheduler is.
      if (group->peer_ranks.empty()) group->peer_ranks.push_back({0, peer.session->peer().epoch, address});
    }
  }
  if (!group) return;
  try {
    rank_set().meet(*group, waiting);
  } catch (const Error& error) {
    link->close(error);
    throw;
  }
}

// Its part of every block is lost, and with it every block. What it had begun to write may be on its way, so nobody
// hears that this side writes no more: peers wait for the proof of each rank.
void ServiceImpl::on_rank_lost(const Error& why) {
  pool_.fail(
      Error(ErrorCode::kPeerLost, std::string(why.what()) + "; its part of every block is gone: make a new pool"));
  std::vector<SessionPointer> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) sessions.push_back(peer.session);
  }
  for (const SessionPointer& session : sessions) session->on_route_broken(why);
}

// REQUIRES: the sessions have ended.
void ServiceImpl::part_ranks() noexcept {
  if (hub_ != nullptr) {
    hub_->close();  // ends a move that is under way
    pool_.set_mover(nullptr);
    return;
  }
  struct Parting {
    std::mutex mutex;
    std::condition_variable changed;
    bool clear = false;
  };
  const auto parting = std::make_shared<Parting>();
  channels_->depart_all(Error(ErrorCode::kClosed, "the pool is closed"), [parting] {
    const std::lock_guard lock(parting->mutex);
    parting->clear = true;
    parting->changed.notify_all();
  });
  {
    std::unique_lock lock(parting->mutex);
    parting->changed.wait_for(lock, kPartingTime, [&] { return parting->clear; });
  }
  channels_->abandon();  // who has not answered is left to the writer quarantine
}

std::vector<RankInfo> ServiceImpl::ranks() {
  if (hub_ == nullptr) throw Error(ErrorCode::kState, "this pool is an instance of one rank");
  return hub_->ranks();
}

bool ServiceImpl::wait_for_ranks(std::int64_t deadline_ns) {
  if (hub_ == nullptr) throw Error(ErrorCode::kState, "this pool is an instance of one rank");
  return hub_->wait_for_ranks(deadline_ns);
}

}  // namespace kvpool
