// Random numbers that are unique in the world, such as incarnations.
#pragma once

#include <cstdint>
#include <random>

namespace kvpool {

// Never 0.
inline std::uint64_t random_incarnation() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
}

}  // namespace kvpool
