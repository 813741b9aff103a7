// A rank that writes by its own routes, in the caller's thread, channel after channel: it stands for a worker in
// tests.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>

#include "kvpool/ranks/group_route.h"

namespace kvpool::testing {

class LocalRank final : public RankWriter {
 public:
  using Channels = std::unordered_map<std::uint32_t, std::shared_ptr<Route>>;  // by rank of the receiver
  explicit LocalRank(Channels channels) : channels_(std::move(channels)) {}

  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    WriteOutcome sum;
    WriteRequest part = request;
    part.bytes_done = nullptr;  // counted by the group, which knows how much there is
    for (const ChannelWrite& channel : order.channels) {
      part.strips = channel.strips;
      const WriteOutcome outcome = channels_.at(channel.to_rank)->write(part);
      sum.calls += outcome.calls;
      sum.bytes += outcome.bytes;
    }
    report(sum, nullptr);
  }
  void stop(std::uint64_t /*transfer*/) noexcept override {}
  void close() noexcept override {
    for (const auto& [rank, route] : channels_) route->close();
  }

 private:
  const Channels channels_;
};

}  // namespace kvpool::testing
