// The planner beside a naive model, and a receiver that counts how often each of its bytes is written.
#include "kvpool/transfer/reshard.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "reshard_model.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::uint32_t kUnwritten = std::numeric_limits<std::uint32_t>::max();

// Ranks of the sender that hold the same heads share the work.
void check_balance(const ReshardPlan& plan) {
  std::vector<std::uint64_t> sent(plan.from.ranks());
  for (const ReshardPair& pair : plan.pairs) sent[pair.from_rank] += pair.bytes;
  const std::uint32_t replicas = plan.from.replicas();
  for (std::uint32_t first = 0; first < plan.from.ranks(); first += replicas) {
    const std::uint64_t total =
        std::accumulate(sent.begin() + first, sent.begin() + first + replicas, std::uint64_t{0});
    const std::uint64_t share = (total + replicas - 1) / replicas;
    for (std::uint32_t rank = first; rank < first + replicas; ++rank) {
      CHECK(sent[rank] <= share + share / 32 + plan.from.shape().row_bytes());
    }
  }
}

// No two strips of a pair could be one, and they rise.
void check_shortest(const ReshardPlan& plan) {
  for (const ReshardPair& pair : plan.pairs) {
    REQUIRE(!pair.strips.empty());
    std::uint64_t bytes = pair.strips.front().bytes;
    for (std::size_t i = 1; i < pair.strips.size(); ++i) {
      const BlockStrip& before = pair.strips[i - 1];
      const BlockStrip& strip = pair.strips[i];
      bytes += strip.bytes;
      CHECK(before.from + before.bytes <= strip.from);
      CHECK(before.to + before.bytes <= strip.to);
      CHECK_FALSE((before.from + before.bytes == strip.from && before.to + before.bytes == strip.to));
    }
    CHECK(bytes == pair.bytes);
  }
}

// The least number of strips that any plan can have that sends each rank's content whole: neighbouring bytes of a
// receiver can be in one strip only if they are neighbours in some sender, and all senders' neighbours are the same.
std::size_t runs_needed(const ReshardPlan& plan, const KVShape& shape, const Parallel& from, const Parallel& to) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> neighbours;
  for (std::uint32_t rank = 0; rank < plan.from.ranks(); rank += plan.from.replicas()) {
    const Bytes32 content = shard(shape, from, rank);
    for (std::size_t i = 1; i < content.size(); ++i) neighbours.emplace_back(content[i - 1], content[i]);
  }
  std::ranges::sort(neighbours);
  std::size_t runs = 0;
  for (std::uint32_t rank = 0; rank < plan.to.ranks(); ++rank) {
    const Bytes32 content = shard(shape, to, rank);
    for (std::size_t i = 0; i < content.size(); ++i) {
      const bool joined = i > 0 && std::ranges::binary_search(
                                       neighbours, std::pair<std::uint32_t, std::uint32_t>(content[i - 1], content[i]));
      runs += joined ? 0 : 1;
    }
  }
  return runs;
}

