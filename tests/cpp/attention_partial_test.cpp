// Parts of an attention: how they merge, and what is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_kit.h"
#include "failing_alloc.h"
#include "kvpool/attention/merge_rows.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/attention/partial.h"
#include "kvpool/base/error.h"
#include "partial_kit.h"

namespace kvpool {
namespace {

using testing::Dice;
using testing::finished;
using testing::lse_of;
using namespace testing::parts;  // NOLINT(google-build-using-namespace)

// Fails unless `call` throws this code and leaves the part as it is.
template <class Call>
Error refused(ErrorCode code, const PartialAttention& part, Call call) {
  const TokenSet covers = part.covers();
  const std::vector<float> lse = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    CHECK(part.covers() == covers);
    CHECK(same_bits(lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst), lse));
    return error;
  }
  FAIL("nothing was refused");
  return {ErrorCode::kAudit, ""};
}

std::int64_t field_of(const Error& error, const char* name) {
  for (const auto& [key, value] : error.fields()) {
    if (std::strcmp(key, name) == 0) return value;
  }
  return -1;
}

TEST_CASE("exp2 in a merge is exact for 0, within 2e-7 elsewhere, and passes NaN on") {
  CHECK(exp2_of_difference(0.0F) == 1.0F);
  CHECK(exp2_of_difference(-0.0F) == 1.0F);
  CHECK(exp2_of_difference(-kInfinity) == 0.0F);
  CHECK(exp2_of_difference(-1000.0F) == 0.0F);
  CHECK(std::isnan(exp2_of_difference(std::nanf(""))));
  for (float x = 0.0F; x > -125.9F; x -= 0.00317F) {
    const double exact = std::exp2(double{x});
    CHECK(std::abs(double{exp2_of_difference(x)} - exact) <= 2e-7 * exact);
  }
}

TEST_CASE("numbers keep their value in every format, and are rounded to the nearest") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = float_of_float16(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(float_of_float16(float16_of(value))));
    } else {
      CHECK(float16_of(value) == half);
    }
    const float brain = float_of_bfloat16(half);
    if (!std::isnan(brain)) CHECK(bfloat16_of(brain) == half);
  }
  CHECK(std::isnan(float_of_bfloat16(bfloat16_of(std::nanf("")))));
  CHECK(float_of_float16(0x3c00) == 1.0F);
  CHECK(float_of_float16(0x0001) == 0x1p-24F);
  CHECK(float_of_bfloat16(0x3f80) == 1.0F);
  CHECK(float_of_float8_e4m3(0x38) == 1.0F);
  CHECK(float_of_float8_e4m3(0x7e) == 448.0F);
  CHECK(float_of_float8_e4m3(0x81) == -0x1p-9F);
  CHECK(std::isnan(float_of_float8_e4m3(0xff)));
  CHECK(float16_of(1.0F + 0x1p-11F) == 0x3c00);  // a tie goes to the even one
  CHECK(float16_of(1.0F + 0x3p-11F) == 0x3c02);
  CHECK(float16_of(65519.0F) == 0x7bff);
  CHECK(float16_of(65520.0F) == 0x7c00);
  CHECK(float16_of(0x1p-25F) == 0);
  CHECK(float16_of(0x1.8p-25F) == 1);
  CHECK(bfloat16_of(1.0F + 0x1p-8F) == 0x3f80);
  CHECK(bfloat16_of(1.0F + 0x3p-8F) == 0x3f82);
}

