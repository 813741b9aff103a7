#include "kvpool/cuda/piece_race.h"

#include <algorithm>
#include <array>
#include <limits>

namespace kvpool {

std::optional<std::size_t> race_pieces(const RaceRules& rules, const RaceClock& clock, const RaceCopy& copy) {
  const std::int64_t began = clock();
  std::size_t bound = rules.lengths.front() / 2;
  for (const std::size_t length : rules.lengths) {
    std::array<std::int64_t, 2> best;  // by Racer
    best.fill(std::numeric_limits<std::int64_t>::max());
    for (int i = 0; i < rules.tries; ++i) {
      for (const Racer racer : {Racer::kKernel, Racer::kEngines}) {
        const std::int64_t started = clock();
        if (!copy(racer, length)) return std::nullopt;
        const std::int64_t ended = clock();
        if (ended - began > rules.limit_ns) return std::nullopt;
        std::int64_t& own = best[static_cast<std::size_t>(racer)];
        own = std::min(own, ended - started);
      }
    }
    // Nanoseconds below the limit: a product with a hundred does not overflow.
    if (best[0] * (100 + rules.clear_percent) >= best[1] * 100) return bound;
    bound = length;
  }
  return bound;
}

}  // namespace kvpool
