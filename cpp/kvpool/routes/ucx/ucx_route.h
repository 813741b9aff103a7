// The way to one peer through UCX: puts, then a flush.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/ucx/ucx_worker.h"

namespace kvpool {

class UcxRoute final : public Route {
 public:
  // REQUIRES: `lock` holds the worker's lock.
  UcxRoute(const UcxLock& lock, std::shared_ptr<UcxWorker> worker, std::shared_ptr<UcxPeer> peer, MediaSpans remote,
           const MediaSet& remote_on_gpu, std::string name, int pidfd);
  ~UcxRoute() override;

  const char* name() const noexcept override { return "ucx"; }
  RouteTraits traits() const noexcept override {
    return {.one_sided = true, .by_caller = true, .waits = true, .by_name = true};
  }
  bool reaches(Medium medium) const noexcept override;
  bool reads(Medium medium) const noexcept override;
  // False once UCX has reported that it cannot copy between the two kinds of memory.
  bool suits(const MediaSet& from, const MediaSet& to) const noexcept override;
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept override;
  RouteCost* cost() noexcept override { return &cost_; }
  WriteOutcome write(const WriteRequest& request) override;
  void close() noexcept override;
  // The lanes by which UCX reaches the peer, one line each, as ucp_ep_print_info prints them: transport, device, use.
  // For people and tests.
  std::vector<std::string> lanes();

 private:
  const std::shared_ptr<UcxWorker> worker_;
  const std::shared_ptr<UcxPeer> peer_;
  // The ucx_kind() of each pair of media that a write may copy between.
  std::uint8_t kinds_of(const MediaSet& from, const MediaSet& to) const noexcept;

  const MediaSpans remote_;
  const MediaSet remote_on_gpu_;
  const std::string name_;  // of the peer
  const int pidfd_;
  std::atomic<std::uint8_t> refused_{0};  // the ucx_kind() of puts that UCX cannot do
  RouteCost cost_;
};

}  // namespace kvpool
