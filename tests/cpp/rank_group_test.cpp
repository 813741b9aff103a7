// A logical instance's writes, divided among ranks: the orders add up to the plan.
#include "kvpool/ranks/rank_group.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "reshard_model.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

Sharding sharding_of(const KVShape& shape, std::uint32_t tp, std::uint32_t pp) { return {shape, parallel_of(tp, pp)}; }

std::vector<BlockStrip> whole(const KVShape& shape) { return {{0, 0, shape.block_bytes()}}; }

}  // namespace

TEST_CASE("the orders for a whole block add up to the plan") {
  const KVShape shape = shape_of(5, 2);
  const ReshardPlan plan = plan_reshard(sharding_of(shape, 8, 2), sharding_of(shape, 2, 4));
  std::size_t strips = 0;
  std::uint64_t bytes = 0;
  for (const RankOrder& order : rank_orders(plan, whole(shape))) {
    for (const ChannelWrite& channel : order.channels) {
      const auto pair = std::ranges::find_if(plan.pairs, [&](const ReshardPair& candidate) {
        return candidate.from_rank == order.from_rank && candidate.to_rank == channel.to_rank;
      });
      REQUIRE(pair != plan.pairs.end());
      CHECK(pair->bytes == channel.bytes);
      CHECK(pair->strips.size() == channel.strips.size());
      strips += channel.strips.size();
      bytes += channel.bytes;
    }
  }
  CHECK(strips == plan.strips());
  CHECK(bytes == shape.block_bytes());  // the receiver has no replicas
}

TEST_CASE("an order for a layer goes to the ranks of its stage, and the layers add up to the block") {
  const KVShape shape = shape_of(6, 2);
  const ReshardPlan plan = plan_reshard(sharding_of(shape, 2, 3), sharding_of(shape, 1, 2));
  const std::uint64_t layer_bytes = shape.block_bytes() / shape.layers;
  std::uint64_t bytes = 0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto orders =
        rank_orders(plan, std::vector<BlockStrip>{{layer * layer_bytes, layer * layer_bytes, layer_bytes}});
    REQUIRE(orders.size() == 2);
    CHECK(orders[0].from_rank == layer / 2 * 2);
    CHECK(orders[1].from_rank == layer / 2 * 2 + 1);
    for (const RankOrder& order : orders) bytes += order.bytes();
  }
  CHECK(bytes == shape.block_bytes());
}

TEST_CASE("ranges that were requested separately are not merged") {
  const KVShape shape = shape_of(4, 2);
  const ReshardPlan plan = plan_reshard(sharding_of(shape, 1, 1), sharding_of(shape, 1, 1));
  std::vector<BlockStrip> pieces;
  const std::uint64_t piece = shape.block_bytes() / 8;
  pieces.reserve(8);
  for (std::uint64_t i = 0; i < 8; ++i) pieces.push_back({i * piece, i * piece, piece});
  CHECK(rank_orders(plan, pieces).front().channels.front().strips.size() == 8);
  CHECK(rank_orders(plan, whole(shape)).front().channels.front().strips.size() == 1);
}

TEST_CASE("ranks begin at different receivers") {
  const KVShape shape = shape_of(4, 4);
  const ReshardPlan plan = plan_reshard(sharding_of(shape, 1, 4), sharding_of(shape, 4, 1));
  std::vector<std::uint32_t> first;
  for (const RankOrder& order : rank_orders(plan, whole(shape))) first.push_back(order.channels.front().to_rank);
  CHECK(first == std::vector<std::uint32_t>{0, 1, 2, 3});
}

TEST_CASE("ranges that are not pieces of the logical block are refused") {
  const KVShape shape = shape_of(4, 2);
  const ReshardPlan plan = plan_reshard(sharding_of(shape, 2, 1), sharding_of(shape, 1, 1));
  const std::uint64_t piece = shape.block_bytes() / 8;
  for (const std::vector<BlockStrip>& wrong : std::vector<std::vector<BlockStrip>>{
           {{1, 1, piece}},
           {{0, 0, piece - 1}},
           {{0, piece, piece}},
           {{0, 0, 9 * piece}},
           {{9 * piece, 9 * piece, piece}},
           {{piece, piece, ~std::uint64_t{0} / piece * piece}},
           {{piece, piece, piece}, {0, 0, piece}},
           {{0, 0, 2 * piece}, {piece, piece, piece}},
       }) {
    CHECK(code_of([&] { rank_orders(plan, wrong); }) == ErrorCode::kArgument);
  }
}
