// How long the keys are that engines name blocks by.
#pragma once

#include <cstddef>

namespace kvpool {

inline constexpr std::size_t kKeyBytesMin = 8;
inline constexpr std::size_t kKeyBytesMax = 64;

}  // namespace kvpool
