// A way to write into the blocks of one peer.
//
// Routes are either one-sided (loopback, shm, cma, ucx put: the bytes land without the receiver's doing) or placed by
// the receiver (sock), which checks epoch, owner and generation of every block first. The difference decides what a
// receiver must do with blocks whose writer it lost: see docs/invariants.md.
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
#include "kvpool/base/strips.h"
#include "kvpool/routes/route_health.h"

namespace kvpool {

class DeviceOrder;
class RouteCost;

struct WriteRequest {
  std::uint64_t transfer = 0;  // id; what is placed by the receiver carries it
  std::span<const BlockStrip> strips;
  std::span<const Address> from;       // blocks of this pool
  std::span<const Address> to;         // as many blocks of the peer
  const DeviceOrder* after = nullptr;  // what has to end before the blocks are read; waited for by who calls write()
  bool merge = true;                   // neighbours that lie in a row on both sides are one piece
  std::int64_t deadline_ns = 0;        // CLOCK_MONOTONIC; 0 is long ago
  const std::atomic<bool>* cancelled = nullptr;
  std::atomic<std::uint64_t>* bytes_done = nullptr;
};

struct WriteOutcome {
  std::uint64_t calls = 0;  // pieces handed to the network, or copied
  std::uint64_t bytes = 0;
};

struct RouteTraits {
  bool one_sided = true;
  bool by_caller = true;  // cheap enough to run in the caller's thread for small transfers
  bool waits = false;     // a write may have to wait for the peer to take it
  bool whole = true;      // sender and receiver have the whole content at hand, so that they can compare checksums
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
  // Whether it can read this pool's blocks of this medium: those on a GPU, no route can that copies by the CPU.
  virtual bool reads(Medium) const noexcept { return true; }
  // Whether it is made for writes between these media. If not, others that can do them are asked first.
  virtual bool suits(const MediaSet& /*from*/, const MediaSet& /*to*/) const noexcept { return true; }

  // Whether a write between these media could begin now. If not, it gets ready meanwhile, and a write waits for that:
  // others that are ready are taken first.
  virtual bool ready(const MediaSet& /*from*/, const MediaSet& /*to*/) noexcept { return true; }
  // The same, and nothing begins by asking.
  virtual bool is_ready(const MediaSet& /*from*/, const MediaSet& /*to*/) const noexcept { return true; }

  // Whether a write would do better in another thread now: this one brings what peers send, and must not wait for them.
  virtual bool wants_other_thread() noexcept { return false; }

  // What a write of so many pieces and bytes between these media costs, by what was measured, and what this route took
  // before. Microseconds.
  virtual double estimate_us(const MediaSet& from, const MediaSet& to, std::uint64_t pieces,
                             std::uint64_t bytes) const noexcept = 0;
  // What that is reckoned by, for who measures it. Null: nobody does. Lives as long as the route.
  virtual RouteCost* cost() noexcept { return nullptr; }

  // Returns when the bytes are where they belong and visible to whoever learns of it by a later message on the control
  // link (one-sided), or are handed to the link in order before such a message (placed by the receiver). Throws Error
  // kPeerLost, kDeadline, kCancelled, kArgument (an address names no block that this route reaches: nothing was
  // written), kRouteFailed or kUnsupported (the peer goes on); then nothing of this call is written any more when it
  // has thrown. REQUIRES: strips lie within the
  // content of the blocks on both sides, no two destinations overlap, as many destinations as sources.
  virtual WriteOutcome write(const WriteRequest& request) = 0;

  // What receives here that the peer writes by this route, when that takes this side's help.
  virtual std::shared_ptr<RouteReceiver> route_receiver() const noexcept { return nullptr; }

  // Writes that come later fail with kPeerLost, those under way soon. Idempotent, and waits for nothing.
  virtual void close() noexcept = 0;
  // After close(): what it still has open of the peer, if giving that back may wait for a GPU; once, then null. Whoever
  // drops it does so in a thread that nobody waits for, and says only then that this side writes no more.
  virtual std::shared_ptr<void> let_go() noexcept { return nullptr; }

  // How its writes have ended: see write_by().
  RouteHealth& health() noexcept { return health_; }
  const RouteHealth& health() const noexcept { return health_; }

 private:
  RouteHealth health_;
};

}  // namespace kvpool
