#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "attention_kit.h"
#include "kvpool/attention/attend.h"
#include "kvpool/attention/kernel.h"
#include "kvpool/attention/merge_tree.h"

namespace kvpool {
namespace {

using testing::any_form;
using testing::BlockForm;
using testing::Dice;
using testing::Elements;
using testing::Expected;
using testing::finished;
using testing::KVContent;
using testing::KVMemory;
using testing::lse_of;
using testing::worst_difference;

constexpr double kOutputBound = 2e-6;  // of float32 results: values up to 1, scores up to some ten
constexpr double kLseBound = 1e-5;

constexpr DType kKVTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat8E4M3};
constexpr DType kQueryTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};

struct Case {
  std::uint32_t kv_heads = 2;
  std::uint32_t group = 2;
  std::uint32_t dim = 64;
  std::uint64_t tokens = 100;
  std::uint32_t query_tokens = 1;
  DType kv_type = DType::kFloat32;
  DType query_type = DType::kFloat32;
  bool causal = true;
  double amplitude = 2.0;  // of queries
  std::optional<float> scale;

  std::uint64_t query_begin() const { return tokens >= query_tokens ? tokens - query_tokens : 0; }
};

Case any_case(Dice& dice) {
  const std::uint32_t dims[] = {8, 24, 40, 64, 64, 72, 80, 96, 128, 128, 200, 256};
  Case c;
  c.kv_heads = 1 + dice.below(3);
  c.group = 1 + dice.below(9);
  c.dim = dims[dice.below(12)];
  c.query_tokens = dice.one_in(2) ? 1 : 1 + dice.below(kQueryTokensMax);
  c.tokens = 1 + dice.below(80);
  if (dice.one_in(4)) {  // more than a leaf, with fewer rows
    c.tokens = 1 + dice.below(1500);
    c.group = 1 + dice.below(3);
    c.query_tokens = 1 + dice.below(2);
  }
  c.kv_type = kKVTypes[dice.below(4)];
  c.query_type = kQueryTypes[dice.below(3)];
  c.causal = !dice.one_in(4);
  c.amplitude = dice.one_in(2) ? 1.0 : 4.0;
  if (dice.one_in(3)) c.scale = static_cast<float>(testing::uniform(dice) / std::sqrt(c.dim));
  return c;
}

PartialAttention computed(const Case& c, const KVMemory& memory, const Elements& q, const AttentionKernel& kernel) {
  AttendCall call;
  call.kv = memory.rows();
  call.layer = KVMemory::kLayer;
  call.query_heads = c.kv_heads * c.group;
  call.query_dtype = c.query_type;
  call.scale = c.scale;
  call.causal = c.causal;
  const AttendItem item = memory.item(q, c.query_tokens, c.query_begin());
  call.items = std::span(&item, 1);
  AttendSettings settings;
  settings.kernel = &kernel;
  return attend(call, {}, settings).front();
}

void check_case(const Case& c, const BlockForm& form, Dice& dice) {
  const KVContent content(c.kv_heads, c.dim, c.kv_type, c.tokens, dice);
  const std::uint32_t query_heads = c.kv_heads * c.group;
  const Elements q(c.query_type, std::size_t{c.query_tokens} * query_heads * c.dim, c.amplitude, dice);
  const double scale = c.scale ? double{*c.scale} : 1.0 / std::sqrt(c.dim);
  const Expected expected = reference(content, q, c.query_tokens, query_heads, c.query_begin(), c.causal, scale);
  const KVMemory memory(content, form, {0, c.tokens}, 0);
  for (const AttentionKernel* kernel : attention_kernels()) {
    const std::string name = kernel_name(kernel->id);
    CAPTURE(name);
    const PartialAttention part = computed(c, memory, q, *kernel);
    CHECK(part.exact());
    CHECK(part.kernel() == kernel->id);
    CHECK(worst_difference(finished(part, c.tokens), expected.out) <= kOutputBound);
    CHECK(worst_difference(lse_of(part, LseBase::kE, RowOrder::kTokensFirst), expected.lse) <= kLseBound);
  }
}

TEST_CASE("every kernel gives what attention in double gives, for all shapes, types and layouts") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("attention kernel", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::model_length(60); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Case c = any_case(dice);
      CAPTURE(c.kv_heads);
      CAPTURE(c.group);
      CAPTURE(c.dim);
      CAPTURE(c.tokens);
      CAPTURE(c.query_tokens);
      CAPTURE(c.causal);
      const std::string types = std::string(dtype_name(c.kv_type)) + " " + dtype_name(c.query_type);
      CAPTURE(types);
      check_case(c, any_form(dice), dice);
    }
  }
}

TEST_CASE("the last kernel of the list runs on every processor, and each has all types") {
  REQUIRE_FALSE(attention_kernels().empty());
  CHECK(attention_kernels().back()->id.isa == AttentionIsa::kPortable);
  for (const AttentionKernel* kernel : attention_kernels()) {
    CHECK(kernel->runs_here());
    for (const auto leaf : kernel->leaf) CHECK((leaf != nullptr));
  }
  for (int i = 0; i < 4; ++i) CHECK(kv_type_index(kKVTypes[i]) == i);
  CHECK(kv_type_index(DType::kInt8) == -1);
  CHECK(kv_type_index(DType::kNone) == -1);
}