void check_plan(const KVShape& shape, const Parallel& from, const Parallel& to) {
  CAPTURE(shape.layers);
  CAPTURE(shape.kv_heads);
  CAPTURE(from.tp);
  CAPTURE(from.pp);
  CAPTURE(to.tp);
  CAPTURE(to.pp);
  const ReshardPlan plan = plan_reshard(Sharding(shape, from), Sharding(shape, to));
  std::vector<Bytes32> senders;
  for (std::uint32_t rank = 0; rank < plan.from.ranks(); ++rank) {
    senders.push_back(shard(shape, from, rank));
    REQUIRE(senders.back().size() == plan.from.rank_bytes(rank));
  }
  std::vector<Bytes32> received(plan.to.ranks());
  for (std::uint32_t rank = 0; rank < plan.to.ranks(); ++rank)
    received[rank].assign(plan.to.rank_bytes(rank), kUnwritten);
  std::size_t written_twice = 0;
  for (const ReshardPair& pair : plan.pairs) {
    for (const BlockStrip& strip : pair.strips) {
      REQUIRE(strip.from + strip.bytes <= senders[pair.from_rank].size());
      REQUIRE(strip.to + strip.bytes <= received[pair.to_rank].size());
      // A row, a token of a head, is never cut.
      REQUIRE(strip.from % shape.row_bytes() + strip.to % shape.row_bytes() + strip.bytes % shape.row_bytes() == 0);
      for (std::uint64_t i = 0; i < strip.bytes; ++i) {
        std::uint32_t& target = received[pair.to_rank][strip.to + i];
        written_twice += target == kUnwritten ? 0 : 1;
        target = senders[pair.from_rank][strip.from + i];
      }
    }
  }
  CHECK(written_twice == 0);
  // A byte that was not written is still kUnwritten, and no byte of a shard has that number.
  for (std::uint32_t rank = 0; rank < plan.to.ranks(); ++rank) CHECK(received[rank] == shard(shape, to, rank));
  check_balance(plan);
  check_shortest(plan);
  const std::size_t groups = plan.from.ranks() / plan.from.replicas();
  CHECK(plan.strips() <= runs_needed(plan, shape, from, to) + groups * (plan.from.replicas() - 1));
}

std::vector<std::vector<std::uint64_t>> numbers(const std::vector<BlockStrip>& strips) {
  std::vector<std::vector<std::uint64_t>> rows;
  rows.reserve(strips.size());
  for (const BlockStrip& strip : strips) rows.push_back({strip.from, strip.to, strip.bytes});
  return rows;
}

}  // namespace

TEST_CASE("two halves of the heads: one strip for each layer's K and V") {
  const KVShape shape = shape_of(2, 2);  // a head has 16 bytes, K of a layer 32
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(1, 1)), Sharding(shape, parallel_of(2, 1)));
  REQUIRE(plan.pairs.size() == 2);
  CHECK(numbers(plan.pairs[0].strips) ==
        std::vector<std::vector<std::uint64_t>>{{0, 0, 16}, {32, 16, 16}, {64, 32, 16}, {96, 48, 16}});
  CHECK(numbers(plan.pairs[1].strips) ==
        std::vector<std::vector<std::uint64_t>>{{16, 0, 16}, {48, 16, 16}, {80, 32, 16}, {112, 48, 16}});
}

TEST_CASE("two halves of the heads where tokens come first: one strip for each token of a layer's K and V") {
  KVShape shape = shape_of(1, 2, 2, 2, 3);  // a row has 4 bytes, a token of all heads 8, K of a layer 24
  shape.tokens_first = true;
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(1, 1)), Sharding(shape, parallel_of(2, 1)));
  REQUIRE(plan.pairs.size() == 2);
  CHECK(numbers(plan.pairs[0].strips) == std::vector<std::vector<std::uint64_t>>{
                                             {0, 0, 4}, {8, 4, 4}, {16, 8, 4}, {24, 12, 4}, {32, 16, 4}, {40, 20, 4}});
  CHECK(numbers(plan.pairs[1].strips) == std::vector<std::vector<std::uint64_t>>{
                                             {4, 0, 4}, {12, 4, 4}, {20, 8, 4}, {28, 12, 4}, {36, 16, 4}, {44, 20, 4}});
  // Nothing to cut where both sides hold the same heads.
  const ReshardPlan alike = plan_reshard(Sharding(shape, parallel_of(2, 1)), Sharding(shape, parallel_of(2, 1)));
  CHECK(alike.strips() == 2);
}

