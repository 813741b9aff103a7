#include "kvpool/routes/cuda_ipc/cuda_route.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/ipc_memory.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/cuda_ipc/registered_peer_memory.h"
#include "kvpool/routes/local_memory.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied to a peer";
constexpr std::size_t kPartsUnderWay = 2;
// Of what a table has room for. Parts of shorter strips are several launches.
constexpr std::uint64_t kStripBytesMin = 2048;

// Pairs of blocks of the same media on either side.
struct Group {
  std::vector<Address> from;
  std::vector<Address> to;
};

// What is mapped of a peer, and what copies there: to let go of either may wait for the GPU.
struct MappedSide {
  MappedSide(const GpuSide& local, const MediaSpans& peer, std::shared_ptr<void> kept, std::shared_ptr<MappedPeer> host)
      : keepalive(std::move(kept)),
        reach(local.context, std::move(host)),
        copier(local.context, local.kernels, local.bounds, kWhat) {
    // A destination stands once in a write, so there are no more pairs than the peer has blocks.
    std::size_t strips = 0;
    std::uint64_t pairs = 0;
    std::size_t sources = 0;
    std::size_t targets = 0;
    for (std::size_t i = 0; i < peer.size(); ++i) {
      sources += local.spans[i].blocks > 0 ? 1 : 0;
      targets += peer[i].blocks > 0 ? 1 : 0;
      strips = std::max(strips, local.spans[i].segments.size() + peer[i].segments.size());
      pairs += peer[i].blocks;
    }
    pairs = std::min(pairs, local.part_bytes / kStripBytesMin);
    copier.add_tables(kPartsUnderWay, sources * targets, strips, static_cast<std::size_t>(pairs));
  }

  const std::shared_ptr<void> keepalive;
  RegisteredPeerMemory reach;
  DeviceCopier copier;
};

class CudaRoute final : public Route {
 public:
  // `host`: what is to be registered before the GPU writes there; null: nothing is.
  CudaRoute(const char* name, GpuSide local, MediaSpans peer, std::shared_ptr<void> peer_keepalive,
            const MediaSet& peer_on_gpu, std::shared_ptr<MappedPeer> host)
      : name_(name),
        local_(std::move(local)),
        peer_(std::move(peer)),
        peer_on_gpu_(peer_on_gpu),
        mapped_(std::make_shared<MappedSide>(local_, peer_, std::move(peer_keepalive), std::move(host))) {}

  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override { return {.one_sided = true, .by_caller = true, .waits = false}; }
  bool reaches(Medium medium) const noexcept override {
    if (peer_[medium].blocks == 0) return false;
    const std::lock_guard lock(mutex_);
    return mapped_ != nullptr && !mapped_->reach.refused(medium);
  }
  bool reads(Medium medium) const noexcept override { return local_.spans[medium].blocks > 0; }
  // From host memory to host memory the CPU copies better.
  bool suits(const MediaSet& from, const MediaSet& to) const noexcept override {
    for (std::size_t at = 0; at < from.size(); ++at) {
      if ((from[at] && local_.on_gpu[at]) || (to[at] && peer_on_gpu_[at])) return true;
    }
    return false;
  }
  bool ready(const MediaSet& from, const MediaSet& to) noexcept override {
    if (!reads_gpu(from)) return true;
    const std::lock_guard lock(mutex_);
    return mapped_ == nullptr || mapped_->reach.ready(to);
  }
  bool is_ready(const MediaSet& from, const MediaSet& to) const noexcept override {
    if (!reads_gpu(from)) return true;
    const std::lock_guard lock(mutex_);
    return mapped_ == nullptr || mapped_->reach.is_ready(to);
  }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept override {
    return cost_.estimate_us(from, to, size, now_ns);
  }
  RouteCost* cost() noexcept override { return &cost_; }

  WriteOutcome write(const WriteRequest& request) override {
    check_blocks(request, local_.spans, peer_, name_);
    const auto mapped = this->mapped();  // stays until the end of this write
    throw_if_stopped(request, name_, closed_);
    if (reads_gpu(media_set_of(request.from))) mapped->reach.wait(media_set_of(request.to), request, name_, closed_);
    WriteTimer timer(cost_, request);
    const WriteOutcome outcome = write_parts(request, mapped->copier);
    timer.stop(outcome);
    return outcome;
  }

