// The element types of queries, K and V and results, as float32 and back, rounded to the nearest, ties to even.
//
// Only for sources that are compiled for every processor: an inline function from a source with special flags could
// be the copy that the linker keeps.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvpool/base/page_format.h"

namespace kvpool {

inline float float_of_bfloat16(std::uint16_t bits) noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline float float_of_float16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | magnitude << 13);  // inf and NaN
  // The exponent is moved to its place, and its bias corrected by a multiplication, which is exact and normalises
  // subnormal numbers as well.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

// The type has no infinity; all ones of exponent and mantissa is NaN.
inline float float_of_float8_e4m3(std::uint8_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x80U} << 24;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

inline std::uint16_t bfloat16_of(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);  // stays NaN
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

inline std::uint16_t float16_of(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // from 65520 on: infinity
  if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds at 2^-24, the step of subnormal numbers
    const float rounded = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3f000000U));
  }
  return static_cast<std::uint16_t>(sign | (magnitude + 0xfffU + (magnitude >> 13 & 1U) - 0x38000000U) >> 13);
}

// `count` elements from `from` as float32. REQUIRES: the type is float32, float16, bfloat16 or float8_e4m3fn.
void to_floats(DType dtype, const std::byte* from, std::size_t count, float* to) noexcept;

// `count` numbers as elements of a type. REQUIRES: the type is float32, float16 or bfloat16.
void from_floats(DType dtype, const float* from, std::size_t count, std::byte* to) noexcept;

// Of queries and results.
inline bool is_result_type(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBfloat16;
}

}  // namespace kvpool
