#include "kvpool/routes/ucx/ucx_route.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "kvpool/base/clock.h"
#include "kvpool/base/strips.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_write.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

// Measured with the wheel on Sapphire Rapids, scattered pieces of 4 KiB to 1 MiB: CMA, a system call a piece; TCP on
// one host. What an adapter does is not known here, and learnt.
constexpr RoutePrior kProcessPrior{2.5, 0.6, 1 / 10e3};
constexpr RoutePrior kSocketPrior{20, 6, 1 / 5e3};

std::vector<std::string> describe_lanes(const UcxLibrary& ucx, ucp_ep_h endpoint) {
  std::vector<std::string> lanes;
  char* text = nullptr;
  std::size_t bytes = 0;
  FILE* stream = open_memstream(&text, &bytes);
  if (stream == nullptr) return lanes;
  ucx.ep_print_info(endpoint, stream);
  std::fclose(stream);
  std::istringstream lines(std::string(text, bytes));
  std::free(text);  // NOLINT: open_memstream's
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find("lane[");
    if (at != std::string::npos) lanes.push_back(line.substr(at));
  }
  return lanes;
}

bool only_sockets(const std::vector<std::string>& lanes) {
  for (const std::string& lane : lanes) {
    if (lane.find(":tcp/") == std::string::npos) return false;
  }
  return true;
}

}  // namespace

UcxRoute::UcxRoute(const UcxLock&, std::shared_ptr<UcxWorker> worker, std::shared_ptr<UcxPeer> peer, MediaSpans remote,
                   const MediaSet& remote_on_gpu, std::string name, int pidfd)
    : worker_(std::move(worker)),
      peer_(std::move(peer)),
      remote_(std::move(remote)),
      remote_on_gpu_(remote_on_gpu),
      name_(std::move(name)),
      pidfd_(pidfd),
      cost_(only_sockets(describe_lanes(worker_->ucx(), peer_->endpoint)) ? kSocketPrior : kProcessPrior) {}

UcxRoute::~UcxRoute() {
  if (worker_->context().forked()) return;
  const UcxGpuScope current(worker_->context().gpu());
  const UcxLock held = worker_->lock();
  worker_->drop(held, peer_);
}

bool UcxRoute::reaches(Medium medium) const noexcept { return remote_[medium].blocks > 0; }

bool UcxRoute::reads(Medium medium) const noexcept { return worker_->context().spans()[medium].blocks > 0; }

std::uint8_t UcxRoute::kinds_of(const MediaSet& from, const MediaSet& to) const noexcept {
  const MediaSet& own = worker_->context().memory().on_gpu();
  std::uint8_t kinds = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    for (std::size_t j = 0; j < to.size(); ++j) {
      if (from[i] && to[j]) kinds |= ucx_kind(own[i], remote_on_gpu_[j]);
    }
  }
  return kinds;
}

bool UcxRoute::suits(const MediaSet& from, const MediaSet& to) const noexcept {
  return (kinds_of(from, to) & refused_.load(std::memory_order_relaxed)) == 0;
}

double UcxRoute::estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                             std::int64_t now_ns) const noexcept {
  return cost_.estimate_us(from, to, size, now_ns);
}

WriteOutcome UcxRoute::write(const WriteRequest& request) {
  worker_->context().require_no_fork();
  const MediaSpans& local = worker_->context().spans();
  check_blocks(request, local, remote_, name());
  WriteTimer timer(cost_, request);
  StripPlan plan(local, remote_, request.strips, request.merge);
  UcxWrite writing(*worker_, peer_, request, name_, pidfd_);
  plan.emit(request.from, request.to, [&](std::span<const CopyPiece> pieces) { return writing.put(pieces); });
  WriteOutcome outcome;
  try {
    outcome = writing.finish();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported) {
      refused_.fetch_or(writing.kinds_unable(), std::memory_order_relaxed);
    }
    throw;
  }
  timer.stop(outcome);
  return outcome;
}

void UcxRoute::close() noexcept {
  if (worker_->context().forked()) return;
  const UcxGpuScope current(worker_->context().gpu());
  const UcxLock held = worker_->lock();
  worker_->shut(held, *peer_);
  worker_->progress(held);  // threads that wait for its puts see their end
}

std::vector<std::string> UcxRoute::lanes() {
  const UcxGpuScope current(worker_->context().gpu());
  const UcxLock held = worker_->lock();
  return peer_->endpoint == nullptr ? std::vector<std::string>{} : describe_lanes(worker_->ucx(), peer_->endpoint);
}

}  // namespace kvpool
