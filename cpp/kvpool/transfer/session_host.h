// What a session needs of the process around it: time, threads and the pool. The service implements it with threads and
// the kernel's clock; the simulator with a queue of events and a simulated clock, so that it runs the very same
// sessions.
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

class Session;

struct SessionLimits {
  std::int64_t reserve_max_ns = 600'000'000'000;  // a reservation lives at most so long
  std::uint32_t transfers_max = 4096;             // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;          // blocks that one peer may hold here, reserved and lent together
  bool measure_routes = false;           // before writes depend on it, where it is a question: see route_probe.h
  std::int64_t measure_ns = 50'000'000;  // no write of a measurement begins later
  std::size_t request_bytes_max = std::size_t{256} << 20;  // of memory that requests of one peer take: request_bytes.h
};

// One write, with all that its request points to.
struct WriteJob {
  std::shared_ptr<Route> route;
  WriteRequest request;
  std::shared_ptr<void> keep;  // lives until `done` was called
  Priority priority = Priority::kPrefill;
  std::uint64_t peer = 0;  // the incarnation of whom it is for, once a session has it
  std::uint64_t bytes = 0;
  std::function<void(const WriteOutcome& outcome, const Error* error)> done;  // called exactly once
};

// Waits for what the write has to follow, writes in this thread, and calls job.done: once, whatever it throws, which is
// thrown on.
void carry_out(WriteJob& job);

class SessionHost {
 public:
  virtual ~SessionHost() = default;
  virtual BlockHost& blocks() noexcept = 0;
  virtual std::int64_t now_ns() const noexcept = 0;
  virtual const SessionLimits& limits() const noexcept = 0;
  // Counts the transfers of all sessions.
  virtual TransferTally& tally() noexcept = 0;

  // Runs a step that a peer waits for and that may take long, as making room, soon, on a thread where neither another
  // peer nor content that is being written keeps it waiting. `key` stands for the peer: one step after another for
  // each. Throws std::bad_alloc; then it does not run.
  virtual void run(const void* key, std::function<void()> work) = 0;
  // The same for work that waits for the peer: it keeps no other one waiting, however long.
  virtual void run_waiting(const void* key, Priority /*priority*/, std::function<void()> work) {
    run(key, std::move(work));
  }
  // Writes, and calls job.done: in this thread before it returns when that is quick and this thread may be kept, else
  // from another thread. Throws std::bad_alloc; then nothing is written, and job.done is not called.
  virtual void write(WriteJob&& job) = 0;
  // The same in this thread, however long it takes.
  virtual void write_here(WriteJob&& job) { carry_out(job); }
  // The peer wants these blocks back that it has lent: until then they may be used, and given back. Must not wait.
  virtual void recalled(Session& /*session*/, const std::vector<Address>& /*addresses*/,
                        std::int64_t /*deadline_ns*/) noexcept {}
  // The link has ended, and so has every write of this side. May be told more than once.
  virtual void drained(Session& session) noexcept = 0;
  // The GPU that was copying for this side is lost: what it had been told to write may be on its way for ever, so
  // nobody may be told, now or later, that this side writes no more. Called before the write counts as ended.
  virtual void write_lost() noexcept {}
  // Session::tick() is to be called at this time or soon after; calls may come earlier, too.
  virtual void tick_by(std::int64_t at_ns) = 0;
};

}  // namespace kvpool