TEST_CASE("parts of any cut at leaf bounds merge in any order to the same bits") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("partial", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(60); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint64_t tokens = 1 + dice.below(20 * kLeafTokens);
      std::vector<PartialNode> leaves;
      for (std::uint64_t begin = 0; begin < tokens; begin += kLeafTokens) {
        leaves.push_back(made_up_node(kSmall, {begin, std::min(begin + kLeafTokens, tokens)}, dice));
      }
      const PartialAttention whole(kSmall, leaves);
      CHECK(whole.exact());
      CHECK(whole.nodes().size() == maximal_nodes({0, tokens}).size());

      std::vector<PartialAttention> parts;
      for (std::size_t first = 0; first < leaves.size();) {
        const std::size_t count = 1 + dice.below(leaves.size() - first);
        parts.emplace_back(kSmall,
                           std::vector<PartialNode>(leaves.begin() + static_cast<std::ptrdiff_t>(first),
                                                    leaves.begin() + static_cast<std::ptrdiff_t>(first + count)));
        first += count;
      }
      for (std::size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[dice.below(i)]);
      while (parts.size() > 1) {  // any two of them
        const std::size_t into = dice.below(parts.size() - 1);
        parts[into].merge(std::move(parts.back()));
        parts.pop_back();
      }
      CHECK(parts[0].exact());
      CHECK(parts[0].kernel() == kAvx2);
      CHECK(same_bits(finished(parts[0], tokens), finished(whole, tokens)));
      CHECK(same_bits(lse_of(parts[0], LseBase::kE, RowOrder::kTokensFirst),
                      lse_of(whole, LseBase::kE, RowOrder::kTokensFirst)));
    }
  }
}

TEST_CASE("the order in which parts are merged is that of the tree: left with right, the ragged leaf first of all") {
  Dice dice(3);
  std::vector<PartialNode> leaves;
  for (std::uint64_t leaf = 0; leaf < 6; ++leaf) {
    leaves.push_back(made_up_node(kSmall, {leaf * 1024, leaf * 1024 + (leaf == 5 ? 7U : 1024U)}, dice));
  }
  const auto merge = [](std::vector<float> a, const std::vector<float>& b) {
    float* x = a.data();
    const float* y = b.data();
    const std::size_t values = kSmall.values();
    const std::size_t rows = kSmall.rows();
    merge_rows({x, x + values, x + values + rows}, {y, y + values, y + values + rows}, rows, kSmall.head_dim);
    return a;
  };
  const std::vector<float> by_hand =
      merge(merge(merge(leaves[0].values, leaves[1].values), merge(leaves[2].values, leaves[3].values)),
            merge(leaves[4].values, leaves[5].values));
  const PartialAttention part(kSmall, leaves);
  const std::vector<float> lse = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
  for (std::size_t row = 0; row < kSmall.rows(); ++row) {
    const float max = by_hand[kSmall.values() + row];
    const float sum = by_hand[kSmall.values() + kSmall.rows() + row];
    const float expected = sum == 0.0F ? -kInfinity : static_cast<float>(double{max} + std::log2(double{sum}));
    CHECK(lse[row] == expected);
  }
}

TEST_CASE("pieces of one leaf that follow each other join to the nodes of the whole range") {
  Dice dice(5);
  for (const TokenRange whole : {TokenRange{0, 1024}, {100, 900}, {1000, 1100}, {500, 3500}, {4096, 4200}}) {
    CAPTURE(whole.begin);
    for (int turn = 0; turn < 20; ++turn) {
      PartialAttention part(kSmall);
      for (std::uint64_t begin = whole.begin, end = 0; begin < whole.end; begin = end) {
        end = std::min(whole.end, begin + 1 + dice.below(300));
        part.merge(made_up_part(kSmall, {begin, end}, dice));
      }
      const std::vector<float> before = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
      part.join_pieces();
      std::vector<TokenRange> ranges;
      for (const PartialNode& node : part.nodes()) ranges.push_back(node.range);
      CHECK(ranges == maximal_nodes(whole));
      const std::vector<float> after = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
      for (std::size_t i = 0; i < after.size(); ++i) {
        CHECK((after[i] == before[i] || std::abs(after[i] - before[i]) < 1e-4F));
      }
    }
  }
  // What is missing between two pieces keeps them apart.
  PartialAttention part = made_up_part(kSmall, {0, 100}, dice);
  part.merge(made_up_part(kSmall, {101, 1024}, dice));
  part.join_pieces();
  CHECK(part.nodes().size() == 2);
}

