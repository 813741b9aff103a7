#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <thread>

#include "attention_kit.h"
#include "failing_alloc.h"
#include "kvpool/attention/attend.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/base/error.h"
#include "lent_team.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::any_form;
using testing::Dice;
using testing::Elements;
using testing::Expected;
using testing::finished;
using testing::KVContent;
using testing::KVMemory;
using testing::lse_of;
using testing::worst_difference;

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// A sequence whose queries are its last tokens.
struct Sequence {
  std::uint32_t group;
  std::uint32_t query_tokens;
  KVContent kv;
  Elements q;

  Sequence(std::uint32_t kv_heads, std::uint32_t query_group, std::uint32_t dim, DType type, std::uint64_t tokens,
           std::uint32_t queries, Dice& dice)
      : group(query_group),
        query_tokens(queries),
        kv(kv_heads, dim, type, tokens, dice),
        q(DType::kFloat32, std::size_t{queries} * kv_heads * query_group * dim, 3.0, dice) {}

  std::uint64_t query_begin() const { return kv.tokens - query_tokens; }

  AttendCall call(const KVMemory& memory, std::span<const AttendItem> items) const {
    AttendCall call;
    call.kv = memory.rows();
    call.layer = KVMemory::kLayer;
    call.query_heads = kv.heads * group;
    call.query_dtype = DType::kFloat32;
    call.items = items;
    return call;
  }

  PartialAttention part(const KVMemory& memory, const AttendTeam& team = {},
                        const AttendSettings& settings = {}) const {
    const AttendItem item = memory.item(q, query_tokens, query_begin());
    return attend(call(memory, std::span(&item, 1)), team, settings).front();
  }
};

AttendSettings any_settings(Dice& dice) {
  const std::array<AttendSettings, 3> ways{AttendSettings{}, AttendSettings{0, 1U << 20, nullptr},
                                           AttendSettings{0, 0, nullptr}};
  return ways[dice.below(3)];
}

TEST_CASE("a result has the same bits wherever its tokens lie, and however many threads compute it in whatever way") {
  testing::LentTeam lent(4);
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("attention placement", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(4); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint64_t tokens = 16 + dice.below(12 * kLeafTokens);
      const std::uint32_t group = 1 + dice.below(4);
      const Sequence sequence(1 + dice.below(3), group, 8 * (1 + dice.below(3)), DType::kBfloat16, tokens,
                              1 + dice.below(3), dice);
      const KVMemory whole(sequence.kv, {}, {0, tokens}, 0);
      const PartialAttention expected = sequence.part(whole);
      CHECK(expected.exact());
      const std::vector<float> bits = finished(expected, tokens);
      const std::vector<float> lse = lse_of(expected, LseBase::kTwo, RowOrder::kHeadsFirst);
      for (int way = 0; way < 4; ++way) {
        const AttendTeam team{&lent, static_cast<int>(1 + dice.below(4))};
        std::vector<PartialAttention> parts;
        for (std::uint64_t begin = 0; begin < tokens;) {
          const std::uint64_t leaves = 1 + dice.below(tokens / kLeafTokens + 1);
          const TokenRange range{begin, std::min(begin + leaves * kLeafTokens, tokens)};
          const KVMemory memory(sequence.kv, any_form(dice), range, range.begin);
          parts.push_back(sequence.part(memory, team, any_settings(dice)));
          begin = range.end;
        }
        for (std::size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[dice.below(i)]);
        const PartialAttention all = merged(parts);
        CHECK(all.exact());
        CHECK(same_bits(finished(all, tokens), bits));
        CHECK(same_bits(lse_of(all, LseBase::kTwo, RowOrder::kHeadsFirst), lse));
      }
    }
  }
}

TEST_CASE("parts that are cut anywhere give the result within rounding, in any order") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("attention cuts", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(4); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint64_t tokens = 2 + dice.below(3 * kLeafTokens);
      const Sequence sequence(2, 3, 16, DType::kFloat16, tokens, 2, dice);
      const Expected expected =
          reference(sequence.kv, sequence.q, 2, 6, sequence.query_begin(), true, 1.0 / std::sqrt(16.0));
      std::vector<PartialAttention> parts;
      for (std::uint64_t begin = 0; begin < tokens;) {
        const TokenRange range{begin, begin + 1 + dice.below(tokens - begin)};
        const std::uint64_t before = dice.below(range.begin + 1);  // the table may begin earlier
        parts.push_back(sequence.part(KVMemory(sequence.kv, any_form(dice), range, before)));
        begin = range.end;
      }
      for (std::size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[dice.below(i)]);
      const PartialAttention all = merged(parts);
      CHECK(worst_difference(finished(all, tokens), expected.out) <= 2e-6);
      CHECK(worst_difference(lse_of(all, LseBase::kE, RowOrder::kTokensFirst), expected.lse) <= 1e-5);
    }
  }
}

