#include "kvpool/routes/host/memory_route.h"

#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/host/copy_choice.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/write_in_parts.h"

namespace kvpool {
namespace {

// copy_pieces ends with a store fence where it needs one, and a message is a system call: no reader can be told of the
// bytes before it can see them.
class Copier final : public PieceMover {
 public:
  explicit Copier(CopyWay way) noexcept : way_(way) {}
  void move(std::span<const CopyPiece> pieces) override { copy_pieces(pieces, way_); }

 private:
  const CopyWay way_;
};

class MemoryRoute final : public Route {
 public:
  MemoryRoute(const char* name, MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive, CopyTeam& team)
      : name_(name), local_(std::move(local)), peer_(std::move(peer)), keepalive_(std::move(keepalive)), team_(team) {}

  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override { return {.one_sided = true, .by_caller = true, .waits = false}; }
  bool reaches(Medium medium) const noexcept override { return peer_[medium].blocks > 0; }
  // Media on a GPU were left out of the spans.
  bool reads(Medium medium) const noexcept override { return local_[medium].blocks > 0; }
  double estimate_us(const MediaSet& from, const MediaSet& to, std::uint64_t pieces,
                     std::uint64_t bytes) const noexcept override {
    return cost_.estimate_us(from, to, pieces, bytes, monotonic_ns());
  }
  RouteCost* cost() noexcept override { return &cost_; }

  WriteOutcome write(const WriteRequest& request) override {
    const std::int64_t began_ns = monotonic_ns();
    const CopyChoice::Pick pick = choice_.pick(strip_bytes(request.strips) * request.from.size());
    Copier copier(pick.way);
    const WriteOutcome outcome = write_in_parts(request, local_, peer_, copier, team_, name_, closed_);
    const std::int64_t ended_ns = monotonic_ns();
    const double us = static_cast<double>(ended_ns - began_ns) / 1e3;
    cost_.measured(media_set_of(request.from), media_set_of(request.to), outcome.calls, outcome.bytes, us, ended_ns);
    choice_.took(pick, outcome.bytes, us);
    return outcome;
  }

  void close() noexcept override { closed_.store(true, std::memory_order_relaxed); }

 private:
  const char* const name_;
  const MediaSpans local_;
  const MediaSpans peer_;
  const std::shared_ptr<void> keepalive_;
  CopyTeam& team_;
  RouteCost cost_{kMemoryPrior};
  CopyChoice choice_;
  std::atomic<bool> closed_{false};
};

}  // namespace

std::unique_ptr<Route> make_loopback_route(MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive,
                                           CopyTeam& team) {
  return std::make_unique<MemoryRoute>("loopback", std::move(local), std::move(peer), std::move(keepalive), team);
}

std::unique_ptr<Route> make_shm_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      const MediaFiles& files, CopyTeam& team) {
  std::shared_ptr<MappedPeer> peer = MappedPeer::make(metadata, files);
  MediaSpans spans = peer->spans();
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<MappedPeer>>;
  auto both = std::make_shared<Both>(std::move(keepalive), std::move(peer));
  return std::make_unique<MemoryRoute>("shm", std::move(local), std::move(spans), std::move(both), team);
}

}  // namespace kvpool
