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

namespace kvpool {
namespace {

using testing::Dice;
using testing::finished;
using testing::lse_of;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr KernelId kAvx2{AttentionIsa::kAvx2, 1};
constexpr PartialShape kSmall{2, 3, 8};

// What a kernel could have computed for a range: some rows saw nothing there.
PartialNode made_up_node(const PartialShape& shape, TokenRange range, Dice& dice, KernelId kernel = kAvx2) {
  PartialNode node{range, kernel, true, std::vector<float>(PartialNode::floats(shape))};
  float* max = node.values.data() + shape.values();
  for (std::size_t row = 0; row < shape.rows(); ++row) {
    const bool seen = !dice.one_in(5);
    max[row] = seen ? static_cast<float>(20.0 * testing::uniform(dice)) : -kInfinity;
    max[shape.rows() + row] = seen ? static_cast<float>(1.0 + std::abs(testing::uniform(dice))) : 0.0F;
    for (std::size_t d = 0; d < shape.head_dim; ++d) {
      node.values[row * shape.head_dim + d] = seen ? static_cast<float>(testing::uniform(dice)) : 0.0F;
    }
  }
  return node;
}

PartialAttention made_up_part(const PartialShape& shape, TokenRange range, Dice& dice) {
  std::vector<PartialNode> nodes;
  for (const TokenRange& node : maximal_nodes(range)) nodes.push_back(made_up_node(shape, node, dice));
  return {shape, std::move(nodes)};
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

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

TEST_CASE("lse and results of other implementations come in any base, order and type") {
  Dice dice(9);
  const PartialShape shape{3, 4, 16};
  const PartialAttention part = made_up_part(shape, {0, 1500}, dice);
  const std::vector<float> out = finished(part, 1500);
  const TokenRange covers{0, 1500};
  for (const LseBase base : {LseBase::kTwo, LseBase::kE}) {
    for (const RowOrder order : {RowOrder::kHeadsFirst, RowOrder::kTokensFirst}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
        std::vector<std::byte> typed(shape.values() * dtype_bytes(dtype));
        part.finish(dtype, 1500, typed);
        const std::vector<float> lse = lse_of(part, base, order);
        const PartialAttention back =
            PartialAttention::from_lse(shape, typed, dtype, lse, base, order, std::span(&covers, 1));
        CHECK(back.has_foreign());
        CHECK_FALSE(back.exact());
        const double step = dtype == DType::kFloat32 ? 0.0 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
        const std::vector<float> again = finished(back, 1500);
        for (std::size_t i = 0; i < out.size(); ++i) {
          CHECK(std::abs(double{again[i]} - double{out[i]}) <= step * std::abs(double{out[i]}));
        }
        for (std::size_t row = 0; row < lse.size(); ++row) {
          const float got = lse_of(back, base, order)[row];
          CHECK((got == lse[row] || std::abs(got - lse[row]) <= 1e-5F));
        }
      }
    }
  }
  // The order and the base are what they say.
  const std::vector<float> two = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
  const std::vector<float> natural = lse_of(part, LseBase::kE, RowOrder::kTokensFirst);
  for (std::size_t head = 0; head < 4; ++head) {
    for (std::size_t token = 0; token < 3; ++token) {
      const float a = two[head * 3 + token];
      const float b = natural[token * 4 + head];
      CHECK((a == b || std::abs(a * 0.69314718F - b) <= 1e-5F));
    }
  }
}

TEST_CASE("two halves that two engines computed are as one, in whatever order they arrive") {
  // One row, one element; lse from scores that are known. Tokens 0 and 1 have the scores 1 and 3, token 2 has 2.
  const PartialShape shape{1, 1, 1};
  const double left_sum = std::exp(1.0) + std::exp(3.0);
  const std::vector<float> left_out{static_cast<float>((std::exp(1.0) * 5 + std::exp(3.0) * 7) / left_sum)};
  const std::vector<float> left_lse{static_cast<float>(std::log(left_sum))};
  const std::vector<float> right_out{11.0F};
  const std::vector<float> right_lse{static_cast<float>(2.0 / std::log(2.0))};
  const TokenRange left_covers{0, 2};
  const TokenRange right_covers{2, 3};
  const auto left = PartialAttention::from_lse(shape, std::as_bytes(std::span(left_out)), DType::kFloat32, left_lse,
                                               LseBase::kE, RowOrder::kHeadsFirst, std::span(&left_covers, 1));
  const auto right = PartialAttention::from_lse(shape, std::as_bytes(std::span(right_out)), DType::kFloat32, right_lse,
                                                LseBase::kTwo, RowOrder::kHeadsFirst, std::span(&right_covers, 1));
  const double sum = left_sum + std::exp(2.0);
  const double expected = (std::exp(1.0) * 5 + std::exp(3.0) * 7 + std::exp(2.0) * 11) / sum;
  const std::array both{left, right};
  const std::array reversed{right, left};
  CHECK(std::abs(double{finished(merged(both), 3)[0]} - expected) <= 2e-6);
  CHECK(std::abs(double{lse_of(merged(both), LseBase::kE, RowOrder::kHeadsFirst)[0]} - std::log(sum)) <= 1e-6);
  CHECK(same_bits(finished(merged(both), 3), finished(merged(reversed), 3)));
}

TEST_CASE("lse that is +inf or NaN, or does not fit, is refused") {
  const TokenRange covers{0, 5};
  std::vector<float> out(kSmall.values());
  std::vector<float> lse(kSmall.rows());
  const auto made = [&](DType dtype, std::span<const TokenRange> ranges) {
    return PartialAttention::from_lse(kSmall, std::as_bytes(std::span(out)), dtype, lse, LseBase::kE,
                                      RowOrder::kHeadsFirst, ranges);
  };
  CHECK_NOTHROW(made(DType::kFloat32, std::span(&covers, 1)));
  CHECK_THROWS_AS(made(DType::kFloat16, std::span(&covers, 1)), Error);  // half as many bytes
  CHECK_THROWS_AS(made(DType::kUint8, std::span(&covers, 1)), Error);
  CHECK_THROWS_AS(made(DType::kFloat32, {}), Error);
  const std::array overlapping{covers, TokenRange{4, 6}};
  CHECK_THROWS_AS(made(DType::kFloat32, overlapping), Error);
  lse[2] = kInfinity;
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
  lse[2] = std::nanf("");
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
  lse.pop_back();
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
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