TEST_CASE("two halves of the heads where K and V are fused: one strip for each layer, K and V of a token together") {
  KVShape shape = shape_of(2, 2);  // a row of K and V has 8 bytes, a head of a layer 32, a layer 64
  shape.fused = true;
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(1, 1)), Sharding(shape, parallel_of(2, 1)));
  REQUIRE(plan.pairs.size() == 2);
  CHECK(numbers(plan.pairs[0].strips) == std::vector<std::vector<std::uint64_t>>{{0, 0, 32}, {64, 32, 32}});
  CHECK(numbers(plan.pairs[1].strips) == std::vector<std::vector<std::uint64_t>>{{32, 0, 32}, {96, 32, 32}});
}

TEST_CASE("stages of whole layers: one strip for each pair") {
  const KVShape shape = shape_of(5, 2);
  const Parallel from = parallel_of(1, 2);                     // layers 0-2, 3-4
  const Parallel to = parallel_of(1, 2, LayerSplit::kSglang);  // layers 0-1, 2-4
  const ReshardPlan plan = plan_reshard(Sharding(shape, from), Sharding(shape, to));
  REQUIRE(plan.pairs.size() == 3);
  CHECK(numbers(plan.pairs[0].strips) == std::vector<std::vector<std::uint64_t>>{{0, 0, 128}});
  CHECK(numbers(plan.pairs[1].strips) == std::vector<std::vector<std::uint64_t>>{{128, 0, 64}});
  CHECK(numbers(plan.pairs[2].strips) == std::vector<std::vector<std::uint64_t>>{{0, 64, 128}});
  CHECK(plan.of_sender(0).size() == 2);
  CHECK(plan.of_sender(1).size() == 1);
  CHECK(plan.of_sender(1).front().to_rank == 1);
}

TEST_CASE("equal configurations: each rank, replicas too, sends its whole block to the rank of its number") {
  for (const std::uint32_t heads : {1U, 2U, 8U, 40U}) {
    const KVShape shape = shape_of(5, heads);
    const Sharding sharding(shape, parallel_of(8, 4));
    const ReshardPlan plan = plan_reshard(sharding, sharding);
    REQUIRE(plan.pairs.size() == 32);
    for (std::uint32_t rank = 0; rank < 32; ++rank) {
      CHECK(plan.pairs[rank].from_rank == rank);
      CHECK(plan.pairs[rank].to_rank == rank);
      CHECK(numbers(plan.pairs[rank].strips) ==
            std::vector<std::vector<std::uint64_t>>{{0, 0, sharding.rank_bytes(rank)}});
    }
  }
}

TEST_CASE("replicas at the sender share the work, without an extra strip where receivers suffice") {
  const KVShape shape = shape_of(4, 2);
  // Four ranks hold head 0; two receivers want it: two senders for each, half of the layers each.
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(8, 1)), Sharding(shape, parallel_of(4, 1)));
  REQUIRE(plan.pairs.size() == 8);
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    CHECK(plan.pairs[rank].from_rank == rank);
    CHECK(plan.pairs[rank].to_rank == rank / 2);
    const std::uint64_t half = 64 * (rank % 2);
    CHECK(numbers(plan.pairs[rank].strips) == std::vector<std::vector<std::uint64_t>>{{half, half, 64}});
  }
  // And the other way round each sender has two receivers.
  const ReshardPlan back = plan_reshard(Sharding(shape, parallel_of(4, 1)), Sharding(shape, parallel_of(8, 1)));
  CHECK(back.strips() == 8);
  for (const ReshardPair& pair : back.pairs) CHECK(pair.from_rank == pair.to_rank / 2);
}

TEST_CASE("a share that would end within a run ends at a row, so that no rank is idle") {
  const KVShape shape = shape_of(1, 1);  // 2 runs of 4 rows of 4 bytes, for 8 senders
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(8, 1)), Sharding(shape, parallel_of(1, 1)));
  REQUIRE(plan.pairs.size() == 8);
  for (const ReshardPair& pair : plan.pairs) CHECK(pair.bytes == 4);
}

