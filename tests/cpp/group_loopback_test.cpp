// Ranks of two logical instances with real memory and real routes: arenas that store blocks in any order, in any
// medium.
#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/ranks/group_route.h"
#include "kvpool/routes/host/memory_route.h"
#include "local_rank.h"
#include "reshard_model.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::uint32_t kBlocks = 5;

// The memory of one rank: one segment for a block, or one for each piece, each medium apart.
class RankMemory {
 public:
  RankMemory(const Sharding& sharding, std::uint32_t rank, bool aggregated) {
    const Layout layout = sharding.rank_layout(rank, aggregated);
    for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
      MediumSpan& span = spans_[medium];
      span.blocks = kBlocks;
      for (const std::size_t bytes : layout.segment_bytes()) {
        // A gap behind each piece, as strides of an adopted tensor may have it.
        memory_.emplace_back(kBlocks * (bytes + 8));
        span.segments.push_back({memory_.back().data(), bytes + 8, bytes});
      }
    }
  }

  const MediaSpans& spans() const noexcept { return spans_; }

  // The bytes of a block in canonical order.
  std::vector<std::byte*> content(Address address) const {
    std::vector<std::byte*> bytes;
    for (const Segment& segment : spans_[medium_of(address)].segments) {
      for (std::size_t i = 0; i < segment.bytes; ++i) {
        bytes.push_back(segment.base + block_of(address) * segment.stride + i);
      }
    }
    return bytes;
  }

 private:
  MediaSpans spans_;
  std::vector<std::vector<std::byte>> memory_;
};

// The value of a byte of a logical block.
std::byte value_of(std::uint32_t block, std::uint32_t number) {
  return static_cast<std::byte>((number * 2654435761U + block * 40503U) >> 13);
}

std::vector<RankMemory> memory_of(const KVShape& shape, const Parallel& parallel, bool aggregated) {
  const Sharding sharding(shape, parallel);
  std::vector<RankMemory> ranks;
  ranks.reserve(sharding.ranks());
  for (std::uint32_t rank = 0; rank < sharding.ranks(); ++rank) ranks.emplace_back(sharding, rank, aggregated);
  return ranks;
}

std::unique_ptr<Route> route_between(std::shared_ptr<const ReshardPlan> plan, const std::vector<RankMemory>& from,
                                     const std::vector<RankMemory>& to, CopyTeam& team) {
  std::vector<LocalRank::Channels> channels(from.size());
  for (const ReshardPair& pair : plan->pairs) {
    channels[pair.from_rank].emplace(
        pair.to_rank, make_loopback_route(from[pair.from_rank].spans(), to[pair.to_rank].spans(), nullptr, team));
  }
  std::vector<std::unique_ptr<RankWriter>> ranks(from.size());
  for (std::size_t rank = 0; rank < from.size(); ++rank) {
    if (!channels[rank].empty()) ranks[rank] = std::make_unique<LocalRank>(std::move(channels[rank]));
  }
  return make_group_route(std::move(plan), std::move(ranks));
}

}  // namespace

TEST_CASE("ranks write by loopback what the receiver's ranks need, from any order of memory to any, in any medium") {
  CopyTeam team;
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("group loopback", seed);
    Dice dice(seed);
    for (int i = 0; i < fuzz_length(40); ++i) {
      const KVShape shape = shape_of(1 + dice.below(6), 1U << dice.below(3));
      const Parallel from = parallel_of(1U << dice.below(4), 1 + dice.below(3));
      const Parallel to = parallel_of(1U << dice.below(4), 1 + dice.below(3), LayerSplit::kSglang);
      const std::vector<RankMemory> senders = memory_of(shape, from, dice.one_in(2));
      const std::vector<RankMemory> receivers = memory_of(shape, to, dice.one_in(2));
      const std::vector<Address> source = {make_address(1, Medium::kHbm, 2, 4), make_address(1, Medium::kDram, 0, 0),
                                           make_address(1, Medium::kHbm, 2, 3)};
      const std::vector<Address> target = {make_address(2, Medium::kDram, 9, 1), make_address(2, Medium::kDram, 9, 2),
                                           make_address(2, Medium::kHbm, 9, 0)};
      for (std::uint32_t rank = 0; rank < senders.size(); ++rank) {
        const Bytes32 numbers = shard(shape, from, rank);
        for (std::uint32_t block = 0; block < source.size(); ++block) {
          const std::vector<std::byte*> content = senders[rank].content(source[block]);
          REQUIRE(content.size() == numbers.size());
          for (std::size_t at = 0; at < content.size(); ++at) *content[at] = value_of(block, numbers[at]);
        }
      }
      const auto plan = std::make_shared<const ReshardPlan>(plan_reshard(Sharding(shape, from), Sharding(shape, to)));
      const std::unique_ptr<Route> route = route_between(plan, senders, receivers, team);
      const std::vector<BlockStrip> strips = {{0, 0, shape.block_bytes()}};
      WriteRequest request;
      request.strips = strips;
      request.from = source;
      request.to = target;
      request.deadline_ns = monotonic_ns() + 60'000'000'000;
      route->write(request);
      std::size_t wrong = 0;
      for (std::uint32_t rank = 0; rank < receivers.size(); ++rank) {
        const Bytes32 numbers = shard(shape, to, rank);
        for (std::uint32_t block = 0; block < target.size(); ++block) {
          const std::vector<std::byte*> content = receivers[rank].content(target[block]);
          REQUIRE(content.size() == numbers.size());
          for (std::size_t at = 0; at < content.size(); ++at) {
            wrong += *content[at] == value_of(block, numbers[at]) ? 0 : 1;
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}
