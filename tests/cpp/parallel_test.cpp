#include "kvpool/blocks/parallel.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "reshard_model.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

TEST_CASE("layers are split over stages in the way of vLLM and SGLang") {
  using Layers = std::vector<std::uint32_t>;
  CHECK(split_layers(32, 4, LayerSplit::kVllm) == Layers{8, 8, 8, 8});
  CHECK(split_layers(5, 4, LayerSplit::kVllm) == Layers{1, 1, 2, 1});
  CHECK(split_layers(5, 2, LayerSplit::kVllm) == Layers{3, 2});
  CHECK(split_layers(7, 4, LayerSplit::kVllm) == Layers{2, 2, 2, 1});
  CHECK(split_layers(5, 4, LayerSplit::kSglang) == Layers{1, 1, 1, 2});
  CHECK(split_layers(7, 4, LayerSplit::kSglang) == Layers{1, 2, 2, 2});
  CHECK(split_layers(3, 4, LayerSplit::kVllm) == Layers{1, 1, 1, 0});
  for (std::uint32_t layers = 1; layers < 100; ++layers) {
    for (std::uint32_t stages = 1; stages < 20; ++stages) {
      for (const LayerSplit rule : {LayerSplit::kVllm, LayerSplit::kSglang}) {
        CHECK(split_layers(layers, stages, rule) == engine_split(layers, stages, rule));
      }
    }
  }
}

TEST_CASE("a rank holds a range of layers and heads, or a replica of one head") {
  const Sharding sharding(shape_of(6, 2), parallel_of(4, 2));
  CHECK(sharding.ranks() == 8);
  const RankSlice slice = sharding.slice(6);
  CHECK(slice.stage == 1);
  CHECK(slice.tp_rank == 2);
  CHECK(slice.layer_first == 3);
  CHECK(slice.layers == 3);
  CHECK(slice.head_first == 1);
  CHECK(slice.heads == 1);
  CHECK(slice.replica == 0);
  CHECK(slice.replicas == 2);
  CHECK(sharding.slice(7).replica == 1);
  CHECK(sharding.rank_bytes(6) == std::uint64_t{3} * 2 * 16);
  CHECK(sharding.rank_layout(6, false).segment_bytes() == std::vector<std::size_t>(6, 16));
  CHECK(sharding.rank_layout(6, true).segment_bytes() == std::vector<std::size_t>{96});
}

TEST_CASE("configurations that do not fit are refused with their numbers") {
  const KVShape shape = shape_of(4, 6);
  CHECK(text_of([&] { Sharding(shape, parallel_of(4, 1)); }) ==
        "6 KV heads cannot be shared by 4 tensor-parallel ranks: one number must divide the other");
  CHECK(code_of([&] { Sharding(shape, parallel_of(0, 1)); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { Sharding(shape, parallel_of(1, 0)); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { Sharding(shape, parallel_of(6 * 64, 64)); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { Sharding(shape_of(0, 1), parallel_of(1, 1)); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { Sharding(shape_of(1U << 20, 1U << 20, 1U << 20, 16, 1U << 20), parallel_of(1, 1)); }) ==
        ErrorCode::kArgument);
  Parallel stages = parallel_of(1, 2);
  stages.stage_layers = {1, 2};
  CHECK(text_of([&] { Sharding(shape, stages); }) == "the stages have 3 layers together, and the model has 4");
  stages.stage_layers = {4};
  CHECK(text_of([&] { Sharding(shape, stages); }) == "the layers of 1 stages are given, and there are 2 stages");
  stages.stage_layers = {std::numeric_limits<std::uint32_t>::max(), 5};  // 4 in 32 bits
  CHECK(code_of([&] { Sharding(shape, stages); }) == ErrorCode::kArgument);
}
