#include "kvpool/cuda/fp8.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fuzz_seeds.h"

namespace kvpool::cuda {
namespace {

// From the definitions of the formats, in double.
double value_of(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const std::uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, static_cast<int>(exponent) - bias);
  return (bits >> (exponent_bits + mantissa_bits)) != 0 ? -magnitude : magnitude;
}

double value_of_half(std::uint16_t bits, bool bfloat16) {
  const int mantissa_bits = bfloat16 ? 7 : 10;
  const int exponent_bits = 15 - mantissa_bits;
  const std::uint32_t most = (1u << exponent_bits) - 1;
  if (((bits >> mantissa_bits) & most) == most) {
    const bool infinite = (bits & ((1u << mantissa_bits) - 1)) == 0;
    return infinite ? std::copysign(std::numeric_limits<double>::infinity(), (bits & 0x8000) != 0 ? -1.0 : 1.0)
                    : std::numeric_limits<double>::quiet_NaN();
  }
  return value_of(bits, exponent_bits, mantissa_bits);
}

// The nearest of all 127 magnitudes, the even one of two.
std::uint8_t nearest_e4m3(double value) {
  if (std::isnan(value)) return kE4m3Nan;
  const double magnitude = std::fabs(value);
  std::uint8_t best = 0;
  for (int code = 1; code <= kE4m3Max; ++code) {
    const double was = std::fabs(value_of(best, 4, 3) - magnitude);
    const double is = std::fabs(value_of(static_cast<std::uint32_t>(code), 4, 3) - magnitude);
    if (is < was || (is == was && code % 2 == 0)) best = static_cast<std::uint8_t>(code);
  }
  if (std::isinf(magnitude)) best = kE4m3Max;
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

// Where one code ends and the next begins, for the millions of checks below: the midpoints, exact in a double.
std::uint8_t nearest_e4m3_fast(double value) {
  static const auto midpoints = [] {
    std::array<double, kE4m3Max> result{};
    for (std::uint32_t code = 0; code < kE4m3Max; ++code) {
      result[code] = (value_of(code, 4, 3) + value_of(code + 1, 4, 3)) / 2;
    }
    return result;
  }();
  if (std::isnan(value)) return kE4m3Nan;
  const double magnitude = std::fabs(value);
  std::size_t code =
      static_cast<std::size_t>(std::lower_bound(midpoints.begin(), midpoints.end(), magnitude) - midpoints.begin());
  // On a midpoint lower_bound stops below it.
  if (code < midpoints.size() && midpoints[code] == magnitude && code % 2 != 0) ++code;
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

TEST_CASE("the two models of rounding to e4m3 agree") {
  testing::Dice dice(7);
  for (int i = 0; i < 20'000; ++i) {
    const double value = std::ldexp(static_cast<double>(dice.below(1 << 12)), static_cast<int>(dice.below(24)) - 20);
    REQUIRE(nearest_e4m3(value) == nearest_e4m3_fast(value));
    REQUIRE(nearest_e4m3(-value) == nearest_e4m3_fast(-value));
  }
}

TEST_CASE("all 16-bit floats become the nearest e4m3, of either type and whatever the scale") {
  for (const bool bfloat16 : {false, true}) {
    for (const float scale : {1.0f, 0.5f, 3.7f, 1e-3f, 1e4f, -2.0f, 0x1p-126f, 0x1p127f}) {
      int wrong = 0;
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        // A product of floats, rounded to a float: 8 or 11 bits times 24 fit a double.
        const auto product = static_cast<float>(value_of_half(half, bfloat16) * static_cast<double>(scale));
        if (e4m3_of_half(half, bfloat16, scale) != nearest_e4m3_fast(product)) ++wrong;
      }
      CHECK_MESSAGE(wrong == 0, "bfloat16 ", bfloat16, ", scale ", scale);
    }
  }
}

TEST_CASE("the edges of e4m3 are where they should be") {
  const auto bfloat16 = [](float value) { return static_cast<std::uint16_t>(bits_of_float(value) >> 16); };
  CHECK(e4m3_of_half(bfloat16(448.0f), true, 1.0f) == kE4m3Max);
  CHECK(e4m3_of_half(bfloat16(1e30f), true, 1.0f) == kE4m3Max);
  CHECK(e4m3_of_half(bfloat16(-1e30f), true, 1.0f) == (0x80 | kE4m3Max));
  CHECK(e4m3_of_half(0x7F80, true, 1.0f) == kE4m3Max);  // infinity
  CHECK(e4m3_of_half(0xFF80, true, 1.0f) == (0x80 | kE4m3Max));
  CHECK(e4m3_of_half(0x7FC0, true, 1.0f) == kE4m3Nan);
  CHECK(e4m3_of_half(0xFFC0, true, 1.0f) == kE4m3Nan);
  CHECK(e4m3_of_half(0x8000, true, 1.0f) == 0x80);              // -0
  CHECK(e4m3_of_half(bfloat16(0x1p-9f), true, 1.0f) == 0x01);   // the smallest
  CHECK(e4m3_of_half(bfloat16(0x1p-10f), true, 1.0f) == 0x00);  // half of it: to even
  CHECK(e4m3_of_half(bfloat16(0x1.8p-9f), true, 1.0f) == 0x02);
  CHECK(e4m3_of_halves(0x0000'3F80, true, 1.0f) == 0x0038);  // the first of memory comes first
  CHECK(e4m3_of_halves(0x3F80'0000, true, 1.0f) == 0x3800);
}

TEST_CASE("any 32-bit float becomes the nearest e4m3") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    testing::Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(300'000); ++i) {
      // Around what e4m3 can say, most of the time.
      auto bits = static_cast<std::uint32_t>(dice.any());
      if (!dice.one_in(4)) bits = (bits & 0x807FFFFFu) | (112 + dice.below(26)) << 23;
      if (dice.one_in(2)) bits &= 0xFFF00000u;
      if (dice.one_in(4)) bits ^= 1;
      const float value = float_of_bits(bits);
      REQUIRE_MESSAGE(e4m3_of_float_portable(value) == nearest_e4m3_fast(value), "bits ", bits);
    }
  }
}

}  // namespace
}  // namespace kvpool::cuda
