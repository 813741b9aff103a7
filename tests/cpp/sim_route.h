// Writing into a simulated peer's blocks: one-sided, byte by byte at later times and in any order, or as data frames on
// the link. A write is taken step by step, so that whatever can happen to either side happens between two steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/routes/route.h"
#include "sim_link.h"

namespace kvpool {

class SimRoute;

// One write under way. What its request points to outlives it.
class SimWrite {
 public:
  // Throws kArgument: nothing was written.
  SimWrite(const SimRoute& route, const WriteRequest& request);
  // Writes a little. True when all of it is where it belongs. Throws what Route::write() throws; then it is over.
  bool step();
  const WriteOutcome& outcome() const noexcept { return outcome_; }

 private:
  void check_open() const;
  void check_stopped() const;
  void copy_some();
  void send_frame();

  const SimRoute& route_;
  const WriteRequest request_;
  std::vector<CopyPiece> pieces_;       // that have not landed
  std::optional<TransferParts> parts_;  // of a write that the receiver places
  std::size_t next_part_ = 0;
  WriteOutcome outcome_;
};

class SimRoute final : public Route {
 public:
  // `one_sided`: `peer` are the peer's blocks, as this process can write them. Everything given outlives the route.
  SimRoute(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor writer, bool one_sided,
           const MediaSpans& local, const MediaSpans& peer, std::shared_ptr<SimLink> link);

  const char* name() const noexcept override { return one_sided_ ? "sim" : "sim-sock"; }
  RouteTraits traits() const noexcept override { return {.one_sided = one_sided_, .by_caller = true, .waits = false}; }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept override;
  std::shared_ptr<const MediaSpans> readable() const noexcept override {
    return one_sided_ ? std::shared_ptr<const MediaSpans>(std::shared_ptr<void>(), &peer_) : nullptr;
  }
  // All steps at once.
  WriteOutcome write(const WriteRequest& request) override;
  void close() noexcept override { closed_ = true; }

 private:
  friend class SimWrite;
  SimClock& clock_;
  const SimFaults& faults_;
  const SimWatch& watch_;
  const SimClock::Actor writer_;
  const bool one_sided_;
  const MediaSpans& local_;
  const MediaSpans& peer_;
  const std::shared_ptr<SimLink> link_;
  bool closed_ = false;
};

}  // namespace kvpool
