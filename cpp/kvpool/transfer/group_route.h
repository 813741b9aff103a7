// The route from one logical instance to another: a write becomes an order to each rank, and ends when all have.
//
// To a session it is a route like others, so the protocol between schedulers is the one between pools. What a rank does
// with an order is behind RankWriter: a rank in this process writes by its own routes (make_local_rank), one in another
// process is sent the order.
//
// Invariants
//   G1  write() returns or throws only after every rank that was given an order has reported; a report says that
//       nothing of its order is written any more. So the receiver may be told that the transfer is complete, or is
//       given up.
//   G2  After the first failure no rank is given an order, and those that have one are asked to stop. The first
//       failure is the one that is thrown.
//
// Thread-safety: write() may be called by several threads at once; reports may come from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/transfer/rank_group.h"
#include "kvpool/transport/route.h"

namespace kvpool {

// How one rank of the sender carries out orders.
class RankWriter {
 public:
  using Report = std::function<void(const WriteOutcome& outcome, const Error* error)>;
  virtual ~RankWriter() = default;

  virtual bool reaches(Medium medium) const noexcept = 0;
  // Whether it has a way to every rank of the receiver that the order names.
  virtual bool serves(const RankOrder& order) const noexcept = 0;
  // Of one order for so many blocks, microseconds.
  virtual double estimate_us(const RankOrder& order, std::uint64_t blocks) const noexcept = 0;

  // Writes what the order says, for the blocks of the request (its strips are the logical ones, and not looked at).
  // Calls `report` exactly once, from here or from another thread, by the request's deadline or soon after, when
  // nothing of this order is written any more: all is in place and visible, or it failed. May throw instead. Order and
  // request live until the report.
  virtual void write(const RankOrder& order, const WriteRequest& request, Report report) = 0;
  // What is under way for this transfer is to end soon, by its report.
  virtual void stop(std::uint64_t transfer) noexcept = 0;
  virtual void close() noexcept = 0;  // as Route::close
};

// A rank of this process: a route to each rank of the receiver that the plan pairs it with. Writes in the caller's
// thread, lane after lane.
struct RankLane {
  std::uint32_t to_rank = 0;
  std::shared_ptr<Route> route;
};
// Throws kArgument for two lanes to one rank, kUnsupported for a route by which the receiver places the bytes: they
// come by another link than the message that says they are complete, and could come later.
std::unique_ptr<RankWriter> make_local_rank(std::vector<RankLane> lanes);

// `ranks` has, by number, a writer for each rank of the plan's sender that has something to send, which serves it, and
// null for the others; else throws kArgument.
std::unique_ptr<Route> make_group_route(std::shared_ptr<const ReshardPlan> plan,
                                        std::vector<std::unique_ptr<RankWriter>> ranks);

}  // namespace kvpool
