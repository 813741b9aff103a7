// A 64-bit fenced address of one token block.
//
//   63        50 49  47 46              24 23               0
//   +-----------+------+------------------+------------------+
//   | instance  |medium|    generation    |      block       |
//   |  14 bits  |3 bits|     23 bits      |     24 bits      |
//   +-----------+------+------------------+------------------+
//
// Freeing a block bumps its generation, so an address that outlived its block differs from the valid one: it is stale
// and is refused, and never names another owner's data. Instance 0 means "this pool", before it joins a cluster.
#pragma once

#include <cstdint>

#include "kvpool/base/medium.h"

namespace kvpool {

using Address = std::uint64_t;

inline constexpr int kInstanceBits = 14;
inline constexpr int kMediumBits = 3;
inline constexpr int kGenerationBits = 23;
inline constexpr int kBlockBits = 24;
static_assert(kInstanceBits + kMediumBits + kGenerationBits + kBlockBits == 64);
static_assert(kMedia.size() < (1U << kMediumBits) - 1, "a code is left for the next medium");

inline constexpr std::uint32_t kInstanceMax = (1U << kInstanceBits) - 1;
inline constexpr std::uint32_t kGenerationMax = (1U << kGenerationBits) - 1;
inline constexpr std::uint32_t kBlocksMax = 1U << kBlockBits;  // blocks a medium can have

inline constexpr int kGenerationShift = kBlockBits;
inline constexpr int kMediumShift = kBlockBits + kGenerationBits;
inline constexpr int kInstanceShift = kMediumShift + kMediumBits;

inline constexpr Address make_address(std::uint32_t instance, Medium medium, std::uint32_t generation,
                                      std::uint32_t block) noexcept {
  return (static_cast<Address>(instance) << kInstanceShift) | (static_cast<Address>(medium) << kMediumShift) |
         (static_cast<Address>(generation) << kGenerationShift) | block;
}

inline constexpr std::uint32_t instance_of(Address address) noexcept {
  return static_cast<std::uint32_t>(address >> kInstanceShift);
}
// As it was before its pool had an instance id: equal for all addresses of one block and generation of one pool.
inline constexpr Address without_instance(Address address) noexcept {
  return address & ((Address{1} << kInstanceShift) - 1);
}
// The raw bits, which may name no medium in an address that a caller made up: see is_medium().
inline constexpr std::uint32_t medium_bits_of(Address address) noexcept {
  return static_cast<std::uint32_t>(address >> kMediumShift) & ((1U << kMediumBits) - 1);
}
// REQUIRES: the address names a medium.
inline constexpr Medium medium_of(Address address) noexcept { return static_cast<Medium>(medium_bits_of(address)); }
inline constexpr std::uint32_t generation_of(Address address) noexcept {
  return static_cast<std::uint32_t>(address >> kGenerationShift) & kGenerationMax;
}
inline constexpr std::uint32_t block_of(Address address) noexcept {
  return static_cast<std::uint32_t>(address) & (kBlocksMax - 1);
}

}  // namespace kvpool
