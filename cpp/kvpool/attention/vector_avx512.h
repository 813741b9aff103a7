// The vectors of AVX-512 (F, BW, DQ and VL) for leaf_kernel.h. For sources with these flags, as leaf_kernel.h is.
#pragma once

#include <immintrin.h>

#include "kvpool/attention/leaf_kernel.h"

namespace kvpool {
namespace {  // NOLINT(google-build-namespaces): as leaf_kernel.h

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kSums = 16;  // of 32 registers

  KVPOOL_KERNEL_INLINE static F set(float x) { return _mm512_set1_ps(x); }
  KVPOOL_KERNEL_INLINE static F load(const float* p) { return _mm512_loadu_ps(p); }
  KVPOOL_KERNEL_INLINE static F load_half(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
  KVPOOL_KERNEL_INLINE static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  KVPOOL_KERNEL_INLINE static void store_half(float* p, F x) { _mm512_mask_storeu_ps(p, 0xff, x); }
  KVPOOL_KERNEL_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  KVPOOL_KERNEL_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  KVPOOL_KERNEL_INLINE static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
  KVPOOL_KERNEL_INLINE static F round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // REQUIRES: integer >= -127, for which it is 0.
  KVPOOL_KERNEL_INLINE static F power_of_two(F integer) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(integer), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  // The first n elements of x, and the others of `rest`.
  KVPOOL_KERNEL_INLINE static F first(int n, F x, F rest) {
    const unsigned bits = n <= 0 ? 0U : n >= kWidth ? 0xffffU : (1U << n) - 1U;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), rest, x);
  }
  KVPOOL_KERNEL_INLINE static float lowest(F x) { return _mm512_cvtss_f32(x); }
  KVPOOL_KERNEL_INLINE static float max_across(F x) {
    const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }
  KVPOOL_KERNEL_INLINE static float sum_across(F x) {
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  // In each quarter: a0 b0 a1 b1 + a2 b2 a3 b3, likewise c and d, and of these the halves side by side.
  KVPOOL_KERNEL_INLINE static void sums_across(F a, F b, F c, F d, float* four) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    const F x =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
  }
};

KVPOOL_KERNEL_INLINE __m256i load_bytes32(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Eight elements of 16 bits, with zeros behind them.
KVPOOL_KERNEL_INLINE __m256i load_bytes16(const std::byte* p) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

struct Float32 {
  static constexpr std::size_t kSize = 4;
  KVPOOL_KERNEL_INLINE static __m512 load(const std::byte* p) { return _mm512_loadu_ps(p); }
  KVPOOL_KERNEL_INLINE static __m512 load_half(const std::byte* p) { return _mm512_maskz_loadu_ps(0xff, p); }
};

struct Float16 {
  static constexpr std::size_t kSize = 2;
  KVPOOL_KERNEL_INLINE static __m512 load(const std::byte* p) { return _mm512_cvtph_ps(load_bytes32(p)); }
  KVPOOL_KERNEL_INLINE static __m512 load_half(const std::byte* p) { return _mm512_cvtph_ps(load_bytes16(p)); }
};

struct Bfloat16 {
  static constexpr std::size_t kSize = 2;
  KVPOOL_KERNEL_INLINE static __m512 widened(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  KVPOOL_KERNEL_INLINE static __m512 load(const std::byte* p) { return widened(load_bytes32(p)); }
  KVPOOL_KERNEL_INLINE static __m512 load_half(const std::byte* p) { return widened(load_bytes16(p)); }
};

// A float16 of the same bits is 2^-8 times the number, except NaN, which float16 shows by all ones of the exponent.
struct Float8E4M3 {
  static constexpr std::size_t kSize = 1;
  KVPOOL_KERNEL_INLINE static __m512 widened(__m128i bytes) {
    const __m256i x = _mm256_cvtepu8_epi16(bytes);
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), 1);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
  }
  KVPOOL_KERNEL_INLINE static __m512 load(const std::byte* p) {
    return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  KVPOOL_KERNEL_INLINE static __m512 load_half(const std::byte* p) {
    return widened(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
};

KVPOOL_KERNEL_INLINE bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
}  // namespace kvpool
