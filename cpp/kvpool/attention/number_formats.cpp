#include "kvpool/attention/number_formats.h"

#include <cstring>

namespace kvpool {
namespace {

template <class Bits, float (*Convert)(Bits) noexcept>
void each_to_float(const std::byte* from, std::size_t count, float* to) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, from + i * sizeof(Bits), sizeof(Bits));
    to[i] = Convert(bits);
  }
}

template <std::uint16_t (*Convert)(float) noexcept>
void each_from_float(const float* from, std::size_t count, std::byte* to) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t bits = Convert(from[i]);
    std::memcpy(to + i * sizeof(bits), &bits, sizeof(bits));
  }
}

}  // namespace

void to_floats(DType dtype, const std::byte* from, std::size_t count, float* to) noexcept {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    each_to_float<std::uint16_t, float_of_float16>(from, count, to);
  } else if (dtype == DType::kBfloat16) {
    each_to_float<std::uint16_t, float_of_bfloat16>(from, count, to);
  } else {
    each_to_float<std::uint8_t, float_of_float8_e4m3>(from, count, to);
  }
}

void from_floats(DType dtype, const float* from, std::size_t count, std::byte* to) noexcept {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    each_from_float<float16_of>(from, count, to);
  } else {
    each_from_float<bfloat16_of>(from, count, to);
  }
}

}  // namespace kvpool
