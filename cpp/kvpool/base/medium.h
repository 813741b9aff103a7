// The kinds of memory that a block can lie in.
#pragma once

#include <cstdint>

namespace kvpool {

// Two bits of every address. Zero is never used, so that no valid address is zero. kMixed is a request ("HBM first,
// the rest DRAM") and never stands in an address.
enum class Medium : std::uint8_t { kHbm = 1, kDram = 2, kMixed = 3 };

inline constexpr int kMediaCount = 2;  // media that hold blocks: HBM and DRAM

inline constexpr int medium_index(Medium medium) noexcept { return static_cast<int>(medium) - 1; }

inline constexpr const char* medium_name(Medium medium) noexcept {
  switch (medium) {
    case Medium::kHbm:
      return "HBM";
    case Medium::kDram:
      return "DRAM";
    case Medium::kMixed:
      return "MIXED";
  }
  return "unknown";
}

}  // namespace kvpool
