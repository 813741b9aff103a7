// Numbers that nothing else in the world has: epochs, and the like.
#pragma once

#include <cstdint>
#include <random>

namespace kvpool {

// Never 0.
inline std::uint64_t random_epoch() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
}

}  // namespace kvpool
