// UCX as kvpool uses it: one-sided puts into the memory of a peer, over whatever UCX finds (RDMA, CUDA, CMA, TCP).
//
//   UcxContext   the library, the pool's memory registered with it once, one thread that answers while nobody waits
//   UcxWorker    where peers connect: an address, and the endpoints made from it
//   UcxRoute     the way to one peer: an endpoint, and the keys to the peer's memory
//
// UCX is opened at run time (ucx_library.h); nothing here needs it to build. Make a context after fork(), never before:
// in a child every call fails, and teardown frees nothing.
//
// Who proves that a writer is gone. UCX writes into a receiver's memory in three ways, and each ends otherwise:
//
//   transports of the route      who writes                    nothing is written any more when
//   cma, xpmem, knem, cuda_ipc   the sender's process          its pidfd is readable
//   posix, sysv, tcp, ud         the receiver's own worker, on  the receiver has closed the worker that the sender
//                                messages of the sender         knows: what waits in a socket or a queue outlives the
//                                                               sender, and closing an endpoint leaves tcp readable
//   rc, dc                       the receiver's adapter         the receiver has closed that worker, too: its queue
//                                                               pairs are destroyed (dc shares one among endpoints, so
//                                                               an endpoint alone is no proof)
//
// A route between two hosts is therefore fenced by UcxWorker::close(), one between two processes of a host by that and
// the pidfd. To fence one peer alone, give every peer a separate worker: workers share the registered memory.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/cuda/context.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// How memory of a GPU was made: what decides whether a peer can be given it.
enum class UcxGpuMemory : std::uint8_t {
  kPlain,    // one allocation (cuMemAlloc): a process can be given it as an IPC handle
  kVirtual,  // one physical allocation (cuMemCreate), mapped as one range
  kTensors,  // an engine's, each segment with an IPC handle
  kUnknown,  // an engine's that has none: perhaps a range of several allocations
};

// The pool's memory, as UCX is offered it.
struct UcxLocal {
  MediaSpans spans;
  std::shared_ptr<const CudaContext> gpu;           // that media below are on; null: none is
  MediumMap<std::optional<UcxGpuMemory>> on_gpu{};  // nothing: the host's
};

class UcxRoute : public Route {
 public:
  // How UCX reaches the peer, one line a lane, as ucp_ep_print_info has it: transport, device, what the lane is for.
  // For people and tests.
  virtual std::vector<std::string> lanes() = 0;
};

// Thread-safety: all of it.
class UcxWorker {
 public:
  virtual ~UcxWorker() = default;

  // For PeerMetadata::ucx: where this worker is reached, and the keys to the pool's memory.
  virtual const Bytes& blob() const noexcept = 0;
  // Throws kProtocol (a malformed metadata, or one whose blocks lie outside of what its keys open), kUnsupported (no
  // transport in common), kClosed. `pidfd`: of the peer when it is on this host, else -1; it stays open as long as the
  // route lives, and is asked before every batch, because UCX knows a process by its number only.
  // A route that threw kPeerLost is closed for good: a new one can be made from the metadata when the peer still lives.
  virtual std::shared_ptr<UcxRoute> make_route(const PeerMetadata& metadata, int pidfd = -1) = 0;

  // Ends all its routes, and everything that peers have under way here: when it has returned true, no adapter and no
  // thread of this process writes what they sent to this worker. Waits for writes in other threads to notice. False,
  // which UCX should not let happen: it did not let go within 5 s, and nothing is proved. Idempotent.
  virtual bool close() noexcept = 0;
};

class UcxContext {
 public:
  // `where`: "system", or a folder that holds libucp.so.0 (or a lib folder that does), or the path of libucp itself.
  // Throws kUnsupported when there is no usable UCX there; the text says what to install. Registers the memory that
  // `local` describes, which stays what it is as long as `keepalive` lives; of a GPU's what UCX takes: see refused().
  static std::shared_ptr<UcxContext> make(const std::string& where, const UcxLocal& local,
                                          std::shared_ptr<void> keepalive);
  virtual ~UcxContext() = default;

  // Why a medium that is on a GPU is not reached by UCX; empty for one that is.
  virtual const MediumMap<std::string>& refused() const noexcept = 0;
  // Its keys hold IPC handles. A peer's UCX opens them, and keeps them open when the route is closed, and the worker:
  // the end of its process alone is known to close them.
  virtual bool gives_handles() const noexcept = 0;

  virtual std::shared_ptr<UcxWorker> make_worker() = 0;
};

// A context and one worker in it, for all peers.
std::shared_ptr<UcxWorker> make_ucx_worker(const std::string& where, const MediaSpans& local,
                                           std::shared_ptr<void> keepalive);

// For people: what UcxContext::make() would open, "UCX 1.22.0 in /usr/lib/libucp.so.0", without opening a device.
// Throws as it does.
std::string describe_ucx(const std::string& where);

// Opens it, and asks by which lanes it reaches another process on this host, one a line as UcxRoute::lanes() has them.
// Throws as UcxContext::make() does.
std::vector<std::string> probe_ucx_lanes(const std::string& where);

}  // namespace kvpool
