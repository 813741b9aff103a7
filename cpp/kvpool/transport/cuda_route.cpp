#include "kvpool/transport/cuda_route.h"

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/transport/parted_write.h"
#include "kvpool/transport/reactor.h"
#include "kvpool/transport/route_choice.h"
#include "kvpool/transport/route_cost.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied to a peer";
// Whether to stop is looked at between two parts. At the rate of a bus this one takes a millisecond or two, beside
// which the pause between two of them is nothing.
constexpr std::uint64_t kPartBytes = std::uint64_t{64} << 20;

using Regions = std::array<std::span<std::byte>, kMediaCount>;

// Pairs of blocks of the same media on either side.
struct Group {
  std::vector<Address> from;
  std::vector<Address> to;
};

class CudaRoute final : public Route {
 public:
  CudaRoute(const char* name, GpuSide local, MediaSpans peer, std::shared_ptr<void> peer_keepalive,
            const Reach& peer_on_gpu, const Regions& to_register)
      : name_(name),
        local_(std::move(local)),
        peer_(std::move(peer)),
        peer_keepalive_(std::move(peer_keepalive)),
        peer_on_gpu_(peer_on_gpu),
        to_register_(to_register),
        copier_(local_.context, local_.kernels, kWhat) {}

  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override { return {.one_sided = true, .by_caller = true, .waits = false}; }
  bool reaches(Medium medium) const noexcept override {
    const auto at = static_cast<std::size_t>(medium_index(medium));
    return peer_[at].blocks > 0 && !refused_[at].load(std::memory_order_relaxed);
  }
  bool reads(Medium medium) const noexcept override {
    return local_.spans[static_cast<std::size_t>(medium_index(medium))].blocks > 0;
  }
  // From host memory to host memory the CPU copies better.
  bool suits(const Reach& from, const Reach& to) const noexcept override {
    for (std::size_t at = 0; at < from.size(); ++at) {
      if ((from[at] && local_.on_gpu[at]) || (to[at] && peer_on_gpu_[at])) return true;
    }
    return false;
  }
  double estimate_us(std::uint64_t pieces, std::uint64_t bytes) const noexcept override {
    return cost_.estimate_us(pieces, bytes, monotonic_ns());
  }

