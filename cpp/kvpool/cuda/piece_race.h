// Measures, by a race, up to which piece length a kernel copies faster than the copy engines.
//
// A kernel has no cost for each piece, but takes a part of the GPU from the model. The copy engines have a cost for
// each piece, but take nothing from the model. So the kernel should copy up to a length that depends on the GPU, its
// bus and its driver.
//
// Thread-safety: a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

namespace kvpool {

enum class Racer : std::uint8_t { kKernel, kEngines };

struct RaceRules {
  std::span<const std::size_t> lengths;  // of pieces: ascending, at least one
  int tries;                             // of each racer at each length, in turns; the best one counts
  int clear_percent;                     // by which the kernel must be faster to win: the engines win a tie, because
                                         // they leave the whole GPU to the model
  std::int64_t limit_ns;                 // for the whole race
};

// Nanoseconds since any starting point.
using RaceClock = std::function<std::int64_t()>;
// Copies the same bytes in pieces of this length, and returns when they have arrived. False: it cannot.
using RaceCopy = std::function<bool(Racer racer, std::size_t piece_bytes)>;

// The mean piece length up to which the kernel should copy: the length before the first at which the engines win; half
// of the first length if they win there; the last length if they never win. Nullopt when a copy cannot be done, or when
// the limit has passed; no copy begins after the limit. Throws what the functions throw.
std::optional<std::size_t> race_pieces(const RaceRules& rules, const RaceClock& clock, const RaceCopy& copy);

}  // namespace kvpool
