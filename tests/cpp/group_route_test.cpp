// The route of a logical instance behaves as the interface of routes says, whatever its ranks do.
#include "kvpool/ranks/group_route.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "fuzz_seeds.h"
#include "local_rank.h"
#include "reshard_model.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::uint32_t kBlocks = 4;

using Contents = std::vector<std::vector<std::byte>>;  // by block number

Sharding sharding_of(const KVShape& shape, std::uint32_t tp, std::uint32_t pp) { return {shape, parallel_of(tp, pp)}; }

std::vector<BlockStrip> whole(const KVShape& shape) { return {{0, 0, shape.block_bytes()}}; }

// Copies between the contents of two ranks; counts, and fails when told to.
class CopyRoute final : public Route {
 public:
  CopyRoute(const Contents& from, Contents& to) : from_(from), to_(to) {}
  const char* name() const noexcept override { return "copy"; }
  RouteTraits traits() const noexcept override { return {.one_sided = one_sided, .by_caller = true, .waits = false}; }
  bool reaches(Medium medium) const noexcept override { return medium == Medium::kDram; }
  double estimate_us(const MediaSet&, const MediaSet&, const WriteSize& size, std::int64_t) const noexcept override {
    return static_cast<double>(size.pieces) + static_cast<double>(size.bytes) / 1000;
  }
  WriteOutcome write(const WriteRequest& request) override {
    if (request.cancelled != nullptr && request.cancelled->load()) throw Error(ErrorCode::kCancelled, "cancelled");
    if (fails) throw Error(ErrorCode::kPeerLost, "the other rank is gone");
    WriteOutcome outcome;
    for (std::size_t i = 0; i < request.from.size(); ++i) {
      for (const BlockStrip& strip : request.strips) {
        std::memcpy(to_[block_of(request.to[i])].data() + strip.to,
                    from_[block_of(request.from[i])].data() + strip.from, strip.bytes);
        ++outcome.calls;
        outcome.bytes += strip.bytes;
      }
    }
    return outcome;
  }
  void close() noexcept override { closed = true; }

  bool one_sided = true;
  bool fails = false;
  bool closed = false;

 private:
  const Contents& from_;
  Contents& to_;
};

// Two logical instances in this process, each byte of the sender's with a value that depends on where it belongs.
struct Instances {
  Instances(const KVShape& shape, const Sharding& from, const Sharding& to)
      : plan(std::make_shared<const ReshardPlan>(plan_reshard(from, to))), block_bytes(shape.block_bytes()) {
    const Sharding unsharded = sharding_of(shape, 1, 1);
    logical.assign(kBlocks, std::vector<std::byte>(shape.block_bytes()));
    std::uint32_t value = 1;
    for (std::vector<std::byte>& block : logical) {
      for (std::byte& byte : block) byte = static_cast<std::byte>((value = value * 1664525U + 1013904223U) >> 24);
    }
    sent = shards(plan_reshard(unsharded, from));
    expected = shards(plan_reshard(unsharded, to));
    received = expected;
    for (Contents& rank : received) {
      for (std::vector<std::byte>& block : rank) std::ranges::fill(block, std::byte{0});
    }
  }

  // The planner, which has separate tests, cuts an unsharded block.
  std::vector<Contents> shards(const ReshardPlan& cut) const {
    std::vector<Contents> ranks;
    ranks.reserve(cut.to.ranks());
    for (std::uint32_t rank = 0; rank < cut.to.ranks(); ++rank) {
      ranks.emplace_back(kBlocks, std::vector<std::byte>(cut.to.rank_bytes(rank)));
    }
    for (const ReshardPair& pair : cut.pairs) {
      for (const BlockStrip& strip : pair.strips) {
        for (std::uint32_t block = 0; block < kBlocks; ++block) {
          std::memcpy(ranks[pair.to_rank][block].data() + strip.to, logical[block].data() + strip.from, strip.bytes);
        }
      }
    }
    return ranks;
  }

  std::unique_ptr<Route> route() {
    std::vector<LocalRank::Channels> channels(plan->from.ranks());
    for (const ReshardPair& pair : plan->pairs) {
      routes.push_back(std::make_shared<CopyRoute>(sent[pair.from_rank], received[pair.to_rank]));
      channels[pair.from_rank].emplace(pair.to_rank, routes.back());
    }
    std::vector<std::unique_ptr<RankWriter>> ranks(plan->from.ranks());
    for (std::uint32_t rank = 0; rank < plan->from.ranks(); ++rank) {
      if (!channels[rank].empty()) ranks[rank] = std::make_unique<LocalRank>(std::move(channels[rank]));
    }
    return make_group_route(plan, std::move(ranks));
  }

  std::shared_ptr<const ReshardPlan> plan;
  std::uint64_t block_bytes;
  Contents logical;
  std::vector<Contents> sent;
  std::vector<Contents> received;
  std::vector<Contents> expected;
  std::vector<std::shared_ptr<CopyRoute>> routes;
};

std::vector<Address> addresses(const std::vector<std::uint32_t>& blocks) {
  std::vector<Address> result;
  result.reserve(blocks.size());
  for (const std::uint32_t block : blocks) result.push_back(make_address(7, Medium::kDram, 3, block));
  return result;
}

