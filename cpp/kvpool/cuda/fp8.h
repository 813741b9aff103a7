// From 16-bit floats to e4m3: four bits of exponent, three of mantissa, no infinity, one NaN. For both compilers.
//
// The product with the scale is rounded to a 32-bit float, then to e4m3, to the nearest and among two equally near ones
// to the even one. What is beyond the largest value, 448, becomes it, infinities too; NaN becomes 0x7F whatever its
// sign. On sm_89 and newer the last step is one instruction, which does the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvpool/cuda/table.h"

namespace kvpool::cuda {

inline constexpr std::uint8_t kE4m3Nan = 0x7F;
inline constexpr std::uint8_t kE4m3Max = 0x7E;  // 448

KVPOOL_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

KVPOOL_HOST_DEVICE inline std::uint32_t bits_of_float(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

KVPOOL_HOST_DEVICE inline float float_of_bfloat16(std::uint16_t bits) {
  return float_of_bits(static_cast<std::uint32_t>(bits) << 16);
}

KVPOOL_HOST_DEVICE inline float float_of_float16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of_bits(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  // The exponent's bias grows from 15 to 127. A product, not a sum of bits, because it makes subnormals normal.
  const float value = float_of_bits(magnitude << 13) * 0x1p112f;
  return float_of_bits(sign | bits_of_float(value));
}

// As the instruction does it, in integers.
KVPOOL_HOST_DEVICE inline std::uint8_t e4m3_of_float_portable(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  if (magnitude > 0x7F800000u) return kE4m3Nan;
  if (magnitude >= 0x43E00000u) return static_cast<std::uint8_t>(sign | kE4m3Max);  // 448
  if (magnitude < 0x3C800000u) {                                                    // 2^-6: subnormal in e4m3
    // Neighbours of 2^14 are 2^-9 apart, as are the subnormals of e4m3: the sum rounds as it should.
    const float sum = float_of_bits(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(sign | (bits_of_float(sum) - 0x46800000u));
  }
  const std::uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded - 0x3C000000u) >> 20));  // the bias shrinks from 127 to 7
}

// Values are given as their 16 bits. REQUIRES: scale is finite.
KVPOOL_HOST_DEVICE inline float scaled(std::uint16_t half, bool bfloat16, float scale) {
  return (bfloat16 ? float_of_bfloat16(half) : float_of_float16(half)) * scale;
}

// Two at once: the first of memory in the low bits, of argument and result.
KVPOOL_HOST_DEVICE inline std::uint16_t e4m3_of_halves(std::uint32_t halves, bool bfloat16, float scale) {
  const float low = scaled(static_cast<std::uint16_t>(halves), bfloat16, scale);
  const float high = scaled(static_cast<std::uint16_t>(halves >> 16), bfloat16, scale);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
#else
  return static_cast<std::uint16_t>(e4m3_of_float_portable(low) | e4m3_of_float_portable(high) << 8);
#endif
}

KVPOOL_HOST_DEVICE inline std::uint8_t e4m3_of_half(std::uint16_t half, bool bfloat16, float scale) {
  return static_cast<std::uint8_t>(e4m3_of_halves(half, bfloat16, scale));
}

}  // namespace kvpool::cuda
