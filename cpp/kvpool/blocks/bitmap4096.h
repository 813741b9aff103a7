// A set of numbers below 4096, with the nearest member above or below found in a few instructions.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace kvpool {

class Bitmap4096 {
 public:
  static constexpr std::uint32_t kSize = 4096;
  static constexpr std::uint32_t kNone = ~0U;

  bool test(std::uint32_t i) const noexcept { return (words_[i / 64] >> (i % 64) & 1) != 0; }

  void set(std::uint32_t i) noexcept {
    words_[i / 64] |= bit(i % 64);
    summary_ |= bit(i / 64);
  }

  void clear(std::uint32_t i) noexcept {
    words_[i / 64] &= ~bit(i % 64);
    if (words_[i / 64] == 0) summary_ &= ~bit(i / 64);
  }

  // The smallest member >= i, or kNone. REQUIRES: i < kSize.
  std::uint32_t first_from(std::uint32_t i) const noexcept {
    const std::uint64_t here = words_[i / 64] & (~std::uint64_t{0} << (i % 64));
    if (here != 0) return i / 64 * 64 + static_cast<std::uint32_t>(std::countr_zero(here));
    // ~1 << k leaves the bits above k, and none at all for k = 63.
    const std::uint64_t above = summary_ & (~std::uint64_t{1} << (i / 64));
    if (above == 0) return kNone;
    const auto word = static_cast<std::uint32_t>(std::countr_zero(above));
    return word * 64 + static_cast<std::uint32_t>(std::countr_zero(words_[word]));
  }

  // The largest member < i, or kNone. REQUIRES: i <= kSize.
  std::uint32_t last_below(std::uint32_t i) const noexcept {
    if (i % 64 != 0) {
      const std::uint64_t here = words_[i / 64] & (bit(i % 64) - 1);
      if (here != 0) return i / 64 * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(here));
    }
    const std::uint64_t below = i / 64 == 64 ? summary_ : summary_ & (bit(i / 64) - 1);
    if (below == 0) return kNone;
    const std::uint32_t word = 63 - static_cast<std::uint32_t>(std::countl_zero(below));
    return word * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(words_[word]));
  }

  // The bitmap's own invariant, for audits: a word is in the summary exactly when it has a member.
  bool consistent() const noexcept {
    for (std::uint32_t word = 0; word < 64; ++word) {
      if ((words_[word] != 0) != ((summary_ >> word & 1) != 0)) return false;
    }
    return true;
  }

 private:
  static std::uint64_t bit(std::uint32_t i) noexcept { return std::uint64_t{1} << i; }

  std::array<std::uint64_t, 64> words_{};
  std::uint64_t summary_ = 0;
};

}  // namespace kvpool
