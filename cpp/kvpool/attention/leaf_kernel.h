// Attention over one leaf, written once for the vectors of every instruction set.
//
// Each kernel's source includes this file and is compiled with special flags. So everything here is in an unnamed
// namespace, and nothing from the standard library but types: of an inline function that several sources define, the
// linker keeps one copy, and that must not be one that only some processors can run.
//
// The loop over a tile's tokens, for some of the rows of one KV head:
//
//   scores      s = q . k, several rows and tokens at a time, one vector of sums for each, added up across at the end
//   softmax     the running maximum, exp2(s - max), and the rescaling of what came before by exp2(old max - new max)
//   add_values  acc += exp2(s - max) * v, some columns at a time, tokens in order
//
//   A7  The operations on one row, and their order, depend on the row and the positions of the tokens alone: not on how
//       many rows are computed together, on the heads of the job, or on where the rows lie.
//   A8  Rows of K and V of tokens outside [begin, end) are never read, and those that a row may not see have no
//   influence
//       on it: not even NaN.
//
// A vector type `V` has: F, kWidth (8 or 16 floats), kSums (how many sums the registers hold), and the operations used
// below. An element type `E` has kSize, and load() of kWidth elements, load_half() of 8 with zeros behind them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/attention/kernel.h"

#define KVPOOL_KERNEL_INLINE [[gnu::always_inline]] inline
// So that the sums of a loop are registers and not an array. AddressSanitizer's checks of each access would take
// minutes to compile in unrolled loops, and for each dimension again.
#if defined(__SANITIZE_ADDRESS__) || defined(KVPOOL_KERNEL_QUICKLY)
#define KVPOOL_KERNEL_UNROLL
#else
#define KVPOOL_KERNEL_UNROLL _Pragma("GCC unroll 16")
#define KVPOOL_KERNEL_DIMENSIONS
#endif

