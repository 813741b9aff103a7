// AVX-512 with products of bfloat16 (Cooper Lake, Sapphire Rapids, Zen 4): scores of bfloat16 queries with bfloat16
// keys take half the instructions. Values are added as in the plain kernel: rounding the weights to bfloat16 as well
// would cost eight bits of the result. Other types of KV are computed by the plain kernel's code.
#include "kvpool/attention/kernel_list.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)
#include "kvpool/attention/vector_avx512.h"

namespace kvpool {
namespace {

struct Bfloat16Dot {
  static constexpr std::size_t kElements = 32;  // of a vector

  KVPOOL_KERNEL_INLINE static __m512bh load(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  // The first `n` elements, with zeros behind them.
  KVPOOL_KERNEL_INLINE static __m512bh load_first(std::size_t n, const void* p) {
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((1U << n) - 1U, p));
  }

  template <int Rows, int Tokens>
  KVPOOL_KERNEL_INLINE static void scores(const LeafJob& job, const Piece& piece, int first, const float* q,
                                          std::size_t dim, float* s) {
    if (job.q_bfloat16 == nullptr) {
      FloatDot<Avx512, Bfloat16>::scores<Rows, Tokens>(job, piece, first, q, dim, s);
      return;
    }
    const std::uint16_t* rows = job.q_bfloat16 + (q - job.q);
    __m512 sums[Rows * Tokens];
    for (int i = 0; i < Rows * Tokens; ++i) sums[i] = _mm512_setzero_ps();
    const std::byte* k[Tokens];
    for (int t = 0; t < Tokens; ++t) k[t] = piece.tile->k[first + t] + piece.offset;
    std::size_t d = 0;
    for (; d + kElements <= dim; d += kElements) {
      if (piece.ahead) {
        for (int t = 0; t < Tokens; ++t) prefetch(piece.next->k[first + t] + piece.next_offset + d * 2);
      }
      __m512bh row[Rows];
      for (int r = 0; r < Rows; ++r) row[r] = load(rows + r * dim + d);
      for (int t = 0; t < Tokens; ++t) {
        const __m512bh key = load(k[t] + d * 2);
        for (int r = 0; r < Rows; ++r) sums[r * Tokens + t] = _mm512_dpbf16_ps(sums[r * Tokens + t], key, row[r]);
      }
    }
    if (d < dim) {
      for (int t = 0; t < Tokens; ++t) {
        const __m512bh key = load_first(dim - d, k[t] + d * 2);
        for (int r = 0; r < Rows; ++r) {
          const __m512bh row = load_first(dim - d, rows + r * dim + d);
          sums[r * Tokens + t] = _mm512_dpbf16_ps(sums[r * Tokens + t], key, row);
        }
      }
    }
    const __m512 scale = _mm512_set1_ps(job.scale_log2e);
    for (int i = 0; i < Rows * Tokens; ++i) sums[i] = _mm512_mul_ps(sums[i], scale);
    store_sums<Avx512, Rows, Tokens>(sums, s + first);
  }
};

bool runs_here() noexcept { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

}  // namespace

const AttentionKernel* avx512bf16_kernel() noexcept {
  const AttentionKernel* plain = avx512_kernel();
  if (plain == nullptr) return nullptr;
  static const AttentionKernel kernel{
      {AttentionIsa::kAvx512Bf16, 1},
      {plain->leaf[0], plain->leaf[1], attend_leaf<Avx512, Bfloat16, Bfloat16Dot>, plain->leaf[3]},
      runs_here};
  return &kernel;
}

}  // namespace kvpool
#else
namespace kvpool {
const AttentionKernel* avx512bf16_kernel() noexcept { return nullptr; }
}  // namespace kvpool
#endif
