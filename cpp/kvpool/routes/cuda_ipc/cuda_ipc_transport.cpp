#include "kvpool/routes/cuda_ipc/cuda_ipc_transport.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <utility>

#include "kvpool/arena/device_memory.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/ipc_memory.h"
#include "kvpool/net/descriptor.h"
#include "kvpool/routes/cuda_ipc/cuda_route.h"

namespace kvpool {
namespace {

// What lets peers map memory of a GPU: a descriptor of the whole of it, or a handle of each allocation.
struct GpuExport {
  Descriptor descriptor;
  std::vector<MetadataAllocation> allocations;
};

// Throws as CudaDriver::require.
GpuExport export_memory(const Arena& arena) {
  GpuExport exported;
  const DeviceMemory* const owned = arena.device_memory();
  if (owned != nullptr && owned->kind() == DeviceMemoryKind::kVirtual) {
    const int fd = owned->export_descriptor();
    exported.descriptor = Descriptor::open([fd] { return fd; });
    return exported;
  }
  // Plain memory, and an engine's. What has no handle goes by other transports.
  std::vector<std::span<const std::byte>> ranges;
  for (const Segment& segment : arena.segments()) {
    ranges.emplace_back(segment.base, (arena.blocks() - 1) * segment.stride + segment.bytes);
  }
  for (const IpcAllocation& allocation : ipc_allocations(*arena.context(), ranges)) {
    MetadataAllocation& given =
        exported.allocations.emplace_back(MetadataAllocation{allocation.base, allocation.bytes, {}});
    std::memcpy(given.handle, &allocation.handle, sizeof(given.handle));
  }
  return exported;
}

// A pool without a GPU offers its host memory: the peer's GPU may write there.
class CudaIpcTransport final : public Transport {
 public:
  explicit CudaIpcTransport(const TransportSetup& setup) {
    for (const Medium medium : kMedia) {
      const Arena& arena = *setup.memory.arena(medium);
      if (arena.on_device() && arena.blocks() > 0) exports_[medium] = export_memory(arena);
    }
  }

  std::shared_ptr<Grant> offer(const LocalMemory& memory, Offer& offer) override {
    offer.add_host_files(memory);
    const std::lock_guard lock(mutex_);
    for (const Medium medium : kMedia) {
      if (exports_[medium].descriptor) offer.files[medium] = exports_[medium].descriptor.get();
      offer.metadata.media[medium].allocations = exports_[medium].allocations;
    }
    return nullptr;
  }
  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    const auto gpu = memory.gpu();
    if (gpu == nullptr || !peer.same_host) return;
    const MediaFiles files = peer.files();
    const bool opens_handles = has_handles(peer.metadata) && !peer.is_here();
    if (files == kNoFiles && !opens_handles) return;
    routes.push_back(make_cuda_ipc_route(gpu_side_of(memory, gpu), peer.metadata, files, opens_handles));
  }
  Exposure exposure(const PeerEnd& peer) const override {
    if (!peer.has_gpu() || !peer.same_host || !peer.is_local()) return {};
    return {.by_process = true, .by_gpu = true, .by_handle = gives_handles()};
  }
  void let_go() noexcept override {
    MediumMap<Descriptor> closed;  // without the lock
    const std::lock_guard lock(mutex_);
    for (const Medium medium : kMedia) closed[medium] = std::move(exports_[medium].descriptor);
  }

 private:
  // Who has opened them must have closed them before the memory is freed.
  bool gives_handles() const noexcept {
    return std::ranges::any_of(exports_, [](const GpuExport& exported) { return !exported.allocations.empty(); });
  }

  std::mutex mutex_;              // guards the descriptors; all else is set by the constructor
  MediumMap<GpuExport> exports_;  // of media on a GPU
};

}  // namespace

std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportSetup& setup) {
  return std::make_unique<CudaIpcTransport>(setup);
}

}  // namespace kvpool
