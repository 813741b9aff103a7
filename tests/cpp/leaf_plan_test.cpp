// The plan of a call for a GPU. Checks A14 of cpp/kvpool/attend_gpu.
#include "kvpool/attend_gpu/leaf_plan.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu_attention_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("a plan has the nodes in front, and a level for each halving of the number of leaves") {
  std::vector<const std::byte*> blocks;
  for (std::uintptr_t i = 0; i < 7; ++i) {
    blocks.push_back(reinterpret_cast<const std::byte*>((i + 1) << 30));  // NOLINT(performance-no-int-to-ptr)
  }
  AttendItem item;
  item.k_blocks = item.v_blocks = blocks;
  item.range = {0, 6500};
  const std::byte query{};
  item.q = &query;
  item.query_begin = 6499;
  AttendCall call;
  call.kv = kv_rows({1, 64, DType::kFloat16, false, false}, 1024, 0, true);
  call.query_heads = 2;
  call.query_dtype = DType::kFloat16;
  call.items = {&item, 1};
  const LeafPlan plan = plan_leaves(call, 64);
  const std::size_t floats = 2 * 66;
  REQUIRE(plan.nodes.size() == 3);  // 4 leaves, 2 leaves, and what is left
  CHECK(plan.node_floats == 3 * floats);
  CHECK(plan.floats == 7 * floats);
  CHECK(plan.tasks.size() == 7);
  CHECK(plan.level_pairs == std::vector<std::size_t>{3, 1});
  REQUIRE(plan.pairs.size() == 4);
  CHECK(plan.pairs[3].left_at == 0);
  CHECK(plan.pairs[3].right_at == plan.pairs[1].left_at);
  CHECK(plan.tasks.back().tokens == 6500 - 6144);
  CHECK(plan.tasks.back().seen == 6500 - 6144);
  CHECK(plan.tasks.front().seen == 6500);
  CHECK(plan.k_blocks.back() == (std::int64_t{6} << 30) / 16);  // 64 bits wide, and so are blocks above 2^31 elements
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
