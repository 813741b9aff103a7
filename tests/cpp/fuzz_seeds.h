// Seeds for tests that make up their own input: a few fixed ones and a fresh one. A failing test prints its seed.
//
//   KVPOOL_CI=1                 the fixed ones alone: the same commit gives the same answer
//   KVPOOL_SEED=<seed>          that one alone
//   KVPOOL_SEED=<from>..<to>    those from `from` up to but not `to`: a part of a long run
//   KVPOOL_LONG=1               such tests are twenty times longer, and targets of fuzz_for() go on for an hour each
//   KVPOOL_FUZZ_SECONDS=<n>     or for so long
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <vector>

namespace kvpool::testing {

// The value of KVPOOL_SEED.
inline std::optional<std::vector<std::uint64_t>> given_seeds() {
  const char* given = std::getenv("KVPOOL_SEED");
  if (given == nullptr) return std::nullopt;
  char* end = nullptr;
  const std::uint64_t from = std::strtoull(given, &end, 0);
  if (end[0] != '.' || end[1] != '.') return std::vector{from};
  const std::uint64_t to = std::strtoull(end + 2, nullptr, 0);
  std::vector<std::uint64_t> seeds;
  for (std::uint64_t seed = from; seed < to; ++seed) seeds.push_back(seed);
  return seeds;
}

inline std::vector<std::uint64_t> fuzz_seeds() {
  if (std::optional given = given_seeds()) return *std::move(given);
  if (std::getenv("KVPOOL_CI") != nullptr) return {1, 2, 3};
  return {1, 2, std::random_device{}()};
}

// The seeds of a fuzz target: fuzz_seeds(), and in a long run fresh ones until its time is over.
class FuzzTime {
 public:
  struct End {};
  class Iterator {
   public:
    explicit Iterator(FuzzTime& time) : time_(time) {}
    std::uint64_t operator*() const { return time_.seeds_[time_.next_]; }
    Iterator& operator++() {
      ++time_.next_;
      return *this;
    }
    bool operator!=(End /*end*/) const { return time_.go_on(); }

   private:
    FuzzTime& time_;
  };

  FuzzTime() {
    if (given_seeds()) return;
    const char* seconds = std::getenv("KVPOOL_FUZZ_SECONDS");
    if (seconds != nullptr) seconds_ = std::chrono::seconds(std::strtoll(seconds, nullptr, 10));
    if (seconds == nullptr && std::getenv("KVPOOL_LONG") != nullptr) seconds_ = std::chrono::hours(1);
  }
  Iterator begin() { return Iterator(*this); }
  static End end() { return {}; }

 private:
  bool go_on() {
    if (next_ < seeds_.size()) return true;
    if (std::chrono::steady_clock::now() - started_ >= seconds_) return false;
    seeds_.push_back(std::random_device{}());
    return true;
  }

  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::seconds seconds_{0};
  std::vector<std::uint64_t> seeds_ = fuzz_seeds();
  std::size_t next_ = 0;
};

inline int fuzz_length(int steps) { return std::getenv("KVPOOL_LONG") != nullptr ? 20 * steps : steps; }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// For comparisons with a model: a sanitizer finds what it can find in a quarter of the steps. `make cpp-plain` runs
// the files that call this without one, and takes all of them.
inline int model_length(int steps) { return fuzz_length(kSanitized ? steps / 4 : steps); }

// ThreadSanitizer looks at threads only, and AddressSanitizer's run takes all of the steps.
#if defined(__SANITIZE_THREAD__)
inline constexpr int thread_length(int steps) { return steps / 4; }
#else
inline constexpr int thread_length(int steps) { return steps; }
#endif

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
