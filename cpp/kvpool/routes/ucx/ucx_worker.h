// One UCX worker: its lock, its progress, and the peers' endpoints that hang on it.
//
// UCX runs nothing by itself: operations advance only while a thread calls progress(). A thread
// that waits for its operation does; while no thread waits, the context's thread does, woken by the worker's
// descriptor. Everything of UCX, callbacks included, happens under the worker's lock.
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
  bool failed = false;          // by UCX's word, which is `why`
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

  // For PeerMetadata::ucx: where this worker is reached, and the keys to the pool's memory.
  const Bytes& blob() const noexcept { return blob_; }
  // Throws kProtocol (a malformed metadata, or one whose blocks lie outside of what its keys open), kUnsupported (no
  // transport in common), kClosed. `pidfd`: of the peer when it is on this host, else -1; it stays open as long as the
  // route lives, and is asked before every batch, because UCX knows a process by its number only.
  // A route that threw kPeerLost is closed for good: a new one can be made from the metadata when the peer still lives.
  std::shared_ptr<UcxRoute> make_route(const PeerMetadata& metadata, int pidfd = -1);

  // Ends all its routes, and everything that peers have under way here: when it has returned true, no adapter and no
  // thread of this process writes what they sent to this worker. Waits for writes in other threads to notice. False,
  // which UCX should not let happen: it did not let go within 5 s, and nothing is proved. Idempotent.
  bool close() noexcept;

  // For routes. What says `lock` is called with the worker's lock held; the waiting ones let go of it meanwhile.
  UcxLock lock() noexcept { return UcxLock(lock_); }
  UcxContext& context() noexcept { return *context_; }
  const UcxLibrary& ucx() const noexcept { return ucx_; }

  // Throws kUnsupported, kClosed.
  std::shared_ptr<UcxPeer> connect(const UcxLock& lock, const UcxBlob& blob);
  // Cancels what the endpoint has under way: those operations complete with an error, soon. Idempotent.
  void shut(const UcxLock& lock, UcxPeer& peer) noexcept;
  void drop(const UcxLock& lock, const std::shared_ptr<UcxPeer>& peer) noexcept;

  // Brackets whatever begins operations: the thread leaves the worker alone in between, and close() waits for the end.
  void enter(const UcxLock& lock) noexcept;
  void leave(const UcxLock& lock) noexcept;
  // Others wait for the lock.
  bool wanted() const noexcept { return lock_.wanted(); }

  // An operation has completed, or an endpoint failed: those who wait look again. From callbacks.
  void note_completion() noexcept { ++completions_; }
  // Returns false when there is more to do at once. UCX's descriptor signals new events only: a thread
  // sleeps on it only after this has returned true.
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
  int wake_ = -1;                  // an eventfd: wakes the one that sleeps on the two
  Bytes blob_;
  std::uint64_t watch_ = 0;
  std::list<std::shared_ptr<UcxPeer>> peers_;

  std::condition_variable_any woken_;  // those who wait while another one sleeps on the descriptor
  std::uint64_t completions_ = 0;
  std::uint64_t completions_told_ = 0;
  std::size_t waiting_ = 0;  // on woken_
  bool sleeping_ = false;    // a thread sleeps on the descriptor
  std::size_t writers_ = 0;
  bool parked_ = false;  // the thread found writers at work; the last one that leaves calls it back
  bool closed_ = false;
};

}  // namespace kvpool