  void close() noexcept override { closed_.store(true); }
  // With the last write under way goes what is mapped of the peer, not when the last handle of a transfer is dropped:
  // once this side has said that it writes no more, the peer may free memory that nobody may have open then.
  std::shared_ptr<void> let_go() noexcept override {
    const std::lock_guard lock(mutex_);
    return std::exchange(mapped_, nullptr);
  }

 private:
  // For a write, which this side counts: nobody but it and who has let go may be the last to hold it. Null once that
  // has happened; closed_ is set by then.
  std::shared_ptr<MappedSide> mapped() const noexcept {
    const std::lock_guard lock(mutex_);
    return mapped_;
  }

  bool reads_gpu(const MediaSet& from) const noexcept {
    return (from[0] && local_.on_gpu[0]) || (from[1] && local_.on_gpu[1]);
  }

  WriteOutcome write_parts(const WriteRequest& request, DeviceCopier& copier) {
    const TransferParts parts(request.strips, request.from.size(), PartLimits{.bytes_max = local_.part_bytes});
    WriteOutcome outcome;
    // Parts cut runs that are one piece by the plan; what counts is the plan.
    StripPlan plan(local_.spans, peer_, request.strips, request.merge);
    outcome.calls = outcome.pieces = plan.count(request.from, request.to);
    DeviceCopier::Run run(copier);
    std::size_t arrived = 0;
    const auto await_one = [&] {
      run.wait();
      const std::uint64_t bytes = parts[arrived++].bytes();
      outcome.bytes += bytes;
      if (request.bytes_done != nullptr) request.bytes_done->fetch_add(bytes, std::memory_order_relaxed);
    };
    try {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (run.parts() == kPartsUnderWay) await_one();
        if (i > 0) throw_if_stopped(request, name_, closed_);
        run.begin();
        write_part(request, parts[i], run);
      }
      while (run.parts() > 0) await_one();
    } catch (...) {
      // What is under way must not write into blocks that are somebody else's by then.
      run.wait_for_all();
      throw;
    }
    return outcome;
  }

  // What the GPU copies of it is under way when this returns.
  void write_part(const WriteRequest& request, const TransferPart& part, DeviceCopier::Run& run) {
    MediumPairMap<Group> groups;
    for (std::size_t i = part.first_block; i < part.first_block + part.blocks; ++i) {
      Group& group = groups[medium_of(request.from[i])][medium_of(request.to[i])];
      group.from.push_back(request.from[i]);
      group.to.push_back(request.to[i]);
    }
    for (const Medium from : kMedia) {
      for (const Medium to : kMedia) {
        const Group& group = groups[from][to];
        if (!group.from.empty()) write_group(request, part, from, to, group, run);
      }
    }
  }

  void write_group(const WriteRequest& request, const TransferPart& part, Medium from, Medium to, const Group& group,
                   DeviceCopier::Run& run) {
    if (!local_.on_gpu[from] && !peer_on_gpu_[to]) {
      StripPlan pieces(local_.spans, peer_, part.strips, request.merge);
      pieces.emit(group.from, group.to, [&](std::span<const CopyPiece> batch) {
        copy_pieces(batch, CopyWay::kCached);
        return true;
      });
      return;
    }
    std::vector<PlannedStrip> plan;
    plan_strips(local_.spans[from], peer_[to], part.strips, request.merge, plan);
    const GpuWay way = !local_.on_gpu[from] ? GpuWay::kIn : !peer_on_gpu_[to] ? GpuWay::kOut : GpuWay::kWithin;
    run.copy(way, plan, group.from, group.to, request.merge);
  }

  const char* const name_;
  const GpuSide local_;
  const MediaSpans peer_;
  const MediaSet peer_on_gpu_;
  RouteCost cost_{kCudaPrior};
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  std::shared_ptr<MappedSide> mapped_;  // under mutex_
};

