// Which work goes first when several pieces wait for a thread or for a link.
#pragma once

#include <cstdint>

namespace kvpool {

// Smaller is more urgent: decoding goes first, prefill waits for decoding, background work waits for both.
enum class Priority : std::uint8_t { kDecode = 0, kPrefill = 1, kBackground = 2 };

}  // namespace kvpool