TEST_CASE("the sequences of a batch are computed beside each other, each as if alone") {
  testing::LentTeam lent(3);
  Dice dice(3);
  std::vector<Sequence> sequences;
  std::vector<KVMemory> memories;
  sequences.reserve(8);
  memories.reserve(8);
  std::vector<AttendItem> items;
  for (int i = 0; i < 8; ++i) {
    sequences.emplace_back(2, 4, 24, DType::kFloat32, 3 + dice.below(4000), 1 + dice.below(3), dice);
    const Sequence& sequence = sequences.back();
    memories.emplace_back(sequence.kv, testing::BlockForm{}, TokenRange{0, sequence.kv.tokens}, 0);
    items.push_back(memories.back().item(sequence.q, sequence.query_tokens, sequence.query_begin()));
  }
  items[5].range = {0, 0};  // covers nothing
  for (const std::uint64_t heads_max : {std::uint64_t{8192}, std::uint64_t{2000}, std::uint64_t{0}}) {
    const AttendSettings settings{heads_max, 3000, nullptr};
    const std::vector<PartialAttention> parts = attend(sequences[0].call(memories[0], items), {&lent, 3}, settings);
    REQUIRE(parts.size() == 8);
    for (std::size_t i = 0; i < 8; ++i) {
      if (i == 5) {
        CHECK(parts[i].empty());
        continue;
      }
      const std::uint64_t tokens = sequences[i].kv.tokens;
      CHECK(same_bits(finished(parts[i], tokens), finished(sequences[i].part(memories[i]), tokens)));
    }
  }
}