WriteRequest request_of(const std::vector<BlockStrip>& strips, const std::vector<Address>& from,
                        const std::vector<Address>& to) {
  WriteRequest request;
  request.transfer = 5;
  request.strips = strips;
  request.from = from;
  request.to = to;
  return request;
}

// A rank in another process, as far as a group can tell: takes orders, and reports when the test says so.
class FarRank final : public RankWriter {
 public:
  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    const std::lock_guard lock(mutex_);
    bytes_ = order.bytes() * request.from.size();
    report_ = std::move(report);
    changed_.notify_all();
  }
  void stop(std::uint64_t transfer) noexcept override {
    const std::lock_guard lock(mutex_);
    stopped_ = transfer;
    changed_.notify_all();
  }
  void close() noexcept override {}

  void await_order() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return report_ != nullptr; });
  }
  void await_stop(std::uint64_t transfer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ == transfer; });
  }
  bool has_order() const {
    const std::lock_guard lock(mutex_);
    return report_ != nullptr;
  }
  void report(const Error* error) { report_({.calls = 1, .bytes = error == nullptr ? bytes_ : 0}, error); }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Report report_;
  std::uint64_t bytes_ = 0;
  std::uint64_t stopped_ = 0;
};

// A group of two far ranks, each of which sends its layers to one receiver.
struct FarGroup {
  FarGroup() {
    const KVShape shape = shape_of(4, 1);
    auto plan = std::make_shared<const ReshardPlan>(plan_reshard(sharding_of(shape, 1, 2), sharding_of(shape, 1, 1)));
    std::vector<std::unique_ptr<RankWriter>> writers;
    for (FarRank*& rank : ranks) {
      auto writer = std::make_unique<FarRank>();
      rank = writer.get();
      writers.push_back(std::move(writer));
    }
    route = make_group_route(std::move(plan), std::move(writers));
    strips = whole(shape);
    block_bytes = shape.block_bytes();
  }

  FarRank* ranks[2];
  std::unique_ptr<Route> route;
  std::vector<BlockStrip> strips;
  std::uint64_t block_bytes = 0;
  std::vector<Address> blocks = addresses({0, 2});
};

}  // namespace

TEST_CASE("a write by the group's route puts every rank's slice where it belongs, block by block") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("rank group", seed);
    Dice dice(seed);
    for (int i = 0; i < fuzz_length(40); ++i) {
      const KVShape shape = shape_of(1 + dice.below(6), 1U << dice.below(3));
      const auto any = [&] { return sharding_of(shape, 1U << dice.below(4), 1 + dice.below(4)); };
      Instances instances(shape, any(), any());
      const std::unique_ptr<Route> route = instances.route();
      const std::vector<Address> from = addresses({3, 0, 1});
      const std::vector<Address> to = addresses({1, 2, 0});
      std::atomic<std::uint64_t> done{0};
      std::vector<std::vector<BlockStrip>> steps;
      if (dice.one_in(2)) {
        steps.push_back(whole(shape));
      } else {
        const std::uint64_t layer = shape.block_bytes() / shape.layers;
        for (std::uint64_t at = 0; at < shape.block_bytes(); at += layer) steps.push_back({{at, at, layer}});
      }
      for (const std::vector<BlockStrip>& strips : steps) {
        WriteRequest request = request_of(strips, from, to);
        request.bytes_done = &done;
        route->write(request);
      }
      CHECK(done.load() == 3 * shape.block_bytes());
      for (std::uint32_t rank = 0; rank < instances.plan->to.ranks(); ++rank) {
        for (std::size_t k = 0; k < from.size(); ++k) {
          CHECK(instances.received[rank][block_of(to[k])] == instances.expected[rank][block_of(from[k])]);
        }
        // The block that was not named is as it was.
        const std::vector<std::byte>& other = instances.received[rank][3];
        CHECK(std::ranges::all_of(other, [](std::byte byte) { return byte == std::byte{0}; }));
      }
    }
  }
}

TEST_CASE("calls and bytes of all ranks are added up, copies for replicas too") {
  const KVShape shape = shape_of(4, 1);
  Instances instances(shape, sharding_of(shape, 1, 1), sharding_of(shape, 4, 1));
  const std::unique_ptr<Route> route = instances.route();
  const std::vector<Address> from = addresses({0, 1});
  const std::vector<BlockStrip> strips = whole(shape);
  const WriteOutcome outcome = route->write(request_of(strips, from, from));
  CHECK(outcome.calls == 2 * 4);
  CHECK(outcome.bytes == 2 * 4 * shape.block_bytes());
  route->close();
  for (const auto& channel : instances.routes) CHECK(channel->closed);
}

