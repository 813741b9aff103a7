// Ids of transfers: numbers of one direction of one link. The one who asks for a fetch and the one who begins a
// transfer both number by themselves, so fetches have a bit of their own.
#pragma once

#include <cstdint>

namespace kvpool {

inline constexpr std::uint64_t kFetchBit = std::uint64_t{1} << 63;
// Of a recall of lent blocks, among what is in quarantine. Never on the wire.
inline constexpr std::uint64_t kRecallBit = std::uint64_t{1} << 62;

// What is noted beside the owner of a reserved block.
inline constexpr std::uint32_t mark_of(std::uint64_t id) noexcept {
  constexpr std::uint32_t kFetchMark = 1U << 31;
  const auto low = static_cast<std::uint32_t>(id & (kFetchMark - 1));
  return (id & kFetchBit) != 0 ? low | kFetchMark : low;
}

}  // namespace kvpool