TEST_CASE("scores that rise from tile to tile are carried over, and so are those that fall") {
  for (const bool rising : {true, false}) {
    Dice dice(5);
    Case c;
    c.tokens = 700;
    KVContent content(c.kv_heads, c.dim, c.kv_type, c.tokens, dice);
    const Elements q(c.query_type, std::size_t{c.kv_heads} * c.group * c.dim, 1.0, dice);
    for (std::uint64_t token = 0; token < c.tokens; ++token) {
      for (std::uint32_t head = 0; head < c.kv_heads; ++head) {
        // Along the query: the score is the position over 20.
        const float* row = &q.values[std::size_t{head} * c.group * c.dim];
        float length = 0;
        for (std::uint32_t d = 0; d < c.dim; ++d) length += row[d] * row[d];
        const auto place = static_cast<float>(rising ? token : c.tokens - 1 - token);
        for (std::uint32_t d = 0; d < c.dim; ++d) {
          float& value = content.k.values[content.row(token, head) + d];
          value = row[d] / length * 8.0F * place / 20.0F;
          std::memcpy(&content.k.bytes[(content.row(token, head) + d) * sizeof(value)], &value, sizeof(value));
        }
      }
    }
    const Expected expected = reference(content, q, 1, c.kv_heads * c.group, c.tokens - 1, true, 1.0 / 8.0);
    const KVMemory memory(content, {}, {0, c.tokens}, 0);
    for (const AttentionKernel* kernel : attention_kernels()) {
      const PartialAttention part = computed(c, memory, q, *kernel);
      CHECK(worst_difference(finished(part, c.tokens), expected.out) <= 1e-5);  // scores up to 35 have fewer digits
      CHECK(worst_difference(lse_of(part, LseBase::kE, RowOrder::kTokensFirst), expected.lse) <= kLseBound);
    }
  }
}

TEST_CASE("a row that sees no token of a leaf, or of all of them, is nothing and not NaN") {
  Dice dice(6);
  Case c;
  c.tokens = 40;
  c.query_tokens = 4;
  const KVContent content(c.kv_heads, c.dim, c.kv_type, c.tokens, dice);
  const Elements q(c.query_type, std::size_t{c.query_tokens} * c.kv_heads * c.group * c.dim, 1.0, dice);
  const KVMemory memory(content, {}, {32, 40}, 32);
  const AttendItem item = memory.item(q, c.query_tokens, 30);  // of 30 to 33; only the last two see a token from 32 on
  AttendCall call;
  call.kv = memory.rows();
  call.query_heads = c.kv_heads * c.group;
  call.query_dtype = c.query_type;
  call.items = std::span(&item, 1);
  for (const AttentionKernel* kernel : attention_kernels()) {
    AttendSettings settings;
    settings.kernel = kernel;
    const PartialAttention part = attend(call, {}, settings).front();
    const std::vector<float> lse = lse_of(part, LseBase::kTwo, RowOrder::kTokensFirst);
    for (std::size_t row = 0; row < lse.size(); ++row) {
      const bool sees = row / call.query_heads >= 2;
      CHECK(std::isfinite(lse[row]) == sees);
      CHECK(std::isinf(lse[row]) == !sees);
    }
    for (const PartialNode& node : part.nodes()) {
      for (std::size_t i = 0; i < part.shape().values(); ++i) CHECK_FALSE(std::isnan(node.values[i]));
    }
  }
}

TEST_CASE("NaN in a token that a row may not see has no influence on it, and in one that it sees it shows") {
  for (const DType type : kKVTypes) {
    Dice dice(7);
    Case c;
    c.tokens = 50;
    c.query_tokens = 3;
    c.dim = 24;
    c.kv_type = type;
    KVContent content(c.kv_heads, c.dim, c.kv_type, c.tokens, dice);
    const std::size_t row_bytes = std::size_t{c.dim} * dtype_bytes(type);
    for (std::uint32_t head = 0; head < c.kv_heads; ++head) {  // of the last token, which only query token 2 sees
      std::memset(&content.k.bytes[content.row(49, head) * dtype_bytes(type)], 0xff, row_bytes);
      std::memset(&content.v.bytes[content.row(49, head) * dtype_bytes(type)], 0xff, row_bytes);
    }
    const Elements q(c.query_type, std::size_t{c.query_tokens} * c.kv_heads * c.group * c.dim, 1.0, dice);
    const KVMemory memory(content, {}, {0, c.tokens}, 0);
    for (const AttentionKernel* kernel : attention_kernels()) {
      const std::vector<float> out = finished(computed(c, memory, q, *kernel), c.tokens);
      for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i / (out.size() / 3) == 2));
    }
  }
}

TEST_CASE("the bits of a leaf do not depend on the layout, the block size, or the heads that are computed with it") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("attention layout", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(10); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Case c = any_case(dice);
      const KVContent content(c.kv_heads, c.dim, c.kv_type, c.tokens, dice);
      const Elements q(c.query_type, std::size_t{c.query_tokens} * c.kv_heads * c.group * c.dim, c.amplitude, dice);
      for (const AttentionKernel* kernel : attention_kernels()) {
        const KVMemory plain(content, {}, {0, c.tokens}, 0);
        const std::vector<float> expected = finished(computed(c, plain, q, *kernel), c.tokens);
        const KVMemory other(content, any_form(dice), {0, c.tokens}, 0);
        const std::vector<float> got = finished(computed(c, other, q, *kernel), c.tokens);
        CHECK(std::memcmp(expected.data(), got.data(), expected.size() * sizeof(float)) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace kvpool
