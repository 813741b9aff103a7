// The route from one logical instance to another. A write becomes one order to each rank, and ends when all orders have
// ended.
//
// A session uses it like any other route, so schedulers speak the same protocol as pools. A RankWriter carries out the
// order; for a rank in another process it sends the order there.
//
// Invariants
//   G1  write() returns or throws only after every rank that it gave an order has reported. Any report but kPeerLost
//       says that the rank has stopped writing for this order. So the sender may tell the receiver that the transfer is
//       complete, or cancelled.
//   G2  After the first failure write() gives no more orders, and asks the ranks that have one to stop. It throws the
//       first failure, except that kPeerLost replaces any other: the rank is lost and may still be writing, so G1 does
//       not hold.
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

  // Writes what the order says, for the blocks of the request (whose strips are the logical ones and are ignored).
  // Calls `report` exactly once, from here or from another thread, by the request's deadline or soon after, when
  // nothing of this order is written any more: all is in place and visible, or it failed. May throw instead. Order and
  // request live until the report.
  virtual void write(const RankOrder& order, const WriteRequest& request, Report report) = 0;
  // Asks the writes of this transfer to end soon; their report follows.
  virtual void stop(std::uint64_t transfer) noexcept = 0;
  virtual void close() noexcept = 0;  // as Route::close
};

// `ranks` has, by number, a writer for each rank of the plan's sender that has something to send; else throws
// kArgument.
std::unique_ptr<Route> make_group_route(std::shared_ptr<const ReshardPlan> plan,
                                        std::vector<std::unique_ptr<RankWriter>> ranks);

}  // namespace kvpool
