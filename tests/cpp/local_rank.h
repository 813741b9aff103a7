// A rank that writes by routes of its own, in the caller's thread, lane after lane: what stands for a worker in tests.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>

#include "kvpool/transfer/group_route.h"

namespace kvpool::testing {

class LocalRank final : public RankWriter {
 public:
  using Lanes = std::unordered_map<std::uint32_t, std::shared_ptr<Route>>;  // by rank of the receiver
  explicit LocalRank(Lanes lanes) : lanes_(std::move(lanes)) {}

  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    WriteOutcome sum;
    WriteRequest part = request;
    part.bytes_done = nullptr;  // counted by the group, which knows how much there is
    for (const LaneWrite& lane : order.lanes) {
      part.strips = lane.strips;
      const WriteOutcome outcome = lanes_.at(lane.to_rank)->write(part);
      sum.calls += outcome.calls;
      sum.bytes += outcome.bytes;
    }
    report(sum, nullptr);
  }
  void stop(std::uint64_t /*transfer*/) noexcept override {}
  void close() noexcept override {
    for (const auto& [rank, route] : lanes_) route->close();
  }

 private:
  const Lanes lanes_;
};

}  // namespace kvpool::testing
