// One UCX worker: its lock, its progress, and its endpoints to peers.
//
// UCX runs nothing by itself: operations advance only while a thread calls progress(). A thread that waits for its
// operation calls it; while no thread waits, the context's thread calls it, woken by the worker's descriptor. UCX is
// called, and calls back, only under the worker's lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/ucx/ucx_library.h"
#include "kvpool/routes/ucx/ucx_memory.h"
#include "kvpool/routes/ucx/ucx_progress.h"
#include "kvpool/routes/ucx/ucx_turn_lock.h"

namespace kvpool {

class UcxContext;
class UcxRoute;
class UcxWorker;

using UcxLock = std::unique_lock<UcxTurnLock>;

// An endpoint and the keys to the peer's memory. Guarded by the worker's lock.
struct UcxPeer {
  struct Region {
    std::uint64_t base;
    std::uint64_t bytes;
    ucp_rkey_h key;
    bool on_gpu = false;
  };
  UcxWorker* worker = nullptr;
  ucp_ep_h endpoint = nullptr;  // null: closed, by us or after it failed; never opened again
  bool failed = false;          // UCX has reported it, with the status `why`
  ucs_status_t why = UCS_OK;
  std::vector<Region> regions;  // in order of addresses
  std::size_t closing = 0;      // close requests under way: UCX still knows this object

  const Region* find(std::uint64_t address) const noexcept;
};

// Thread-safety: all of it.
class UcxWorker final : public std::enable_shared_from_this<UcxWorker> {
 public:
  explicit UcxWorker(std::shared_ptr<UcxContext> context);
  ~UcxWorker();

  // For PeerMetadata::ucx: this worker's address and the keys to the pool's memory.
  const Bytes& blob() const noexcept { return blob_; }
  // Throws kProtocol (malformed metadata, or blocks outside of the memory that its keys open), kUnsupported (no
  // transport in common), kClosed. `pidfd`: of the peer when it is on this host, else -1; it must stay open as long as
  // the route lives. Each batch polls it first, because UCX knows a process only by its number. A route that threw
  // kPeerLost stays closed; a new one can be made from the metadata if the peer still lives.
  std::shared_ptr<UcxRoute> make_route(const PeerMetadata& metadata, int pidfd = -1);

  // Closes all its routes and ends the peers' writes through it: when it has returned true, no adapter and no thread of
  // this process writes what peers sent to this worker. Waits until writes in other threads have noticed. False when
  // UCX has not released the worker within 5 s, which should not happen; then nothing is proved. Idempotent.
  bool close() noexcept;

  // For routes. A method that takes `lock` REQUIRES that it holds the worker's lock; one that waits releases it
  // meanwhile.
  UcxLock lock() noexcept { return UcxLock(lock_); }
  UcxContext& context() noexcept { return *context_; }
  const UcxLibrary& ucx() const noexcept { return ucx_; }

  // Throws kUnsupported, kClosed.
  std::shared_ptr<UcxPeer> connect(const UcxLock& lock, const UcxBlob& blob);
  // Cancels the endpoint's operations under way: they soon complete with an error. Idempotent.
  void shut(const UcxLock& lock, UcxPeer& peer) noexcept;
  void drop(const UcxLock& lock, const std::shared_ptr<UcxPeer>& peer) noexcept;

  // Code that begins operations calls enter() before and leave() after. In between, the context's thread does not call
  // progress(), and close() waits for leave().
  void enter(const UcxLock& lock) noexcept;
  void leave(const UcxLock& lock) noexcept;
  // Whether other threads wait for the lock.
  bool wanted() const noexcept { return lock_.wanted(); }

  // Callbacks report by it that an operation has completed or an endpoint has failed; waiting threads check again.
  void note_completion() noexcept { ++completions_; }
  // Returns false when there is more to do at once. UCX's descriptor signals only new events: a thread may sleep on it
  // only after this has returned true.
  bool progress(const UcxLock& lock) noexcept;
  // Makes progress until done() or the deadline; spins for at most 50 us, then sleeps. Returns done().
  template <class Done>
  bool wait(UcxLock& lock, std::int64_t deadline_ns, Done&& done) {
    std::int64_t spin_until = 0;
    for (;;) {
      const bool drained = progress(lock);
      if (done()) return true;
      if (!rest(lock, deadline_ns, drained, spin_until)) return false;
    }
  }

 private:
  void serve() noexcept;
  bool rest(UcxLock& lock, std::int64_t deadline_ns, bool drained, std::int64_t& spin_until) noexcept;
  void sleep_on_descriptor(UcxLock& lock, std::int64_t until_ns) noexcept;
  void destroy_keys(UcxPeer& peer) noexcept;

  const std::shared_ptr<UcxContext> context_;
  const UcxLibrary& ucx_;
  UcxTurnLock lock_;
  ucp_worker_h worker_ = nullptr;  // null: closed
  int descriptor_ = -1;            // UCX's, of the worker
  int wake_ = -1;                  // an eventfd that wakes the thread sleeping on both descriptors
  Bytes blob_;
  std::uint64_t watch_ = 0;
  std::list<std::shared_ptr<UcxPeer>> peers_;

  std::condition_variable_any woken_;  // threads wait on it while another one sleeps on the descriptor
  std::uint64_t completions_ = 0;
  std::uint64_t completions_told_ = 0;
  std::size_t waiting_ = 0;  // on woken_
  bool sleeping_ = false;    // a thread sleeps on the descriptor
  std::size_t writers_ = 0;
  bool parked_ = false;  // the context's thread found writers at work; the last writer to leave kicks it
  bool closed_ = false;
};

}  // namespace kvpool
