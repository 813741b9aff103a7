// SipHash-1-3 of keys that others choose. The seed is random and never leaves the process, so outsiders cannot
// construct keys that collide in a table.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvpool/index/hash_seed.h"

namespace kvpool {

struct KeySeed {
  std::uint64_t low;
  std::uint64_t high;
};

// May throw as random_hash_seed() does.
inline KeySeed random_key_seed() { return {random_hash_seed(), random_hash_seed()}; }

inline std::uint64_t hash_key(const std::byte* key, std::size_t bytes, const KeySeed& seed) noexcept {
  std::uint64_t a = seed.low ^ 0x736F6D6570736575ULL;
  std::uint64_t b = seed.high ^ 0x646F72616E646F6DULL;
  std::uint64_t c = seed.low ^ 0x6C7967656E657261ULL;
  std::uint64_t d = seed.high ^ 0x7465646279746573ULL;
  const auto round = [&]() noexcept {
    a += b;
    b = std::rotl(b, 13) ^ a;
    a = std::rotl(a, 32);
    c += d;
    d = std::rotl(d, 16) ^ c;
    a += d;
    d = std::rotl(d, 21) ^ a;
    c += b;
    b = std::rotl(b, 17) ^ c;
    c = std::rotl(c, 32);
  };
  const auto absorb = [&](std::uint64_t word) noexcept {
    d ^= word;
    round();
    a ^= word;
  };
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, key + at, sizeof word);
    absorb(word);
  }
  std::uint64_t last = static_cast<std::uint64_t>(bytes) << 56U;
  for (std::size_t i = 0; at + i < bytes; ++i) last |= std::to_integer<std::uint64_t>(key[at + i]) << (8 * i);
  absorb(last);
  c ^= 0xFF;
  round();
  round();
  round();
  return a ^ b ^ c ^ d;
}

}  // namespace kvpool
