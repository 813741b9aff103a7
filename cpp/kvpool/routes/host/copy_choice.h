// Chooses, by measurement, whether writes of about one size copy faster through the caches or past them.
//
// Data in the caches is copied faster through them, other data past them. Which case a write meets depends on how soon
// blocks are used again and on the machine, and cannot be told from its size. Measured on Sapphire Rapids, one thread,
// 64 x 64 KiB in us: cached blocks 261 (through) and 309 (past), others 567 and 331.
//
// Thread-safety: all of it. A few relaxed loads and stores; of simultaneous measurements some may be lost.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvpool/base/copy.h"

namespace kvpool {

class CopyChoice {
 public:
  // Up to kCachedMax always through the caches, which hold so little in any case; above kStreamingMin always past them,
  // because such a write would evict itself.
  static constexpr std::uint64_t kCachedMax = std::uint64_t{256} << 10;
  static constexpr std::uint64_t kStreamingMin = std::uint64_t{32} << 20;

  struct Pick {
    CopyWay way;
    bool counts;  // whether to record its time: only if the write before went the same way, as the caches show its
                  // effect
  };

  // The faster way, and from time to time the other one, twice in a row.
  Pick pick(std::uint64_t bytes) noexcept;
  void took(const Pick& pick, std::uint64_t bytes, double us) noexcept;

 private:
  struct SizeClass {
    std::atomic<std::uint32_t> writes{0};
    std::array<std::atomic<float>, 2> us_per_mib{};  // by CopyWay; 0: not measured yet
  };
  static constexpr std::size_t kClasses = 4;  // up to 1, 4, 16 and 64 MiB
  SizeClass& class_of(std::uint64_t bytes) noexcept;

  std::array<SizeClass, kClasses> classes_;
};

}  // namespace kvpool