TEST_CASE("a cut next to the end of a run moves there instead of leaving a sliver") {
  // 3 senders of one head share 100 runs, 33 1/3 each: the cuts are 1/3 behind the end of a run and 1/3 before one, and
  // 1/64 of a share is more than that.
  const KVShape shape = shape_of(50, 1, 2, 2, 16);
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(3, 1)), Sharding(shape, parallel_of(1, 1)));
  REQUIRE(plan.pairs.size() == 3);
  CHECK(plan.pairs[0].bytes == 33 * shape.head_bytes());
  CHECK(plan.pairs[1].bytes == 34 * shape.head_bytes());
  CHECK(plan.pairs[2].bytes == 33 * shape.head_bytes());
}

TEST_CASE("a cut next to the end of a receiver moves there, so that each sender has one receiver") {
  // FairQueue of 266 2/3 runs, receivers of 268, 264 and 268.
  const KVShape shape = shape_of(400, 1, 2, 2, 16);
  Parallel to = parallel_of(1, 3);
  to.stage_layers = {134, 132, 134};
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(3, 1)), Sharding(shape, to));
  REQUIRE(plan.pairs.size() == 3);
  for (const ReshardPair& pair : plan.pairs) CHECK(pair.from_rank == pair.to_rank);
  CHECK(plan.strips() == 3);
}

