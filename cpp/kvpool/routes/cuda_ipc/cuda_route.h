// Routes by which a GPU of this process copies: from its own memory or the pool's page-locked host memory to a peer's,
// which it has mapped.
//
// `loopback`: the peer is another pool of this process. `cuda_ipc`: another process on this host. Its GPU memory came
// as a file descriptor and is imported, or as IPC handles and is opened; its host memory, as for shm, is mapped, and
// registered with the driver when something is first written there (host_reach.h). One copy, by the GPU, on streams of
// its own: when write() returns the bytes are where they belong, and visible to whatever the peer starts on its GPU
// later. When the route is closed and no write is under way, nothing of the peer is mapped any more.
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

// A write is cut into parts of so many bytes, and two of them are under way. Whether to stop is looked at before each:
// a bus takes some ten milliseconds for two. A GPU copies one in a tenth of a millisecond, beside which what lies
// between the end of a part and the CPU's next is little, and hidden by the other part.
inline constexpr std::uint64_t kCudaPartBytes = std::uint64_t{256} << 20;

// The local side: `spans` describes memory that `keepalive` keeps, all of it reachable for this GPU and page-locked
// where it is the host's. Media that are not have no blocks.
struct GpuSide {
  std::shared_ptr<const CudaContext> context;
  const cuda::KernelSet* kernels = nullptr;  // null: the copy engines copy everything
  CopyBounds bounds;                         // and where not, long pieces
  MediaSpans spans;
  MediaSet on_gpu{};  // media that are not the host's
  std::shared_ptr<void> keepalive;
  std::uint64_t part_bytes = kCudaPartBytes;
};

// All that this GPU reaches of the memory.
GpuSide gpu_side_of(const LocalMemory& memory, std::shared_ptr<const CudaContext> gpu);

// A pool of this process, likewise.
struct GpuPeer {
  MediaSpans spans;
  MediaSet on_gpu{};
  std::shared_ptr<void> keepalive;
};

// Throws as CudaDriver::require.
std::unique_ptr<Route> make_cuda_loopback_route(GpuSide local, GpuPeer peer);

// Reaches the media that could be mapped: a GPU that this one cannot access is left out. `opens_handles`: the peer is
// another process, because a driver does not open handles of its process. Throws as MappedPeer::make, and kUnsupported
// when nothing is left. The descriptors are not needed afterwards.
std::unique_ptr<Route> make_cuda_ipc_route(GpuSide local, const PeerMetadata& metadata, const MediaFiles& files,
                                           bool opens_handles);

}  // namespace kvpool
