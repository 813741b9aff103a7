// AVX2 with FMA and F16C: every x86 server since 2013.
#include "kvpool/attention/kernel_list.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "kvpool/attention/leaf_kernel.h"

namespace kvpool {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kSums = 8;  // of 16 registers

  KVPOOL_KERNEL_INLINE static F set(float x) { return _mm256_set1_ps(x); }
  KVPOOL_KERNEL_INLINE static F load(const float* p) { return _mm256_loadu_ps(p); }
  KVPOOL_KERNEL_INLINE static F load_half(const float* p) { return load(p); }
  KVPOOL_KERNEL_INLINE static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  KVPOOL_KERNEL_INLINE static void store_half(float* p, F x) { store(p, x); }
  KVPOOL_KERNEL_INLINE static F add(F a, F b) { return _mm256_add_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  KVPOOL_KERNEL_INLINE static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where one is NaN
  KVPOOL_KERNEL_INLINE static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // REQUIRES: integer >= -127, for which it is 0.
  KVPOOL_KERNEL_INLINE static F power_of_two(F integer) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(integer), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  // The first n elements of x, and the others of `rest`.
  KVPOOL_KERNEL_INLINE static F first(int n, F x, F rest) {
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), numbers)));
  }
  KVPOOL_KERNEL_INLINE static float lowest(F x) { return _mm256_cvtss_f32(x); }
  KVPOOL_KERNEL_INLINE static float max_across(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  KVPOOL_KERNEL_INLINE static float sum_across(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  KVPOOL_KERNEL_INLINE static void sums_across(F a, F b, F c, F d, float* four) {
    const F x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }
};

KVPOOL_KERNEL_INLINE __m128i load_bytes16(const std::byte* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

struct Float32 {
  static constexpr std::size_t kSize = 4;
  KVPOOL_KERNEL_INLINE static __m256 load(const std::byte* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
  KVPOOL_KERNEL_INLINE static __m256 load_half(const std::byte* p) { return load(p); }
};

struct Float16 {
  static constexpr std::size_t kSize = 2;
  KVPOOL_KERNEL_INLINE static __m256 load(const std::byte* p) { return _mm256_cvtph_ps(load_bytes16(p)); }
  KVPOOL_KERNEL_INLINE static __m256 load_half(const std::byte* p) { return load(p); }
};

struct Bfloat16 {
  static constexpr std::size_t kSize = 2;
  KVPOOL_KERNEL_INLINE static __m256 load(const std::byte* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bytes16(p)), 16));
  }
  KVPOOL_KERNEL_INLINE static __m256 load_half(const std::byte* p) { return load(p); }
};

// A float16 of the same bits is 2^-8 times the number, except NaN, which float16 shows by all ones of the exponent.
struct Float8E4M3 {
  static constexpr std::size_t kSize = 1;
  KVPOOL_KERNEL_INLINE static __m256 load(const std::byte* p) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), 1);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    const __m128i half = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(magnitude, 7));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0F));
  }
  KVPOOL_KERNEL_INLINE static __m256 load_half(const std::byte* p) { return load(p); }
};

bool runs_here() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const AttentionKernel* avx2_kernel() noexcept {
  static constexpr AttentionKernel kKernel{
      {AttentionIsa::kAvx2, 1},
      {attend_leaf<Avx2, Float32, FloatDot<Avx2, Float32>>, attend_leaf<Avx2, Float16, FloatDot<Avx2, Float16>>,
       attend_leaf<Avx2, Bfloat16, FloatDot<Avx2, Bfloat16>>,
       attend_leaf<Avx2, Float8E4M3, FloatDot<Avx2, Float8E4M3>>},
      runs_here};
  return &kKernel;
}

}  // namespace kvpool
#else
namespace kvpool {
const AttentionKernel* avx2_kernel() noexcept { return nullptr; }
}  // namespace kvpool
#endif
