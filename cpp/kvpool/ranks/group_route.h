// The route from one logical instance to another: a write becomes an order to each rank, and ends when all have.
//
// To a session it is a route like others, so the protocol between schedulers is the one between pools. What a rank does
// with an order is behind RankWriter: a rank of another process is sent the order.
//
// Invariants
//   G1  write() returns or throws only after every rank that was given an order has reported; a report, but for
//       kPeerLost, says that nothing of its order is written any more. So the receiver may be told that the transfer is
//       complete, or is given up.
//   G2  After the first failure no rank is given an order, and those that have one are asked to stop. The first failure
//       is the one that is thrown, but for kPeerLost, which hides every other: it says that G1 cannot be kept, because
//       a rank is lost, and something of its order may still be written.
//
// Thread-safety: write() may be called by several threads at once; reports may come from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/ranks/rank_group.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// How one rank of the sender carries out orders.
class RankWriter {
 public:
  using Report = std::function<void(const WriteOutcome& outcome, const Error* error)>;
  virtual ~RankWriter() = default;

  // Writes what the order says, for the blocks of the request (its strips are the logical ones, and not looked at).
  // Calls `report` exactly once, from here or from another thread, by the request's deadline or soon after, when
  // nothing of this order is written any more: all is in place and visible, or it failed. May throw instead. Order and
  // request live until the report.
  virtual void write(const RankOrder& order, const WriteRequest& request, Report report) = 0;
  // What is under way for this transfer is to end soon, by its report.
  virtual void stop(std::uint64_t transfer) noexcept = 0;
  virtual void close() noexcept = 0;  // as Route::close
};

// `ranks` has, by number, a writer for each rank of the plan's sender that has something to send; else throws
// kArgument.
std::unique_ptr<Route> make_group_route(std::shared_ptr<const ReshardPlan> plan,
                                        std::vector<std::unique_ptr<RankWriter>> ranks);

}  // namespace kvpool
