#include "kvpool/attention/merge_rows.h"

#include <bit>
#include <cstdint>
#include <limits>

namespace kvpool {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What a row's values are multiplied by when the maximum becomes `max`.
float weight(float own_max, float max) noexcept {
  return own_max == kNothing ? 0.0F : exp2_of_difference(own_max - max);
}

}  // namespace

float exp2_of_difference(float x) noexcept {
  if (!(x >= -126.0F)) return x != x ? x : 0.0F;
  constexpr float kToInteger = 0x1.8p23F;  // at this size floats are integers, so adding it rounds
  const float shifted = x + kToInteger;
  const float f = x - (shifted - kToInteger);  // in [-0.5, 0.5]
  float p = 1.535336188319500e-4F;
  p = p * f + 1.339887440266574e-3F;
  p = p * f + 9.618437357674640e-3F;
  p = p * f + 5.550332471162809e-2F;
  p = p * f + 2.402264791363012e-1F;
  p = p * f + 6.931472028550421e-1F;
  p = p * f + 1.0F;
  const std::uint32_t integer = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kToInteger);
  return p * std::bit_cast<float>((integer + 127U) << 23);
}

void merge_rows(const RowsView& into, const ConstRowsView& from, std::size_t rows, std::size_t dim) noexcept {
  for (std::size_t row = 0; row < rows; ++row) {
    const float a = into.max[row];
    const float b = from.max[row];
    const float max = (a > b ? a : b) + 0.0F;  // + 0: of 0 and -0, always 0
    const float weight_a = weight(a, max);
    const float weight_b = weight(b, max);
    float* acc = into.acc + row * dim;
    const float* other = from.acc + row * dim;
    for (std::size_t d = 0; d < dim; ++d) acc[d] = acc[d] * weight_a + other[d] * weight_b;
    into.sum[row] = into.sum[row] * weight_a + from.sum[row] * weight_b;
    into.max[row] = max;
  }
}

}  // namespace kvpool
