// UCX as kvpool uses it: one-sided puts into the memory of a peer, over whatever UCX finds (RDMA, CUDA, CMA, TCP).
//
//   UcxContext   ucx_context.h: the library, the pool's memory registered with it once, one thread that answers while
//                nobody waits
//   UcxWorker    ucx_worker.h: where peers connect: an address, and the endpoints made from it
//   UcxRoute     ucx_route.h: the way to one peer: an endpoint, and the keys to the peer's memory
//
// UCX is opened at run time (ucx_library.h); the build needs only its vendored header. Those four files include it;
// this one does not, so that code outside of this folder can include it. Make a context after fork(), never before: in
// a child every call fails, and teardown frees nothing.
//
// What proves that a writer is gone. UCX writes into a receiver's memory in three ways, each with its own proof:
//
//   transports of the route      who writes                    nothing is written any more when
//   cma, xpmem, knem, cuda_ipc   the sender's process          its pidfd is readable
//   posix, sysv, tcp, ud         the receiver's own worker, on  the receiver has closed the worker that the sender
//                                messages of the sender         knows: what waits in a socket or a queue outlives the
//                                                               sender, and closing an endpoint leaves tcp readable
//   rc, dc                       the receiver's adapter         the receiver has closed that worker, which destroys its
//                                                               queue pairs (dc shares one among endpoints, so closing
//                                                               an endpoint is no proof)
//
// A route between two hosts is therefore fenced by UcxWorker::close(), one between two processes of a host by that and
// the pidfd. To fence one peer alone, give every peer a separate worker: workers share the registered memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/cuda/context.h"

namespace kvpool {

// How memory of a GPU was allocated, which decides whether a peer can open it.
enum class UcxGpuMemory : std::uint8_t {
  kPlain,    // one allocation (cuMemAlloc): a process can be given it as an IPC handle
  kVirtual,  // one physical allocation (cuMemCreate), mapped as one range
  kTensors,  // an engine's, each segment with an IPC handle
  kUnknown,  // an engine's without an IPC handle: perhaps a range of several allocations
};

// The pool's memory that UCX may register.
struct UcxLocal {
  MediaSpans spans;
  std::shared_ptr<const CudaContext> gpu;           // the GPU that the media below are on; null: all are on the host
  MediumMap<std::optional<UcxGpuMemory>> on_gpu{};  // nullopt: on the host
};

// Names, for people, the library that UcxContext::make() would open, "UCX 1.22.0 in /usr/lib/libucp.so.0", without
// opening a device. Throws as make() does.
std::string describe_ucx(const std::string& where);

// Opens UCX and returns the lanes by which it reaches another process on this host, as UcxRoute::lanes() does. Throws
// as UcxContext::make() does.
std::vector<std::string> probe_ucx_lanes(const std::string& where);

}  // namespace kvpool
