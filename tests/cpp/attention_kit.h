// Blocks of KV in memory for tests of attention, and a reference that computes the same in double.
//
// Memory that holds no token of the sequence is NaN in every element type: other layers, tokens behind the sequence,
// and those before the range of a table.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/attention/attend.h"
#include "kvpool/attention/number_formats.h"

namespace kvpool::testing {

inline double uniform(Dice& dice) { return (static_cast<double>(dice.below(1U << 24)) + 0.5) / (1 << 23) - 1.0; }

// A number from [-amplitude, amplitude] as an element of a type. Of float8, any up to 1.
inline void put_any(DType dtype, double amplitude, Dice& dice, std::byte* to) {
  if (dtype == DType::kFloat8E4M3) {
    *to = static_cast<std::byte>(dice.below(0x39) | (dice.one_in(2) ? 0x80U : 0U));
  } else {
    const auto value = static_cast<float>(amplitude * uniform(dice));
    from_floats(dtype, &value, 1, to);
  }
}

// Elements of a type, and what they are worth.
struct Elements {
  std::vector<std::byte> bytes;
  std::vector<float> values;

  Elements(DType dtype, std::size_t count, double amplitude, Dice& dice)
      : bytes(count * dtype_bytes(dtype)), values(count) {
    for (std::size_t i = 0; i < count; ++i) {
      put_any(dtype, amplitude, dice, &bytes[i * dtype_bytes(dtype)]);
    }
    to_floats(dtype, bytes.data(), count, values.data());
  }
};

// K and V of one layer and sequence: [token, head, dim].
struct KVContent {
  std::uint32_t heads;
  std::uint32_t dim;
  DType dtype;
  std::uint64_t tokens;
  Elements k;
  Elements v;

  KVContent(std::uint32_t head_count, std::uint32_t head_dim, DType type, std::uint64_t token_count, Dice& dice)
      : heads(head_count),
        dim(head_dim),
        dtype(type),
        tokens(token_count),
        k(type, token_count * head_count * head_dim, 1.0, dice),
        v(type, token_count * head_count * head_dim, 1.0, dice) {}

  std::size_t row(std::uint64_t token, std::uint32_t head) const { return (token * heads + head) * dim; }
};

struct BlockForm {
  std::uint32_t block_tokens = 16;
  bool tokens_first = false;
  bool fused = false;
  bool aggregated = true;
};

inline BlockForm any_form(Dice& dice) {
  const std::uint32_t sizes[] = {1, 3, 5, 16, 16, 32, 100, 1024};
  return {sizes[dice.below(8)], dice.one_in(2), dice.one_in(3), dice.one_in(2)};
}

// The tokens of a range in blocks of some form, each of which has memory for itself.
class KVMemory {
 public:
  static constexpr std::uint32_t kLayers = 3;
  static constexpr std::uint32_t kLayer = 1;

  KVMemory(const KVContent& content, const BlockForm& form, TokenRange range, std::uint64_t table_begin)
      : range_(range), table_begin_(table_begin) {
    const PageFormat format{content.heads, content.dim, content.dtype, form.tokens_first, form.fused};
    rows_ = kv_rows(format, form.block_tokens, kLayer, form.aggregated);
    const std::size_t piece = format.row_bytes() * content.heads * form.block_tokens;
    const std::size_t bytes = form.aggregated ? piece * format.pieces_per_layer() * kLayers : piece;
    const std::uint64_t blocks =
        range.tokens() == 0 ? 0 : (range.end - table_begin + form.block_tokens - 1) / form.block_tokens;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      memory_.emplace_back(bytes, std::byte{0xff});
      k_blocks_.push_back(memory_.back().data());
      if (!form.aggregated && !form.fused) memory_.emplace_back(bytes, std::byte{0xff});
      v_blocks_.push_back(memory_.back().data());
    }
    const std::size_t row_bytes = std::size_t{content.dim} * dtype_bytes(content.dtype);
    for (std::uint64_t token = range.begin; token < range.end; ++token) {
      const std::uint64_t at = token - table_begin;
      for (std::uint32_t head = 0; head < content.heads; ++head) {
        const std::size_t offset = head * rows_.head_stride + at % form.block_tokens * rows_.token_stride;
        const std::size_t from = content.row(token, head) * dtype_bytes(content.dtype);
        std::memcpy(writable(k_blocks_[at / form.block_tokens]) + rows_.k_offset + offset, &content.k.bytes[from],
                    row_bytes);
        std::memcpy(writable(v_blocks_[at / form.block_tokens]) + rows_.v_offset + offset, &content.v.bytes[from],
                    row_bytes);
      }
    }
  }

