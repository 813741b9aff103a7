// A way to write into the blocks of one peer.
//
// Routes are either one-sided (loopback, shm, cma, ucx put: the bytes land without the receiver's help) or placed by
// the receiver (sock), which first checks incarnation, owner and generation of every block. The difference decides what
// a receiver must do with a block after it has lost the peer that writes it: see docs/invariants.md.
//
// Thread-safety: write() may be called by several threads at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kvpool/base/address.h"
#include "kvpool/base/media_set.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/segment.h"
#include "kvpool/base/strips.h"
#include "kvpool/routes/route_health.h"
#include "kvpool/routes/write_size.h"

namespace kvpool {

class DeviceOrder;
class RouteCost;

struct WriteRequest {
  std::uint64_t transfer = 0;  // id, which goes with content that the receiver places
  std::span<const BlockStrip> strips;
  std::span<const Address> from;  // blocks of this pool
  std::span<const Address> to;    // as many blocks of the peer
  const DeviceOrder* after =
      nullptr;        // GPU work that must end before the blocks are read; the caller of write() waits for it
  bool merge = true;  // joins pieces that are contiguous on both sides
  // Pieces may share a message, or a call of the kernel, where the route has these. False: each piece is a call.
  bool gather = true;
  std::int64_t deadline_ns = 0;  // CLOCK_MONOTONIC; 0 is in the past
  const std::atomic<bool>* cancelled = nullptr;
  std::atomic<std::uint64_t>* bytes_done = nullptr;
};

struct WriteOutcome {
  // Messages, calls of the kernel, puts or copies, by the plan: what a route cuts because it is long, or because the
  // link is slow, counts once.
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
  std::uint64_t pieces = 0;  // contiguous on the sides that the route sees: what the cost depends on
};

struct RouteTraits {
  bool one_sided = true;
  bool by_caller = true;  // cheap enough to run in the caller's thread for small transfers
  bool waits = false;     // a write may have to wait for the peer to take it
  bool whole = true;      // sender and receiver have the whole content, so they can compare checksums
  bool by_name = false;   // only where the settings of both sides name it
};

class RouteReceiver;

class Route {
 public:
  virtual ~Route() = default;
  virtual const char* name() const noexcept = 0;
  virtual RouteTraits traits() const noexcept = 0;
  // Whether it can write into the peer's blocks of this medium: memory that a peer adopted, say, cannot be mapped.
  virtual bool reaches(Medium) const noexcept { return true; }
  // Whether it can read this pool's blocks of this medium. A route that copies with the CPU cannot read blocks on a
  // GPU.
  virtual bool reads(Medium) const noexcept { return true; }
  // Whether it is made for writes between these media. If not, other routes that can do them are preferred.
  virtual bool suits(const MediaSet& /*from*/, const MediaSet& /*to*/) const noexcept { return true; }

  // Whether a write between these media could begin now. If not, the route starts to get ready, and a write would wait
  // for that; routes that are ready are preferred.
  virtual bool ready(const MediaSet& /*from*/, const MediaSet& /*to*/) noexcept { return true; }
  // The same, but asking does not make the route get ready.
  virtual bool is_ready(const MediaSet& /*from*/, const MediaSet& /*to*/) const noexcept { return true; }

  // Whether the caller should let another thread write: this thread reads what peers send, and must not wait for them.
  virtual bool wants_other_thread() noexcept { return false; }

  // The estimated cost, in microseconds, of a write of this size between these media: from
  // measurements, and from this route's earlier writes, as they count now.
  virtual double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                             std::int64_t now_ns) const noexcept = 0;
  // The cost model behind the estimate, for the code that measures it; null if it is not measured. Lives as long as the
  // route.
  virtual RouteCost* cost() noexcept { return nullptr; }

  // Returns when the bytes are in place and visible to a peer that receives a later message on the control link
  // (one-sided), or are handed to the link in order before such a message (placed by the receiver). Throws Error
  // kPeerLost, kDeadline, kCancelled, kArgument (an address names no block that this route reaches: nothing was
  // written), kRouteFailed or kUnsupported (the peer stays connected). After any of them but kPeerLost, this call
  // writes nothing any more. REQUIRES: strips lie within the content of the blocks on both sides, no two destinations
  // overlap, as many destinations as sources.
  virtual WriteOutcome write(const WriteRequest& request) = 0;

  // The peer's blocks at addresses of this process, as far as they are mapped here, for reading; null if the route has
  // none. Keeps the mapping.
  virtual std::shared_ptr<const MediaSpans> readable() const noexcept { return nullptr; }

  // Receives here what the peer writes by this route, if the route needs this side's help; else null.
  virtual std::shared_ptr<RouteReceiver> route_receiver() const noexcept { return nullptr; }

  // Makes later writes fail with kPeerLost at once, and writes in progress soon. Idempotent, and does not wait.
  virtual void close() noexcept = 0;
  // After close(): the peer's memory that the route still has open, if releasing it may wait for a GPU; the first call
  // returns it, later ones null. The caller drops it in a thread that nothing waits for, and only then tells the peer
  // that this side writes no more.
  virtual std::shared_ptr<void> let_go() noexcept { return nullptr; }

  // Records how its writes have ended: see write_by().
  RouteHealth& health() noexcept { return health_; }
  const RouteHealth& health() const noexcept { return health_; }

 private:
  RouteHealth health_;
};

}  // namespace kvpool