TEST_CASE("several threads may call at once with one team") {
  testing::LentTeam lent(2);
  Dice dice(4);
  const Sequence sequence(2, 2, 16, DType::kBfloat16, 5000, 1, dice);
  const KVMemory memory(sequence.kv, {}, {0, 5000}, 0);
  const std::vector<float> expected = finished(sequence.part(memory), 5000);
  std::array<bool, 3> same{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < same.size(); ++i) {
    threads.emplace_back([&, i] {
      const AttendSettings settings{i == 0 ? 8192U : 0U, 8192, nullptr};
      same[i] = same_bits(finished(sequence.part(memory, {&lent, 2}, settings), 5000), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool one : same) CHECK(one);
}

TEST_CASE("a call that runs out of memory throws, and the next one gives the same bits") {
  Dice dice(8);
  const Sequence sequence(2, 2, 16, DType::kFloat32, 3000, 1, dice);
  const KVMemory memory(sequence.kv, {}, {0, 3000}, 0);
  const std::vector<float> expected = finished(sequence.part(memory), 3000);
  const int threw = testing::fail_each_allocation([&](auto&& fail) {
    if (fail([&] { (void)sequence.part(memory); })) {
      CHECK(same_bits(finished(sequence.part(memory), 3000), expected));
    }
  });
  CHECK(threw > 0);
}

TEST_CASE("the way is chosen by the length of the range, and the plan says which and how finely") {
  testing::LentTeam lent(2);
  Dice dice(5);
  const Sequence sequence(4, 1, 8, DType::kFloat16, 40, 1, dice);
  const KVMemory memory(sequence.kv, {}, {0, 40}, 0);
  const std::vector<const std::byte*> blocks(4096, memory.item(sequence.q, 1, 39).k_blocks[0]);
  std::vector<AttendItem> items(4, memory.item(sequence.q, 1, 1U << 20));
  for (AttendItem& item : items) item.k_blocks = item.v_blocks = blocks;
  items[0].range = {0, 8192};
  items[1].range = {0, 8193};
  items[2].range = {1024, 1024 + 32768};
  items[3].range = {0, 32769};
  const AttendCall call = sequence.call(memory, items);
  const AttendPlan plan = explain(call, {&lent, 2});
  CHECK(plan.kernel == attention_kernels().front()->id);
  CHECK(plan.threads == 2);
  REQUIRE(plan.items.size() == 4);
  CHECK(plan.items[0].way == AttendWay::kHeads);
  CHECK(plan.items[0].head_groups == 4);
  CHECK(plan.items[0].nodes == 1);
  CHECK(plan.items[1].way == AttendWay::kLeaves);
  CHECK(plan.items[1].nodes > 1);
  CHECK(plan.items[2].way == AttendWay::kLeaves);
  CHECK(plan.items[3].way == AttendWay::kLeavesAndMerges);
  CHECK(plan.items[3].nodes > plan.items[1].nodes);

  const AttendPlan alone = explain(call);
  CHECK(alone.threads == 1);
  CHECK(alone.items[0].head_groups == 1);
  // Fewer heads than threads.
  const AttendCall one = sequence.call(memory, std::span(items).first(1));
  CHECK(explain(one, {&lent, 5}).items[0].way == AttendWay::kLeaves);
  // The boundaries are the caller's to choose.
  CHECK(explain(call, {}, {100, 20000, nullptr}).items[0].way == AttendWay::kLeaves);
  CHECK(explain(call, {}, {100, 20000, nullptr}).items[2].way == AttendWay::kLeavesAndMerges);
}

TEST_CASE("rows of K and V are found in every format") {
  const PageFormat hnd{4, 64, DType::kFloat16, false, false};
  CHECK(kv_rows(hnd, 16, 2, true) == KVRows{DType::kFloat16, 4, 64, 16, 2 * 2 * 8192, 5 * 8192, 2048, 128});
  CHECK(kv_rows(hnd, 16, 2, false) == KVRows{DType::kFloat16, 4, 64, 16, 0, 0, 2048, 128});
  const PageFormat nhd{4, 64, DType::kFloat16, true, false};
  CHECK(kv_rows(nhd, 16, 1, true) == KVRows{DType::kFloat16, 4, 64, 16, 2 * 8192, 3 * 8192, 128, 512});
  const PageFormat fused{4, 64, DType::kFloat16, false, true};
  CHECK(kv_rows(fused, 16, 2, true) == KVRows{DType::kFloat16, 4, 64, 16, 2 * 16384, 2 * 16384 + 128, 4096, 256});
  CHECK(kv_rows(fused, 16, 2, false) == KVRows{DType::kFloat16, 4, 64, 16, 0, 128, 4096, 256});
}

TEST_CASE("a call that is told to stop, or is late, computes no further leaf") {
  Dice dice(6);
  const Sequence sequence(2, 2, 16, DType::kFloat32, 2500, 1, dice);
  const KVMemory memory(sequence.kv, {}, {0, 2500}, 0);
  const AttendItem item = memory.item(sequence.q, 1, 2499);
  const AttendCall call = sequence.call(memory, std::span(&item, 1));
  const auto code = [&](AttendStop& stop) { return kvpool::testing::code_of([&] { attend(call, {}, {}, &stop); }); };
  AttendStop stop;
  CHECK_FALSE(code(stop).has_value());
  const std::atomic<bool> closing{true};
  stop.also_asked = &closing;
  CHECK(code(stop) == ErrorCode::kCancelled);
  stop.also_asked = nullptr;
  stop.asked = true;
  CHECK(code(stop) == ErrorCode::kCancelled);
  AttendStop late;
  late.until_ns = 0;
  CHECK(code(late) == ErrorCode::kDeadline);
}

TEST_CASE("calls whose numbers do not fit are refused before anything is computed, and the error says where") {
  Dice dice(6);
  const Sequence sequence(2, 2, 16, DType::kFloat32, 50, 1, dice);
  const KVMemory memory(sequence.kv, {}, {0, 50}, 0);
  const AttendItem good = memory.item(sequence.q, 1, 49);
  const auto refused = [&](auto spoil) {
    AttendItem item = good;
    AttendCall call = sequence.call(memory, {});
    spoil(call, item);
    call.items = std::span(&item, 1);
    try {
      (void)attend(call);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kArgument);
      CHECK(std::string(error.what()).find("layer 1") != std::string::npos);
      CHECK_THROWS_AS((void)explain(call), Error);
      return true;
    }
    return false;
  };
  CHECK_FALSE(refused([](AttendCall&, AttendItem&) {}));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.dtype = DType::kInt8; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.query_dtype = DType::kFloat8E4M3; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.head_dim = 12; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.head_dim = 264; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.head_dim = 0; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.query_heads = 3; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.query_heads = 0; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.kv_heads = 0; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.block_tokens = 0; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.token_stride = 8; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.kv.head_stride = 8; }));
  CHECK(refused([](AttendCall& call, AttendItem&) { call.scale = std::nanf(""); }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.query_tokens = 0; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.query_tokens = 17; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.query_begin = kSequenceTokensMax + 1; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.q = nullptr; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.v_blocks = item.v_blocks.first(1); }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.range = {40, 30}; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.range.end = 65; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.range.end = kSequenceTokensMax + 1; }));
  CHECK(refused([](AttendCall&, AttendItem& item) { item.table_begin = 1; }));
  const std::vector<const std::byte*> none(good.k_blocks.size(), nullptr);
  CHECK(refused([&](AttendCall&, AttendItem& item) { item.k_blocks = none; }));
  CHECK(refused([&](AttendCall&, AttendItem& item) { item.v_blocks = none; }));

  const AttentionKernel other{{AttentionIsa::kAvx512, 200}, {}, nullptr};
  try {
    (void)sequence.part(memory, {}, {8192, 32768, &other});
    FAIL("a kernel that is not in the list was taken");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
  }
}

}  // namespace
}  // namespace kvpool