namespace kvpool {
namespace {  // NOLINT(google-build-namespaces): see above

constexpr int kTileTokens = 16;  // divides a leaf
constexpr int kLineBytes = 64;
constexpr int kRowsTogether = 4;
constexpr float kMinusInfinity = -__builtin_inff();

// Rows of head 0 for each token of a tile. Behind the last token its row is repeated, so that all can be read.
struct Tile {
  std::uint64_t begin;
  int tokens;
  const std::byte* k[kTileTokens];
  const std::byte* v[kTileTokens];
};

// The tokens of [begin, limit) that are in begin's tile. REQUIRES: begin < limit.
KVPOOL_KERNEL_INLINE void locate(const LeafJob& job, std::uint64_t begin, std::uint64_t limit, Tile& tile) {
  std::uint64_t end = begin - begin % kTileTokens + kTileTokens;
  end = end < limit ? end : limit;
  tile.begin = begin;
  tile.tokens = static_cast<int>(end - begin);
  std::uint64_t block = (begin - job.table_begin) / job.block_tokens;
  std::uint64_t token = (begin - job.table_begin) % job.block_tokens;
  for (int i = 0; i < tile.tokens; ++i) {
    tile.k[i] = job.k_blocks[block] + job.k_offset + token * job.token_stride;
    tile.v[i] = job.v_blocks[block] + job.v_offset + token * job.token_stride;
    if (++token == job.block_tokens) {
      token = 0;
      ++block;
    }
  }
  for (int i = tile.tokens; i < kTileTokens; ++i) {
    tile.k[i] = tile.k[tile.tokens - 1];
    tile.v[i] = tile.v[tile.tokens - 1];
  }
}

// The rows of one head in a tile, and those that are needed next, which the first rows that are computed prefetch.
struct Piece {
  const Tile* tile;
  const Tile* next;
  std::uint64_t offset;  // of the head
  std::uint64_t next_offset;
  bool ahead;
};

KVPOOL_KERNEL_INLINE void prefetch(const std::byte* line) { __builtin_prefetch(line, 0, 2); }

// x <= 0, or NaN, which it stays: 2^x within 2e-7, exactly 1 for 0; 0 below 2^-126.
template <class V>
KVPOOL_KERNEL_INLINE V::F exp2_of(typename V::F x) {
  x = V::max(V::set(-127.0F), x);
  const typename V::F integer = V::round(x);
  const typename V::F f = V::sub(x, integer);
  typename V::F p = V::set(1.535336188319500e-4F);
  p = V::fma(p, f, V::set(1.339887440266574e-3F));
  p = V::fma(p, f, V::set(9.618437357674640e-3F));
  p = V::fma(p, f, V::set(5.550332471162809e-2F));
  p = V::fma(p, f, V::set(2.402264791363012e-1F));
  p = V::fma(p, f, V::set(6.931472028550421e-1F));
  p = V::fma(p, f, V::set(1.0F));
  return V::mul(p, V::power_of_two(integer));
}

// Sums of `Rows` x `Tokens` vectors, each across, to s[row][token]. REQUIRES: Rows * Tokens is a multiple of 4.
template <class V, int Rows, int Tokens>
KVPOOL_KERNEL_INLINE void store_sums(const typename V::F* sums, float* s) {
  KVPOOL_KERNEL_UNROLL
  for (int i = 0; i < Rows * Tokens; i += 4) {
    float four[4];
    V::sums_across(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], four);
    KVPOOL_KERNEL_UNROLL
    for (int j = 0; j < 4; ++j) s[(i + j) / Tokens * kTileTokens + (i + j) % Tokens] = four[j];
  }
}

// Products of float32 queries with K, by fused multiplication and addition.
template <class V, class E>
struct FloatDot {
  // s[row][token] = q[row] . k[token] for `Tokens` tokens of the tile from `first` on.
  template <int Rows, int Tokens>
  KVPOOL_KERNEL_INLINE static void scores(const LeafJob& /*job*/, const Piece& piece, int first, const float* q,
                                          std::size_t dim, float* s) {
    typename V::F sums[Rows * Tokens];
    KVPOOL_KERNEL_UNROLL
    for (int i = 0; i < Rows * Tokens; ++i) sums[i] = V::set(0.0F);
    const std::byte* k[Tokens];
    KVPOOL_KERNEL_UNROLL
    for (int t = 0; t < Tokens; ++t) k[t] = piece.tile->k[first + t] + piece.offset;
    constexpr std::size_t kLine = kLineBytes / E::kSize;
    std::size_t d = 0;
    for (; d + V::kWidth <= dim; d += V::kWidth) {
      if (piece.ahead && d % kLine == 0) {
        KVPOOL_KERNEL_UNROLL
        for (int t = 0; t < Tokens; ++t) prefetch(piece.next->k[first + t] + piece.next_offset + d * E::kSize);
      }
      typename V::F rows[Rows];
      KVPOOL_KERNEL_UNROLL
      for (int r = 0; r < Rows; ++r) rows[r] = V::load(q + r * dim + d);
      KVPOOL_KERNEL_UNROLL
      for (int t = 0; t < Tokens; ++t) {
        const typename V::F key = E::load(k[t] + d * E::kSize);
        KVPOOL_KERNEL_UNROLL
        for (int r = 0; r < Rows; ++r) sums[r * Tokens + t] = V::fma(key, rows[r], sums[r * Tokens + t]);
      }
    }
    if (V::kWidth > 8 && d < dim) {
      KVPOOL_KERNEL_UNROLL
      for (int t = 0; t < Tokens; ++t) {
        const typename V::F key = E::load_half(k[t] + d * E::kSize);
        KVPOOL_KERNEL_UNROLL
        for (int r = 0; r < Rows; ++r) {
          sums[r * Tokens + t] = V::fma(key, V::load_half(q + r * dim + d), sums[r * Tokens + t]);
        }
      }
    }
    store_sums<V, Rows, Tokens>(sums, s + first);
  }
};

// Turns the scores of a row's first `seen` tokens into exp2(s - max), and those behind them into 0.
template <class V>
KVPOOL_KERNEL_INLINE void softmax(int seen, float* s, std::size_t dim, float* acc, float* max, float* sum) {
  constexpr int kVectors = kTileTokens / V::kWidth;
  typename V::F x[kVectors];
  KVPOOL_KERNEL_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    x[i] = V::first(seen - i * V::kWidth, V::load(s + i * V::kWidth), V::set(kMinusInfinity));
  }
  typename V::F most = x[0];
  KVPOOL_KERNEL_UNROLL
  for (int i = 1; i < kVectors; ++i) most = V::max(most, x[i]);
  const float tile_max = V::max_across(most);
  if (tile_max > *max) {
    const float old = *max;
    *max = tile_max;
    if (old != kMinusInfinity) {  // else nothing was added yet
      const typename V::F weight = exp2_of<V>(V::set(old - tile_max));
      std::size_t d = 0;
      for (; d + V::kWidth <= dim; d += V::kWidth) V::store(acc + d, V::mul(V::load(acc + d), weight));
      if (V::kWidth > 8 && d < dim) V::store_half(acc + d, V::mul(V::load_half(acc + d), weight));
      *sum *= V::lowest(weight);
    }
  }
  // With no score above -inf every difference would be NaN.
  const typename V::F base = V::set(*max == kMinusInfinity ? 0.0F : *max);
  typename V::F total = V::set(0.0F);
  KVPOOL_KERNEL_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const typename V::F p = exp2_of<V>(V::sub(x[i], base));
    V::store(s + i * V::kWidth, p);
    total = V::add(total, p);
  }
  *sum += V::sum_across(total);
}

