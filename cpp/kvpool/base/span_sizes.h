// The size classes of a span heap.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvpool {

// Sizes: steps of 16 up to 256, then of an eighth of the next lower power of two; from 1 KiB on, the next odd number of
// lines. Above 120 KiB: a span divided by 16 down to 4.
class SpanSizes {
 public:
  static constexpr std::size_t kCount = 100;
  static constexpr std::size_t kLineBytes = 64;

  struct Size {
    std::uint32_t bytes = 0;
    std::uint32_t capacity = 0;  // objects in a span
  };

  // `span_bytes`: the bytes of a span that objects can use.
  constexpr explicit SpanSizes(std::size_t span_bytes) : span_bytes_(span_bytes) {
    for (std::size_t bytes = 16; bytes < 256; bytes += 16) add(bytes);
    for (std::size_t power = 256; power <= 65536; power *= 2) {
      for (std::size_t bytes = power; bytes < 2 * power && bytes <= kGeometricMax; bytes += power / 8) {
        if (bytes == kOddFrom) first_odd_ = count_;
        add(bytes < kOddFrom ? bytes : bytes + kLineBytes);
      }
    }
    first_divided_ = count_;
    for (std::size_t objects = 16; objects >= 4; --objects) add(span_bytes_ / objects / kLineBytes * kLineBytes);
    std::uint8_t found = 0;
    for (std::size_t units = 0; units < small_.size(); ++units) {
      while (sizes_[found].bytes < units * 16) ++found;
      small_[units] = found;
    }
  }

  constexpr std::size_t largest() const noexcept { return sizes_[kCount - 1].bytes; }
  constexpr const Size& operator[](std::size_t size_class) const noexcept { return sizes_[size_class]; }

  // The class with the smallest objects that hold `bytes`. REQUIRES: bytes <= largest().
  constexpr std::size_t find(std::size_t bytes) const noexcept {
    if (bytes <= kOddFrom) return small_[(bytes + 15) / 16];
    if (bytes <= kOddFrom + kLineBytes) return first_odd_;
    // Without the line that makes it odd, a class's size is m << s with m from 9 to 16.
    const std::size_t last = bytes - kLineBytes - 1;
    const auto width = static_cast<std::size_t>(std::bit_width(last));  // 11 from 1 KiB on
    const std::size_t found = first_odd_ + 1 + (width - 11) * 8 + ((last >> (width - 4)) & 7U);
    if (found < first_divided_) return found;
    std::size_t divided = first_divided_;
    while (sizes_[divided].bytes < bytes) ++divided;
    return divided;
  }

  // Checks find(): it finds each class for its size, and for the smallest size that the class below cannot hold.
  constexpr bool finds_every_class() const noexcept {
    for (std::size_t i = 0; i < count_; ++i) {
      if (find(sizes_[i].bytes) != i) return false;
      if (i > 0 && find(sizes_[i - 1].bytes + 1) != i) return false;
    }
    return count_ == kCount;
  }

 private:
  static constexpr std::size_t kOddFrom = 1024;
  static constexpr std::size_t kGeometricMax = std::size_t{120} * 1024;

  constexpr void add(std::size_t bytes) {
    sizes_[count_] = {static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(span_bytes_ / bytes)};
    ++count_;
  }

  std::size_t span_bytes_;
  std::array<Size, kCount> sizes_{};
  std::size_t count_ = 0;
  std::size_t first_odd_ = 0;
  std::size_t first_divided_ = 0;
  std::array<std::uint8_t, kOddFrom / 16 + 1> small_{};  // for up to kOddFrom bytes, by the number of 16-byte units
};

}  // namespace kvpool