TEST_CASE("an empty part changes nothing, and is nothing") {
  Dice dice(4);
  const PartialAttention part = made_up_part(kSmall, {0, 3000}, dice);
  PartialAttention empty(kSmall);
  CHECK(empty.empty());
  CHECK(empty.exact());
  CHECK(empty.kernel() == std::nullopt);
  for (const float lse : lse_of(empty, LseBase::kE, RowOrder::kHeadsFirst)) CHECK(lse == -kInfinity);
  for (const float value : finished(empty, 0)) CHECK(value == 0.0F);

  empty.merge(part);
  CHECK(same_bits(finished(empty, 3000), finished(part, 3000)));
  PartialAttention other = part;
  other.merge(PartialAttention(kSmall));
  CHECK(same_bits(finished(other, 3000), finished(part, 3000)));
}

TEST_CASE("rows that see no token of two parts stay nothing: lse is -inf, the result 0, and neither is NaN") {
  PartialNode left{{0, 1024}, kAvx2, true, std::vector<float>(PartialNode::floats(kSmall))};
  for (std::size_t row = 0; row < kSmall.rows(); ++row) left.values[kSmall.values() + row] = -kInfinity;
  PartialNode right = left;
  right.range = {1024, 1030};
  PartialAttention part(kSmall, {left});
  part.merge(PartialAttention(kSmall, {right}));
  for (const float lse : lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst)) CHECK(lse == -kInfinity);
  for (const float value : finished(part, 1030)) CHECK(value == 0.0F);

  std::vector<float> lse(kSmall.rows(), -kInfinity);
  std::vector<float> out(kSmall.values(), std::nanf(""));  // what some kernels leave in such rows
  const TokenRange covers{1030, 1040};
  part.merge(PartialAttention::from_lse(kSmall, std::as_bytes(std::span(out)), DType::kFloat32, lse, LseBase::kE,
                                        RowOrder::kHeadsFirst, std::span(&covers, 1)));
  for (const float value : finished(part, 1040)) CHECK(value == 0.0F);
}

TEST_CASE("what covers a token twice, has another shape or lacks tokens is refused, and nothing has changed") {
  Dice dice(5);
  PartialAttention part = made_up_part(kSmall, {0, 2048}, dice);
  const Error twice = refused(ErrorCode::kArgument, part, [&] { part.merge(part); });
  CHECK(field_of(twice, "begin") == 0);
  CHECK(field_of(twice, "end") == 2048);
  const Error shared =
      refused(ErrorCode::kArgument, part, [&] { part.merge(made_up_part(kSmall, {2000, 4096}, dice)); });
  CHECK(field_of(shared, "begin") == 2000);
  refused(ErrorCode::kArgument, part, [&] { part.merge(made_up_part({3, 2, 8}, {2048, 4096}, dice)); });
  refused(ErrorCode::kArgument, part, [&] { part.merge(PartialAttention({2, 3, 16})); });

  part.merge(made_up_part(kSmall, {3072, 4000}, dice));
  const Error lacking = refused(ErrorCode::kState, part, [&] { finished(part, 4000); });
  CHECK(field_of(lacking, "begin") == 2048);
  CHECK(field_of(lacking, "end") == 3072);
  part.merge(made_up_part(kSmall, {2048, 3072}, dice));
  refused(ErrorCode::kState, part, [&] { finished(part, 4001); });
  refused(ErrorCode::kState, part, [&] { finished(part, 3999); });
  CHECK_NOTHROW(finished(part, 4000));

  std::vector<std::byte> small(3);
  refused(ErrorCode::kArgument, part, [&] { part.finish(DType::kFloat32, 4000, small); });
  std::vector<std::byte> room(kSmall.values());
  refused(ErrorCode::kArgument, part, [&] { part.finish(DType::kInt8, 4000, room); });
  std::vector<float> few(1);
  refused(ErrorCode::kArgument, part, [&] { part.lse(LseBase::kE, RowOrder::kHeadsFirst, few); });
  CHECK_THROWS_AS((void)merged({}), Error);
}