TEST_CASE("every combination of TP 1 2 4 8 and PP 1 2 4 gives the receiver's shards, each byte written once") {
  for (const std::uint32_t heads : {1U, 2U, 8U, 40U}) {
    for (const std::uint32_t layers : {4U, 5U, 32U}) {
      // Rows of one byte and blocks of few tokens: what matters is where things lie.
      const KVShape shape = layers == 32 ? shape_of(layers, heads, 1, 1, 2) : shape_of(layers, heads, 3, 1, 3);
      for (const std::uint32_t from_tp : {1U, 2U, 4U, 8U}) {
        for (const std::uint32_t to_tp : {1U, 2U, 4U, 8U}) {
          for (const std::uint32_t from_pp : {1U, 2U, 4U}) {
            for (const std::uint32_t to_pp : {1U, 2U, 4U}) {
              check_plan(shape, parallel_of(from_tp, from_pp), parallel_of(to_tp, to_pp));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("random shapes and configurations give the receiver's shards, each byte written once") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("reshard", seed);
    Dice dice(seed);
    const auto any_parallel = [&](const KVShape& shape) {
      std::vector<std::uint32_t> sizes;
      for (std::uint32_t tp = 1; tp <= 2 * shape.kv_heads + 8; ++tp) {
        if (tp % shape.kv_heads == 0 || shape.kv_heads % tp == 0) sizes.push_back(tp);
      }
      Parallel parallel =
          parallel_of(dice.pick(sizes), 1 + dice.below(5), dice.one_in(2) ? LayerSplit::kVllm : LayerSplit::kSglang);
      if (dice.one_in(3)) {  // any stages, empty ones too
        parallel.stage_layers.assign(parallel.pp, 0);
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) ++parallel.stage_layers[dice.below(parallel.pp)];
      }
      return parallel;
    };
    for (int i = 0; i < model_length(300); ++i) {
      KVShape shape =
          shape_of(1 + dice.below(12), 1 + dice.below(12), 1 + dice.below(3), 1 + dice.below(2), 1 + dice.below(5));
      shape.tokens_first = dice.one_in(2);
      shape.fused = dice.one_in(3);
      const Parallel from = any_parallel(shape);
      const Parallel to = any_parallel(shape);
      check_plan(shape, from, to);
    }
  }
}

TEST_CASE("strips clipped to each layer of the sender are the whole plan, cut at layers") {
  const KVShape shape = shape_of(5, 2);
  const ReshardPlan plan = plan_reshard(Sharding(shape, parallel_of(2, 2)), Sharding(shape, parallel_of(1, 1)));
  for (const ReshardPair& pair : plan.pairs) {
    const RankSlice slice = plan.from.slice(pair.from_rank);
    const std::uint64_t layer_bytes = plan.from.rank_bytes(pair.from_rank) / slice.layers;
    std::uint64_t bytes = 0;
    for (std::uint32_t layer = 0; layer < slice.layers; ++layer) {
      for (const BlockStrip& strip : clip_strips(pair.strips, layer * layer_bytes, (layer + 1) * layer_bytes)) {
        CHECK(strip.from >= layer * layer_bytes);
        CHECK(strip.from + strip.bytes <= (layer + 1) * layer_bytes);
        bytes += strip.bytes;
      }
    }
    CHECK(bytes == pair.bytes);
  }
  const std::vector<BlockStrip> strips = {{0, 100, 10}, {20, 200, 10}};
  CHECK(numbers(clip_strips(strips, 5, 25)) == std::vector<std::vector<std::uint64_t>>{{5, 105, 5}, {20, 200, 5}});
  CHECK(clip_strips(strips, 10, 20).empty());
  CHECK(clip_strips(strips, 30, 90).empty());
  CHECK(clip_strips(strips, 7, 7).empty());
}

TEST_CASE("the plan grows with layers and ranks, not with the number of blocks sent") {
  const KVShape small = shape_of(80, 8, 1, 1, 1);
  const KVShape large = shape_of(80, 8, 128, 2, 64);
  const auto strips = [](const KVShape& shape, const Parallel& from, const Parallel& to) {
    return plan_reshard(Sharding(shape, from), Sharding(shape, to)).strips();
  };
  CHECK(strips(small, parallel_of(8, 4), parallel_of(4, 2)) == strips(large, parallel_of(8, 4), parallel_of(4, 2)));
  CHECK(strips(large, parallel_of(8, 4), parallel_of(4, 2)) == 2 * 80 * 8);
  CHECK(strips(large, parallel_of(8, 4), parallel_of(8, 1)) == 32);
}

TEST_CASE("the error for instances with different blocks names the difference") {
  const Sharding sender(shape_of(4, 2, 128), parallel_of(1, 1));
  const auto text = [&](const KVShape& shape) {
    CHECK(code_of([&] { plan_reshard(sender, Sharding(shape, parallel_of(1, 1))); }) == ErrorCode::kLayoutMismatch);
    return text_of([&] { plan_reshard(sender, Sharding(shape, parallel_of(1, 1))); });
  };
  CHECK(text(shape_of(4, 2, 64)) ==
        "head_dim is 128 at the sender and 64 at the receiver: their blocks do not hold the same");
  CHECK(text(shape_of(5, 2, 128)).starts_with("layers is 4 at the sender and 5 at the receiver"));
  CHECK(text(shape_of(4, 1, 128)).starts_with("kv_heads is 2 at the sender and 1 at the receiver"));
  CHECK(text(shape_of(4, 2, 128, 1)).starts_with("dtype is bfloat16 at the sender and int8 at the receiver"));
  KVShape same_size = shape_of(4, 2, 128);
  same_size.dtype = DType::kFloat16;
  CHECK(text(same_size).starts_with("dtype is bfloat16 at the sender and float16 at the receiver"));
  CHECK(text(shape_of(4, 2, 128, 2, 8)).starts_with("block_tokens is 4 at the sender and 8 at the receiver"));
  KVShape tokens_first = shape_of(4, 2, 128);
  tokens_first.tokens_first = true;
  CHECK(text(tokens_first).starts_with("the order of heads and tokens is HND at the sender and NHD at the receiver"));
  KVShape fused = shape_of(4, 2, 128);
  fused.fused = true;
  CHECK(text(fused).starts_with("the page format is split at the sender and fused at the receiver"));
}

TEST_CASE("a configuration that asks for an endless plan is refused") {
  const KVShape shape = shape_of(1U << 20, 4096, 1, 1, 1);
  CHECK(code_of([&] { plan_reshard(Sharding(shape, parallel_of(1, 1)), Sharding(shape, parallel_of(4096, 1))); }) ==
        ErrorCode::kArgument);
}
