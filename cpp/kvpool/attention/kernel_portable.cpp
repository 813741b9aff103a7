// Plain C++, for every processor. Its vectors are as wide as those of AVX-512, so that tests on any machine go the ways
// that vectors of 16 take through leaf_kernel.h.
#define KVPOOL_KERNEL_QUICKLY  // vectors are arrays here in any case
#include "kvpool/attention/kernel_list.h"
#include "kvpool/attention/leaf_kernel.h"
#include "kvpool/attention/number_formats.h"

namespace kvpool {
namespace {

struct Wide {
  float x[16];
};

struct Portable {
  using F = Wide;
  static constexpr int kWidth = 16;
  static constexpr int kSums = 8;

  template <class Operation>
  KVPOOL_KERNEL_INLINE static F each(Operation operation) {
    F to;
    for (int i = 0; i < kWidth; ++i) to.x[i] = operation(i);
    return to;
  }

  static F set(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static F load_half(const float* p) {
    return each([&](int i) { return i < 8 ? p[i] : 0.0F; });
  }
  static void store(float* p, const F& x) {
    for (int i = 0; i < kWidth; ++i) p[i] = x.x[i];
  }
  static void store_half(float* p, const F& x) {
    for (int i = 0; i < 8; ++i) p[i] = x.x[i];
  }
  static F add(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
  }
  static F sub(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
  }
  static F mul(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {  // in two roundings: a fused one is a call into the C library
    return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
  }
  static F max(const F& a, const F& b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
  }
  static F round(const F& x) {
    return each([&](int i) {
      constexpr float kToInteger = 0x1.8p23F;
      return (x.x[i] + kToInteger) - kToInteger;
    });
  }
  static F power_of_two(const F& integer) {
    return each([&](int i) {
      if (integer.x[i] != integer.x[i]) return 1.0F;  // NaN has no integer; its product is NaN with any number
      return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<std::int32_t>(integer.x[i]) + 127) << 23);
    });
  }
  static F first(int n, const F& x, const F& rest) {
    return each([&](int i) { return i < n ? x.x[i] : rest.x[i]; });
  }
  static float lowest(const F& x) { return x.x[0]; }
  static float max_across(const F& x) {
    float most = x.x[0];
    for (int i = 1; i < kWidth; ++i) most = x.x[i] > most ? x.x[i] : most;
    return most;
  }
  static float sum_across(F x) {
    for (int width = kWidth / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) x.x[i] += x.x[i + width];
    }
    return x.x[0];
  }
  static void sums_across(const F& a, const F& b, const F& c, const F& d, float* four) {
    four[0] = sum_across(a);
    four[1] = sum_across(b);
    four[2] = sum_across(c);
    four[3] = sum_across(d);
  }
};

template <class Bits, float (*Convert)(Bits) noexcept>
struct Element {
  static constexpr std::size_t kSize = sizeof(Bits);

  static Bits at(const std::byte* p, int i) {
    Bits bits;
    __builtin_memcpy(&bits, p + static_cast<std::size_t>(i) * kSize, kSize);
    return bits;
  }
  static Wide load(const std::byte* p) {
    return Portable::each([&](int i) { return Convert(at(p, i)); });
  }
  static Wide load_half(const std::byte* p) {
    return Portable::each([&](int i) { return i < 8 ? Convert(at(p, i)) : 0.0F; });
  }
};

float same(float x) noexcept { return x; }
bool anywhere() noexcept { return true; }

using Float32 = Element<float, same>;
using Float16 = Element<std::uint16_t, float_of_float16>;
using Bfloat16 = Element<std::uint16_t, float_of_bfloat16>;
using Float8E4M3 = Element<std::uint8_t, float_of_float8_e4m3>;

}  // namespace

const AttentionKernel* portable_kernel() noexcept {
  static constexpr AttentionKernel kKernel{{AttentionIsa::kPortable, 1},
                                           {attend_any_leaf<Portable, Float32, FloatDot<Portable, Float32>>,
                                            attend_any_leaf<Portable, Float16, FloatDot<Portable, Float16>>,
                                            attend_leaf<Portable, Bfloat16, FloatDot<Portable, Bfloat16>>,
                                            attend_any_leaf<Portable, Float8E4M3, FloatDot<Portable, Float8E4M3>>},
                                           anywhere};
  return &kKernel;
}

}  // namespace kvpool
