// Routes by which a GPU of this process copies: from its own memory or the pool's page-locked host memory to a peer's,
// which it has mapped.
//
// `loopback`: the peer is another pool of this process. `cuda_ipc`: another process on this host. The peer's GPU memory
// is imported from a file descriptor or opened from IPC handles; its host memory is mapped, as for shm, and registered
// with the driver for the first write to it (registered_peer_memory.h). The GPU copies once, on separate streams: when
// write() returns the bytes are in place, and visible to later work on the peer's GPU. After the route is closed and
// its last write has ended, no memory of the peer is mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kvpool/base/segment.h"
#include "kvpool/cuda/copy_bounds.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route.h"

namespace kvpool {

class CudaContext;
struct LocalMemory;

// A write is cut into parts of this size, two of which are under way at a time. The route checks before each part
// whether to stop; a bus takes some ten milliseconds for two parts. A GPU copies one in a tenth of a millisecond; the
// other part hides the gap before the CPU issues the next.
inline constexpr std::uint64_t kCudaPartBytes = std::uint64_t{256} << 20;

// The local side: `spans` describes memory that `keepalive` keeps alive. This GPU reaches all of it, and host memory is
// page-locked; media for which that is not so have no blocks.
struct GpuSide {
  std::shared_ptr<const CudaContext> context;
  const cuda::KernelSet* kernels = nullptr;  // null: the copy engines copy everything
  CopyBounds bounds;                         // otherwise they copy long pieces
  MediaSpans spans;
  MediaSet on_gpu{};  // media that are not host memory
  std::shared_ptr<void> keepalive;
  std::uint64_t part_bytes = kCudaPartBytes;
};

// The part of the memory that this GPU reaches.
GpuSide gpu_side_of(const LocalMemory& memory, std::shared_ptr<const CudaContext> gpu);

// A pool of this process, as a peer.
struct GpuPeer {
  MediaSpans spans;
  MediaSet on_gpu{};
  std::shared_ptr<void> keepalive;
};

// Throws as CudaDriver::require.
std::unique_ptr<Route> make_cuda_loopback_route(GpuSide local, GpuPeer peer);

// Reaches the media that could be mapped, without those on a GPU that this one cannot access. `opens_handles`: the peer
// is another process; a driver opens no handle of its process. Throws as MappedPeer::make, and kUnsupported
// when no medium is left. The caller may close the descriptors afterwards.
std::unique_ptr<Route> make_cuda_ipc_route(GpuSide local, const PeerMetadata& metadata, const MediaFiles& files,
                                           bool opens_handles);

}  // namespace kvpool
