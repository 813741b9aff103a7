// Comparing and hashing runs of token ids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvpool {

using Token = std::int32_t;

// The length of the common prefix of two runs of n tokens.
inline std::size_t agreement(const Token* a, const Token* b, std::size_t n) noexcept {
  constexpr std::size_t kChunk = 256;  // 1 KiB: long enough for a vectorised memcmp, short enough to look at again
  std::size_t at = 0;
  while (at < n) {
    const std::size_t step = std::min(kChunk, n - at);
    if (std::memcmp(a + at, b + at, step * sizeof(Token)) != 0) {
      while (a[at] == b[at]) ++at;
      return at;
    }
    at += step;
  }
  return n;
}

// A keyed hash of n tokens. The seed is random per process, so outsiders cannot construct collisions; the value never
// leaves the process.
inline std::uint64_t hash_tokens(const Token* tokens, std::size_t n, std::uint64_t seed) noexcept {
  constexpr std::uint64_t kA = 0x9E3779B97F4A7C15ULL;
  constexpr std::uint64_t kB = 0xD6E8FEB86659FD93ULL;
  const auto fold = [](std::uint64_t x, std::uint64_t y) noexcept {
    const auto product = static_cast<unsigned __int128>(x) * y;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64U);
  };
  std::uint64_t h = seed ^ (n * kB);
  std::size_t at = 0;
  for (; at + 4 <= n; at += 4) {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    std::memcpy(&low, tokens + at, sizeof low);
    std::memcpy(&high, tokens + at + 2, sizeof high);
    h = fold(low ^ kA ^ h, high ^ kB ^ (h >> 32U) ^ seed);
  }
  for (; at < n; ++at) h = fold(h ^ kA, static_cast<std::uint32_t>(tokens[at]) ^ kB ^ seed);
  return fold(h ^ kA, seed | 1U);
}

}  // namespace kvpool
