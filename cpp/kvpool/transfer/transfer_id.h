// Ids of transfers: numbers of one direction of one link. Both the reader of a fetch and the sender of a transfer
// assign numbers, so ids of fetches have a separate bit.
#pragma once

#include <cstdint>

namespace kvpool {

inline constexpr std::uint64_t kFetchBit = std::uint64_t{1} << 63;
// Marks a recall of lent blocks in the quarantine. Never on the wire.
inline constexpr std::uint64_t kRecallBit = std::uint64_t{1} << 62;
// Marks a return there. Recalls are numbered from 1, so their numbers do not have the lower of these bits.
inline constexpr std::uint64_t kReturnBits = kRecallBit | std::uint64_t{1} << 61;

// The mark of a reserved block, beside its owner.
inline constexpr std::uint32_t mark_of(std::uint64_t id) noexcept {
  constexpr std::uint32_t kFetchMark = 1U << 31;
  const auto low = static_cast<std::uint32_t>(id & (kFetchMark - 1));
  return (id & kFetchBit) != 0 ? low | kFetchMark : low;
}

}  // namespace kvpool