TEST_CASE("shapes and nodes that cannot be are refused") {
  Dice dice(6);
  CHECK_THROWS_AS(PartialAttention({0, 1, 8}), Error);
  CHECK_THROWS_AS(PartialAttention({1, 1, 0}), Error);
  CHECK_THROWS_AS(PartialAttention({1, (1U << 20) + 1, 8}), Error);
  CHECK_THROWS_AS(PartialAttention({1U << 20, 1U << 20, 8}), Error);
  for (const TokenRange range : {TokenRange{0, 0}, TokenRange{1000, 1030}, TokenRange{1024, 3072},
                                 TokenRange{kSequenceTokensMax, kSequenceTokensMax + 1024}}) {
    CHECK_THROWS_AS(PartialAttention(kSmall, {made_up_node(kSmall, range, dice)}), Error);
  }
  CHECK_THROWS_AS(PartialAttention(kSmall, {made_up_node({2, 3, 16}, {0, 1024}, dice)}), Error);
  const PartialNode node = made_up_node(kSmall, {0, 1024}, dice);
  CHECK_THROWS_AS(PartialAttention(kSmall, {node, node}), Error);
}

TEST_CASE("a cut within a leaf is merged from left to right, and is not called exact") {
  Dice dice(7);
  std::vector<PartialNode> pieces;
  for (const TokenRange range : {TokenRange{0, 100}, TokenRange{100, 700}, TokenRange{700, 1024}}) {
    pieces.push_back(made_up_node(kSmall, range, dice));
  }
  const PartialAttention first(kSmall, {pieces[0]});
  CHECK(first.exact());  // it may be the end of the sequence
  PartialAttention middle(kSmall, {pieces[1]});
  CHECK_FALSE(middle.exact());

  const PartialAttention all(kSmall, {pieces[2], pieces[0], pieces[1]});
  CHECK(all.nodes().size() == 1);
  CHECK_FALSE(all.exact());
  PartialAttention late(kSmall, {pieces[2]});
  late.merge(first);
  CHECK(late.nodes().size() == 2);
  late.merge(middle);
  CHECK(late.nodes().size() == 1);
  CHECK(same_bits(finished(late, 1024), finished(all, 1024)));
  late.merge(made_up_part(kSmall, {1024, 2048}, dice));
  CHECK(late.nodes().size() == 1);
  CHECK_FALSE(late.exact());
}

TEST_CASE("parts of different kernels merge, and say that their bits are not canonical") {
  Dice dice(8);
  PartialAttention part(kSmall, {made_up_node(kSmall, {0, 1024}, dice)});
  part.merge(PartialAttention(kSmall, {made_up_node(kSmall, {1024, 2048}, dice, {AttentionIsa::kAvx512, 1})}));
  CHECK(part.nodes().size() == 1);
  CHECK_FALSE(part.exact());
  CHECK(part.kernel() == std::nullopt);
  CHECK_NOTHROW(finished(part, 2048));
  PartialAttention apart(kSmall, {made_up_node(kSmall, {0, 1024}, dice)});
  apart.merge(PartialAttention(kSmall, {made_up_node(kSmall, {2048, 3072}, dice, {AttentionIsa::kAvx2, 2})}));
  CHECK_FALSE(apart.exact());
  CHECK(kernel_name(kAvx2) == "avx2/1");
}

TEST_CASE("NaN in what a part holds is not lost in a merge") {
  Dice dice(10);
  PartialNode node = made_up_node(kSmall, {0, 1024}, dice);
  node.values[0] = std::nanf("");
  node.values[kSmall.values()] = 1.0F;
  node.values[kSmall.values() + kSmall.rows()] = 1.0F;
  PartialAttention part(kSmall, {node});
  part.merge(made_up_part(kSmall, {1024, 3000}, dice));
  CHECK(std::isnan(finished(part, 3000)[0]));
}

TEST_CASE("a merge that runs out of memory has changed nothing") {
  Dice dice(11);
  const PartialAttention left = made_up_part(kSmall, {0, 3000}, dice);
  const PartialAttention right = made_up_part(kSmall, {3072, 9000}, dice);
  const int threw = testing::fail_each_allocation([&](auto&& fail) {
    PartialAttention part = left;
    PartialAttention other = right;
    if (fail([&] { part.merge(std::move(other)); })) {
      CHECK(part.covers() == left.covers());
      CHECK(same_bits(finished(part, 3000), finished(left, 3000)));
    }
  });
  CHECK(threw > 0);
}

}  // namespace
}  // namespace kvpool
