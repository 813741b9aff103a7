// The common base of the routes to memory on this host: threads of this process write from local spans to the peer's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/copy.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/route_cost.h"

namespace kvpool {

// The spans have no blocks of media on a GPU: this route neither reads nor writes those.
class HostRoute : public Route {
 public:
  bool reaches(Medium medium) const noexcept final { return peer_[medium].blocks > 0; }
  bool reads(Medium medium) const noexcept final { return local_[medium].blocks > 0; }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept final {
    return cost_.estimate_us(from, to, size, now_ns);
  }
  RouteCost* cost() noexcept final { return &cost_; }
  void close() noexcept final { closed_.store(true, std::memory_order_relaxed); }

 protected:
  // `keepalive` keeps the memory of the spans alive.
  HostRoute(MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive, CopyTeam& team, const RoutePrior& guess,
            double us_per_call = 0)
      : local_(std::move(local)),
        peer_(std::move(peer)),
        keepalive_(std::move(keepalive)),
        team_(team),
        cost_(guess, us_per_call) {}

  const MediaSpans local_;
  const MediaSpans peer_;
  const std::shared_ptr<void> keepalive_;
  CopyTeam& team_;
  RouteCost cost_;
  std::atomic<bool> closed_{false};
};

}  // namespace kvpool