  const KVRows& rows() const { return rows_; }

  AttendItem item(const Elements& q, std::uint32_t query_tokens, std::uint64_t query_begin) const {
    AttendItem item;
    item.k_blocks = k_blocks_;
    item.v_blocks = v_blocks_;
    item.table_begin = table_begin_;
    item.range = range_;
    item.q = q.bytes.data();
    item.query_tokens = query_tokens;
    item.query_begin = query_begin;
    return item;
  }

 private:
  static std::byte* writable(const std::byte* block) { return const_cast<std::byte*>(block); }

  TokenRange range_;
  std::uint64_t table_begin_;
  KVRows rows_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<const std::byte*> k_blocks_;
  std::vector<const std::byte*> v_blocks_;
};

struct Expected {
  std::vector<double> out;  // [token, head, dim]
  std::vector<double> lse;  // [token, head], natural
};

// Softmax attention of one query row after the other, as in the textbook.
inline Expected reference(const KVContent& kv, const Elements& q, std::uint32_t query_tokens, std::uint32_t query_heads,
                          std::uint64_t query_begin, bool causal, double scale) {
  Expected expected;
  const std::uint32_t group = query_heads / kv.heads;
  for (std::uint32_t token = 0; token < query_tokens; ++token) {
    for (std::uint32_t head = 0; head < query_heads; ++head) {
      const float* row = &q.values[(std::size_t{token} * query_heads + head) * kv.dim];
      const std::uint64_t seen = causal ? std::min(kv.tokens, query_begin + token + 1) : kv.tokens;
      std::vector<double> scores;
      double most = -std::numeric_limits<double>::infinity();
      for (std::uint64_t t = 0; t < seen; ++t) {
        double score = 0;
        for (std::uint32_t d = 0; d < kv.dim; ++d) {
          score += double{row[d]} * double{kv.k.values[kv.row(t, head / group) + d]};
        }
        scores.push_back(score * scale);
        most = std::max(most, scores.back());
      }
      double sum = 0;
      std::vector<double> out(kv.dim, 0.0);
      for (std::uint64_t t = 0; t < seen; ++t) {
        const double p = std::exp(scores[t] - most);
        sum += p;
        for (std::uint32_t d = 0; d < kv.dim; ++d) out[d] += p * double{kv.v.values[kv.row(t, head / group) + d]};
      }
      for (const double value : out) expected.out.push_back(seen > 0 ? value / sum : 0.0);
      expected.lse.push_back(seen > 0 ? most + std::log(sum) : -std::numeric_limits<double>::infinity());
    }
  }
  return expected;
}

inline std::vector<float> finished(const PartialAttention& part, std::uint64_t tokens) {
  std::vector<float> out(part.shape().values());
  part.finish(DType::kFloat32, tokens, std::as_writable_bytes(std::span(out)));
  return out;
}

inline std::vector<float> lse_of(const PartialAttention& part, LseBase base, RowOrder order) {
  std::vector<float> lse(part.shape().rows());
  part.lse(base, order, lse);
  return lse;
}

// NaN differs from everything.
inline double worst_difference(std::span<const float> got, std::span<const double> expected) {
  double worst = got.size() == expected.size() ? 0.0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < got.size() && i < expected.size(); ++i) {
    if (std::isinf(expected[i]) && double{got[i]} == expected[i]) continue;
    const double difference = std::abs(double{got[i]} - expected[i]);
    if (!(difference <= worst)) worst = difference;
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace kvpool::testing