  WriteOutcome write(const WriteRequest& request) override {
    check_blocks(request, local_.spans, peer_, name_);
    throw_if_stopped(request, name_, closed_);
    const Reach from = reach_of(request.from);
    const bool reads_gpu = (from[0] && local_.on_gpu[0]) || (from[1] && local_.on_gpu[1]);
    if (reads_gpu) make_reachable(reach_of(request.to));
    const std::int64_t began_ns = monotonic_ns();
    const TransferParts parts(request.strips, request.from.size(), PartLimits{.bytes_max = kPartBytes});
    WriteOutcome outcome;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) throw_if_stopped(request, name_, closed_);
      outcome.calls += write_part(request, parts[i]);
      outcome.bytes += parts[i].bytes();
      if (request.bytes_done != nullptr) request.bytes_done->fetch_add(parts[i].bytes(), std::memory_order_relaxed);
    }
    const std::int64_t ended_ns = monotonic_ns();
    cost_.measured(outcome.calls, outcome.bytes, static_cast<double>(ended_ns - began_ns) / 1e3, ended_ns);
    return outcome;
  }

  void close() noexcept override { closed_.store(true, std::memory_order_relaxed); }

 private:
  // The peer's host memory, before it is first written: to register hundreds of gigabytes takes seconds, which nobody
  // should spend on a peer that is never sent to. A peer whose memory cannot be registered is reached by other routes.
  void make_reachable(const Reach& to) {
    for (std::size_t at = 0; at < to.size(); ++at) {
      if (!to[at] || to_register_[at].empty()) continue;
      const std::lock_guard lock(mutex_);
      if (registered_[at] != nullptr) continue;
      try {
        registered_[at] =
            std::make_unique<RegisteredMemory>(local_.context, to_register_[at].data(), to_register_[at].size());
      } catch (const Error&) {
        refused_[at].store(true, std::memory_order_relaxed);
        throw;
      }
    }
  }

  std::uint64_t write_part(const WriteRequest& request, const TransferPart& part) {
    std::array<Group, std::size_t{kMediaCount} * kMediaCount> groups;
    for (std::size_t i = part.first_block; i < part.first_block + part.blocks; ++i) {
      Group& group = groups[(medium_bits_of(request.from[i]) - 1) * kMediaCount + medium_bits_of(request.to[i]) - 1];
      group.from.push_back(request.from[i]);
      group.to.push_back(request.to[i]);
    }
    std::uint64_t calls = 0;
    std::vector<PlannedStrip> plan;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::size_t from = i / kMediaCount;
      const std::size_t to = i % kMediaCount;
      if (groups[i].from.empty()) continue;
      if (!local_.on_gpu[from] && !peer_on_gpu_[to]) {
        StripPlan pieces(local_.spans, peer_, part.strips, request.merge);
        pieces.emit(groups[i].from, groups[i].to, [&](std::span<const CopyPiece> batch) {
          copy_pieces(batch, CopyWay::kCached);
          calls += batch.size();
          return true;
        });
        continue;
      }
      plan.clear();
      plan_strips(local_.spans[from], peer_[to], part.strips, request.merge, plan);
      calls += copier_.copy(plan, groups[i].from, groups[i].to, request.merge);
    }
    return calls;
  }

  const char* const name_;
  const GpuSide local_;
  const MediaSpans peer_;
  const std::shared_ptr<void> peer_keepalive_;
  const Reach peer_on_gpu_;
  const Regions to_register_;
  std::mutex mutex_;
  std::array<std::unique_ptr<RegisteredMemory>, kMediaCount> registered_;  // under mutex_; end before the mapping
  std::array<std::atomic<bool>, kMediaCount> refused_{};
  DeviceCopier copier_;
  RouteCost cost_{kCudaPrior};
  std::atomic<bool> closed_{false};
};

struct PeerKept {
  std::shared_ptr<MappedPeer> host;
  std::array<std::unique_ptr<ImportedMemory>, kMediaCount> gpu;
};

}  // namespace

std::unique_ptr<Route> make_cuda_loopback_route(GpuSide local, GpuPeer peer) {
  return std::make_unique<CudaRoute>("loopback", std::move(local), std::move(peer.spans), std::move(peer.keepalive),
                                     peer.on_gpu, Regions{});
}

std::unique_ptr<Route> make_cuda_ipc_route(GpuSide local, const PeerCard& card, const MediaFiles& files) {
  auto kept = std::make_shared<PeerKept>();
  MediaSpans spans;
  Reach on_gpu{};
  Regions to_register;
  MediaFiles host_files{-1, -1};
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (card.media[i].kind == MemoryKind::kHost && card.media[i].mapped_bytes > 0) host_files[i] = files[i];
  }
  if (host_files != MediaFiles{-1, -1}) {
    kept->host = MappedPeer::make(card, host_files);
    spans = kept->host->spans();
    to_register = kept->host->regions();
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    const CardMedium& medium = card.media[i];
    if (medium.kind != MemoryKind::kGpu || medium.mapped_bytes == 0 || files[i] < 0) continue;
    try {
      const auto bytes = static_cast<std::size_t>(medium.mapped_bytes);
      kept->gpu[i] = std::make_unique<ImportedMemory>(local.context, files[i], bytes);
      spans[i] = mapped_span(medium, kept->gpu[i]->base());
      on_gpu[i] = true;
    } catch (const Error& error) {
      // Two GPUs, perhaps, that do not reach each other: the peer's host memory is reached all the same.
      if (kept->host == nullptr || error.code() != ErrorCode::kUnsupported) throw;
    }
  }
  if (kept->host == nullptr && !on_gpu[0] && !on_gpu[1]) {
    throw Error(ErrorCode::kUnsupported, "the peer has no memory that a GPU can map");
  }
  return std::make_unique<CudaRoute>("cuda_ipc", std::move(local), std::move(spans), std::move(kept), on_gpu,
                                     to_register);
}

}  // namespace kvpool