// acc[row][d..] += s[row] * v for `Columns` vectors of columns.
template <class V, class E, int Rows, int Columns>
KVPOOL_KERNEL_INLINE void add_columns(const Piece& piece, int tokens, const float* s, std::size_t d, std::size_t dim,
                                      float* acc) {
  constexpr std::size_t kBytes = std::size_t{Columns} * V::kWidth * E::kSize;
  const bool ahead = piece.ahead && d * E::kSize % kLineBytes == 0;
  typename V::F sums[Rows * Columns];
  KVPOOL_KERNEL_UNROLL
  for (int r = 0; r < Rows; ++r) {
    KVPOOL_KERNEL_UNROLL
    for (int c = 0; c < Columns; ++c) sums[r * Columns + c] = V::load(acc + r * dim + d + c * V::kWidth);
  }
  for (int t = 0; t < tokens; ++t) {
    if (ahead) {
      const std::byte* next = piece.next->v[t] + piece.next_offset + d * E::kSize;
      for (std::size_t line = 0; line < kBytes; line += kLineBytes) prefetch(next + line);
    }
    const std::byte* v = piece.tile->v[t] + piece.offset + d * E::kSize;
    typename V::F values[Columns];
    KVPOOL_KERNEL_UNROLL
    for (int c = 0; c < Columns; ++c) values[c] = E::load(v + c * V::kWidth * E::kSize);
    KVPOOL_KERNEL_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const typename V::F weight = V::set(s[r * kTileTokens + t]);
      KVPOOL_KERNEL_UNROLL
      for (int c = 0; c < Columns; ++c) sums[r * Columns + c] = V::fma(values[c], weight, sums[r * Columns + c]);
    }
  }
  KVPOOL_KERNEL_UNROLL
  for (int r = 0; r < Rows; ++r) {
    KVPOOL_KERNEL_UNROLL
    for (int c = 0; c < Columns; ++c) V::store(acc + r * dim + d + c * V::kWidth, sums[r * Columns + c]);
  }
}

// REQUIRES: every row sees the tile's first `tokens` tokens.
template <class V, class E, int Dim, int Rows>
KVPOOL_KERNEL_INLINE void add_values(const Piece& piece, int tokens, const float* s, std::size_t dim, float* acc) {
  constexpr int kMost = V::kSums / Rows;
  constexpr int kColumns = Dim > 0 && Dim / V::kWidth < kMost ? Dim / V::kWidth : kMost;
  std::size_t d = 0;
  for (; d + kColumns * V::kWidth <= dim; d += kColumns * V::kWidth) {
    add_columns<V, E, Rows, kColumns>(piece, tokens, s, d, dim, acc);
  }
  for (; d + V::kWidth <= dim; d += V::kWidth) add_columns<V, E, Rows, 1>(piece, tokens, s, d, dim, acc);
  if (V::kWidth > 8 && d < dim) {
    KVPOOL_KERNEL_UNROLL
    for (int r = 0; r < Rows; ++r) {
      typename V::F sum = V::load_half(acc + r * dim + d);
      for (int t = 0; t < tokens; ++t) {
        const std::byte* v = piece.tile->v[t] + piece.offset + d * E::kSize;
        sum = V::fma(E::load_half(v), V::set(s[r * kTileTokens + t]), sum);
      }
      V::store_half(acc + r * dim + d, sum);
    }
  }
}

