// A session's environment: time, threads and the pool. The service implements it with threads and the kernel's clock;
// the simulator with an event queue and a simulated clock, so that it runs the same session code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/routes/route.h"
#include "kvpool/transfer/block_host.h"
#include "kvpool/transfer/request.h"
#include "kvpool/transfer/tally.h"

namespace kvpool {

class PeerReads;
class Session;
struct PeerMetadata;

struct SessionLimits {
  std::int64_t reserve_max_ns = 600'000'000'000;  // the longest life of a reservation
  std::uint32_t transfers_max = 4096;             // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;          // blocks that one peer may hold here, reserved and lent together
  std::uint32_t matched_max = 1U << 22;           // blocks that one peer may hold by matches
  bool measure_routes = false;                    // if there is a choice of routes: see route_probe.h
  std::int64_t measure_ns = 50'000'000;           // a measurement begins no write after this time
  std::size_t request_bytes_max = std::size_t{256} << 20;  // memory of one peer's requests: request_bytes.h
};

// One write, with everything that its request points to.
struct WriteJob {
  std::shared_ptr<Route> route;
  WriteRequest request;
  std::shared_ptr<void> keep;  // lives until `done` was called
  Priority priority = Priority::kPrefill;
  std::uint64_t peer = 0;  // the peer's incarnation; set by the session
  std::uint64_t bytes = 0;
  std::function<void(const WriteOutcome& outcome, const Error* error)> done;  // called exactly once
};

// Waits for the work before the write, writes in this thread, and calls job.done exactly once. Throws what job.done
// throws.
void carry_out(WriteJob& job);

class SessionHost {
 public:
  virtual ~SessionHost() = default;
  virtual BlockHost& blocks() noexcept = 0;
  virtual std::int64_t now_ns() const noexcept = 0;
  virtual const SessionLimits& limits() const noexcept = 0;
  // Counts the transfers of all sessions.
  virtual TransferTally& tally() noexcept = 0;

  // Soon runs a long step for which a peer waits, such as making room, on a thread that neither other peers nor writes
  // occupy. `key` identifies the peer, whose steps run one after another. Throws std::bad_alloc; then it does not run.
  virtual void run(const void* key, std::function<void()> work) = 0;
  // The same for work that waits for the peer: it never delays other peers.
  virtual void run_waiting(const void* key, Priority /*priority*/, std::function<void()> work) {
    run(key, std::move(work));
  }
  // Writes, and calls job.done: before it returns, if the write is quick and may block this thread; otherwise from
  // another thread. Throws std::bad_alloc; then nothing is written, and job.done is not called.
  virtual void write(WriteJob&& job) = 0;
  // The same, always in this thread.
  virtual void write_here(WriteJob&& job) { carry_out(job); }
  // The peer recalls these lent blocks: until the given time they may be used, and should be given back. Must not wait.
  virtual void recalled(Session& /*session*/, const std::vector<Address>& /*addresses*/,
                        std::int64_t /*deadline_ns*/) noexcept {}
  // The link has ended, and so have all writes of this side. May be called more than once.
  virtual void drained(Session& session) noexcept = 0;
  // The GPU that was copying for this side is lost, so its writes may never end: peers must not be told, now or later,
  // that this side no longer writes. Called before the write counts as ended.
  virtual void write_lost() noexcept {}
  // What this peer may read of the pool's blocks; null: nothing. `by_mapping`: it may have this pool's memory mapped.
  virtual std::shared_ptr<PeerReads> make_reads(const PeerMetadata& /*peer*/, bool /*by_mapping*/) { return nullptr; }
  // Schedules a call of Session::tick() for this time or soon after; it may also be called earlier.
  virtual void tick_by(std::int64_t at_ns) = 0;
};

}  // namespace kvpool