// A peer's memory of one GPU, by the one way or the other.
struct PeerGpu {
  std::unique_ptr<ImportedMemory> imported;
  std::unique_ptr<OpenedMemory> opened;
};

MediumSpan map_imported(const MetadataMedium& medium, int file, const std::shared_ptr<const CudaContext>& context,
                        PeerGpu& kept) {
  kept.imported = std::make_unique<ImportedMemory>(context, file, static_cast<std::size_t>(medium.mapped_bytes));
  return mapped_span(medium, kept.imported->base());
}

MediumSpan map_opened(const MetadataMedium& medium, const std::shared_ptr<const CudaContext>& context, PeerGpu& kept) {
  std::vector<IpcAllocation> allocations(medium.allocations.size());
  for (std::size_t i = 0; i < allocations.size(); ++i) {
    const MetadataAllocation& from = medium.allocations[i];
    static_assert(sizeof(from.handle) == sizeof(CuIpcMemHandle));
    allocations[i].base = from.address;
    allocations[i].bytes = from.bytes;
    std::memcpy(&allocations[i].handle, from.handle, sizeof(from.handle));
  }
  kept.opened = std::make_unique<OpenedMemory>(context, allocations);
  MediumSpan span{medium.blocks, {}};
  for (const MetadataSegment& segment : medium.segments) {
    // read_metadata has checked that each lies in one of them.
    const std::uint64_t bytes = (medium.blocks - 1) * segment.stride + segment.bytes;
    span.segments.push_back(Segment{kept.opened->at(segment.address, bytes), segment.stride, segment.bytes});
  }
  return span;
}

}  // namespace

GpuSide gpu_side_of(const LocalMemory& memory, std::shared_ptr<const CudaContext> gpu) {
  GpuSide side;
  side.kernels = kernels_for(*gpu);
  side.bounds =
      known_copy_bounds(gpu->ordinal()).value_or(CopyBounds{});  // measured when the pool was made, where possible
  side.spans = memory.gpu_spans(*gpu);
  side.on_gpu = memory.on_gpu();
  side.keepalive = memory.keepalive();
  side.context = std::move(gpu);
  return side;
}

std::unique_ptr<Route> make_cuda_loopback_route(GpuSide local, GpuPeer peer) {
  return std::make_unique<CudaRoute>("loopback", std::move(local), std::move(peer.spans), std::move(peer.keepalive),
                                     peer.on_gpu, nullptr);
}

std::unique_ptr<Route> make_cuda_ipc_route(GpuSide local, const PeerMetadata& metadata, const MediaFiles& files,
                                           bool opens_handles) {
  const auto kept = std::make_shared<MediumMap<PeerGpu>>();
  std::shared_ptr<MappedPeer> host;
  MediaSpans spans;
  MediaSet on_gpu{};
  MediaFiles host_files = kNoFiles;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (metadata.media[i].kind == MemoryKind::kHost && metadata.media[i].mapped_bytes > 0) host_files[i] = files[i];
  }
  if (host_files != kNoFiles) {
    host = MappedPeer::make(metadata, host_files);
    spans = host->spans();
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    const MetadataMedium& medium = metadata.media[i];
    const bool imports = medium.mapped_bytes > 0 && files[i] >= 0;
    const bool opens = opens_handles && !medium.allocations.empty();
    if (medium.kind != MemoryKind::kGpu || !(imports || opens)) continue;
    try {
      PeerGpu& gpu = (*kept)[i];
      spans[i] = imports ? map_imported(medium, files[i], local.context, gpu) : map_opened(medium, local.context, gpu);
      on_gpu[i] = true;
    } catch (const Error& error) {
      // Two GPUs, perhaps, that do not reach each other: the peer's host memory is reached all the same.
      if (host == nullptr || error.code() != ErrorCode::kUnsupported) throw;
    }
  }
  if (host == nullptr && on_gpu == MediaSet{}) {
    throw Error(ErrorCode::kUnsupported, "the peer has no memory that a GPU can map");
  }
  return std::make_unique<CudaRoute>("cuda_ipc", std::move(local), std::move(spans), kept, on_gpu, std::move(host));
}

}  // namespace kvpool
