// Seeds for tests that make up their own input: a few fixed ones and a fresh one. A failing test prints its seed;
// KVPOOL_SEED=<seed> replays that one alone. KVPOOL_LONG=1 makes such tests twenty times longer.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace kvpool::testing {

inline std::vector<std::uint64_t> fuzz_seeds() {
  if (const char* given = std::getenv("KVPOOL_SEED")) return {std::strtoull(given, nullptr, 0)};
  return {1, 2, std::random_device{}()};
}

inline int fuzz_length(int steps) { return std::getenv("KVPOOL_LONG") != nullptr ? 20 * steps : steps; }

inline void announce_fuzz(const char* what, std::uint64_t seed) {
  std::fprintf(stderr, "%s fuzz: KVPOOL_SEED=%llu\n", what, static_cast<unsigned long long>(seed));
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  std::uint32_t below(std::uint64_t n) { return static_cast<std::uint32_t>(random_() % n); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }
  std::uint64_t any() { return random_(); }
  template <class Container>
  auto& pick(Container& container) {
    auto at = container.begin();
    std::advance(at, below(container.size()));
    return *at;
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace kvpool::testing
