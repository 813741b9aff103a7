// Where the seed of a tree's hashes comes from when its owner does not give one.
#pragma once

#include <cstdint>
#include <random>

namespace kvpool {

// Differs from process to process, so that nobody outside can construct prompts that collide. May throw
// std::runtime_error where the machine has no source of randomness.
inline std::uint64_t random_hash_seed() {
  std::random_device device;
  const std::uint64_t high = device();
  return (high << 32U) ^ device();
}

}  // namespace kvpool
