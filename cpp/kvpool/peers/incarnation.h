// Numbers of incarnations, and others that are drawn once in the world.
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
