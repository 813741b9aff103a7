// The seed of a tree's hashes when its owner gives none.
#pragma once

#include <cstdint>
#include <random>

namespace kvpool {

// Differs between processes, so outsiders cannot construct prompts that collide. May throw std::runtime_error if the
// machine has no source of randomness.
inline std::uint64_t random_hash_seed() {
  std::random_device device;
  const std::uint64_t high = device();
  return (high << 32U) ^ device();
}

}  // namespace kvpool