TEST_CASE("a failed rank of this process ends the write, and no other rank begins") {
  const KVShape shape = shape_of(4, 2);
  Instances instances(shape, sharding_of(shape, 1, 2), sharding_of(shape, 1, 2));
  const std::unique_ptr<Route> route = instances.route();
  instances.routes[0]->fails = true;
  const std::vector<Address> from = addresses({0});
  const std::vector<BlockStrip> strips = whole(shape);
  CHECK(code_of([&] { route->write(request_of(strips, from, from)); }) == ErrorCode::kPeerLost);
  CHECK(std::ranges::all_of(instances.received[1][0], [](std::byte byte) { return byte == std::byte{0}; }));
  instances.routes[0]->fails = false;
  const std::atomic<bool> cancelled{true};
  WriteRequest request = request_of(strips, from, from);
  request.cancelled = &cancelled;
  CHECK(code_of([&] { route->write(request); }) == ErrorCode::kCancelled);
}

TEST_CASE("a group needs a writer for each rank that has something to send") {
  const KVShape shape = shape_of(4, 2);
  const auto plan =
      std::make_shared<const ReshardPlan>(plan_reshard(sharding_of(shape, 2, 1), sharding_of(shape, 1, 1)));
  std::vector<std::unique_ptr<RankWriter>> ranks(2);
  ranks[1] = std::make_unique<LocalRank>(LocalRank::Channels{});
  CHECK(code_of([&] { make_group_route(plan, std::move(ranks)); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { make_group_route(plan, {}); }) == ErrorCode::kArgument);
}

TEST_CASE("a write waits for the reports of all ranks") {
  FarGroup group;
  std::atomic<bool> returned{false};
  WriteOutcome outcome;
  std::atomic<std::uint64_t> done{0};
  std::thread writer([&] {
    WriteRequest request = request_of(group.strips, group.blocks, group.blocks);
    request.bytes_done = &done;
    outcome = group.route->write(request);
    returned = true;
  });
  for (FarRank* rank : group.ranks) rank->await_order();
  group.ranks[1]->report(nullptr);
  CHECK_FALSE(returned.load());
  CHECK(done.load() == group.block_bytes);  // half of two blocks
  group.ranks[0]->report(nullptr);
  writer.join();
  CHECK(outcome.calls == 2);
  CHECK(outcome.bytes == 2 * group.block_bytes);
  CHECK(done.load() == 2 * group.block_bytes);
}

TEST_CASE("one rank's failure does not hide that another may still write") {
  FarGroup group;
  std::optional<ErrorCode> code;
  std::thread writer(
      [&] { code = code_of([&] { group.route->write(request_of(group.strips, group.blocks, group.blocks)); }); });
  for (FarRank* rank : group.ranks) rank->await_order();
  const Error cancelled(ErrorCode::kCancelled, "cancelled");
  const Error lost(ErrorCode::kPeerLost, "lost");
  group.ranks[0]->report(&cancelled);
  group.ranks[1]->report(&lost);
  writer.join();
  CHECK(code == ErrorCode::kPeerLost);
}

TEST_CASE("after a rank's failure the others are stopped and waited for, and the failure is thrown") {
  FarGroup group;
  std::atomic<bool> returned{false};
  ErrorCode code = ErrorCode::kAudit;
  std::thread writer([&] {
    try {
      group.route->write(request_of(group.strips, group.blocks, group.blocks));
    } catch (const Error& error) {
      code = error.code();
    }
    returned = true;
  });
  for (FarRank* rank : group.ranks) rank->await_order();
  const Error lost(ErrorCode::kPeerLost, "rank 1 is gone");
  group.ranks[1]->report(&lost);
  group.ranks[0]->await_stop(5);
  CHECK_FALSE(returned.load());  // rank 0 may still write
  const Error cancelled(ErrorCode::kCancelled, "as asked");
  group.ranks[0]->report(&cancelled);
  writer.join();
  CHECK(code == ErrorCode::kPeerLost);
}

TEST_CASE("cancelling stops ranks of other processes, and a rank that was done by then does not hide it") {
  FarGroup group;
  std::atomic<bool> cancelled{false};
  ErrorCode code = ErrorCode::kAudit;
  std::thread writer([&] {
    WriteRequest request = request_of(group.strips, group.blocks, group.blocks);
    request.cancelled = &cancelled;
    try {
      group.route->write(request);
    } catch (const Error& error) {
      code = error.code();
    }
  });
  for (FarRank* rank : group.ranks) rank->await_order();
  group.ranks[0]->report(nullptr);
  cancelled = true;
  group.ranks[1]->await_stop(5);
  const Error stopped(ErrorCode::kCancelled, "as asked");
  group.ranks[1]->report(&stopped);
  writer.join();
  CHECK(code == ErrorCode::kCancelled);
}

TEST_CASE("writes of several threads by one group do not mix") {
  const KVShape shape = shape_of(4, 2);
  Instances instances(shape, sharding_of(shape, 4, 1), sharding_of(shape, 2, 2));
  const std::unique_ptr<Route> route = instances.route();
  const std::vector<BlockStrip> strips = whole(shape);
  std::vector<std::thread> threads;
  threads.reserve(kBlocks);
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    threads.emplace_back([&, block] {
      const std::vector<Address> blocks = addresses({block});
      for (int i = 0; i < 20; ++i) route->write(request_of(strips, blocks, blocks));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(instances.received == instances.expected);
}