// Some rows of a KV head against a tile, all of which see its first `seen` tokens and no others. REQUIRES: seen > 0.
template <class V, class E, class Dot, int Dim, int Rows>
KVPOOL_KERNEL_INLINE void attend_rows(const LeafJob& job, const Piece& piece, std::size_t row, int seen) {
  constexpr int kTokens = V::kSums / Rows;
  const std::size_t dim = Dim > 0 ? Dim : job.head_dim;
  alignas(64) float s[Rows * kTileTokens];
  for (int t = 0; t < kTileTokens; t += kTokens) {
    if (t < seen) {
      Dot::template scores<Rows, kTokens>(job, piece, t, job.q + row * dim, dim, s);
    } else {
      KVPOOL_KERNEL_UNROLL
      for (int i = 0; i < Rows * kTokens; ++i) s[i / kTokens * kTileTokens + t + i % kTokens] = 0.0F;
    }
  }
  float* acc = job.acc + row * dim;
  KVPOOL_KERNEL_UNROLL
  for (int r = 0; r < Rows; ++r) {
    softmax<V>(seen, s + r * kTileTokens, dim, acc + r * dim, job.max + row + r, job.sum + row + r);
  }
  add_values<V, E, Dim, Rows>(piece, seen, s, dim, acc);
}

// How many tokens of the tile row `row` of a KV head sees.
KVPOOL_KERNEL_INLINE int seen_by(const LeafJob& job, const Tile& tile, std::uint32_t row) {
  const std::uint64_t end = job.visible + row % job.query_tokens;
  if (end <= tile.begin) return 0;
  return end - tile.begin < static_cast<std::uint64_t>(tile.tokens) ? static_cast<int>(end - tile.begin) : tile.tokens;
}

template <class V, class E, class Dot, int Dim>
void attend_piece(const LeafJob& job, Piece piece, std::size_t first_row) {
  const Tile& tile = *piece.tile;
  std::uint32_t row = 0;
  if (seen_by(job, tile, 0) == tile.tokens) {  // query token 0 sees the least
    for (; row + kRowsTogether <= job.rows; row += kRowsTogether) {
      attend_rows<V, E, Dot, Dim, kRowsTogether>(job, piece, first_row + row, tile.tokens);
      piece.ahead = false;
    }
    for (; row + 2 <= job.rows; row += 2) {
      attend_rows<V, E, Dot, Dim, 2>(job, piece, first_row + row, tile.tokens);
      piece.ahead = false;
    }
  }
  for (; row < job.rows; ++row) {
    const int seen = seen_by(job, tile, row);
    if (seen == 0) continue;
    attend_rows<V, E, Dot, Dim, 1>(job, piece, first_row + row, seen);
    piece.ahead = false;
  }
}

template <class V, class E, class Dot, int Dim>
void attend_leaf_of(const LeafJob& job) {
  const std::size_t rows = static_cast<std::size_t>(job.head_end - job.head_begin) * job.rows;
  for (std::size_t i = 0; i < rows * job.head_dim; ++i) job.acc[i] = 0.0F;
  for (std::size_t i = 0; i < rows; ++i) {
    job.max[i] = kMinusInfinity;
    job.sum[i] = 0.0F;
  }
  Tile tiles[2];
  int at = 0;
  locate(job, job.begin, job.end, tiles[0]);
  for (;;) {
    const Tile& tile = tiles[at];
    const std::uint64_t end = tile.begin + static_cast<std::uint64_t>(tile.tokens);
    const bool more = end < job.readable;
    if (more) locate(job, end, end < job.end ? job.end : job.readable, tiles[1 - at]);
    for (std::uint32_t head = job.head_begin; head < job.head_end; ++head) {
      const bool last = head + 1 == job.head_end;
      const Piece piece{&tile, last && more ? &tiles[1 - at] : &tile, head * job.head_stride,
                        (last ? job.head_begin : head + 1) * job.head_stride, true};
      attend_piece<V, E, Dot, Dim>(job, piece, static_cast<std::size_t>(head - job.head_begin) * job.rows);
    }
    if (end == job.end) return;
    at = 1 - at;
  }
}

template <class V, class E, class Dot>
void attend_any_leaf(const LeafJob& job) noexcept {
  attend_leaf_of<V, E, Dot, 0>(job);
}

// The dimensions that most models have are constants for the compiler.
template <class V, class E, class Dot>
void attend_leaf(const LeafJob& job) noexcept {
#if defined(KVPOOL_KERNEL_DIMENSIONS)
  if (job.head_dim == 128) return attend_leaf_of<V, E, Dot, 128>(job);
  if (job.head_dim == 64) return attend_leaf_of<V, E, Dot, 64>(job);
#endif
  attend_any_leaf<V, E, Dot>(job);
}

}  // namespace
}  // namespace kvpool
