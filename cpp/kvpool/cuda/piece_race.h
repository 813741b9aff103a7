// Up to which length of pieces one way of copying is as fast as another: found by a race, not by a guess.
//
// A kernel pays nothing for a piece and keeps a part of the GPU from the model; the copy engines pay for each piece and
// are free. So there is a length up to which the kernel copies, and it depends on the GPU, its bus and its driver.
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
  std::span<const std::size_t> lengths;  // of pieces: rising, at least one
  int tries;                             // of each racer at each length, in turns; the best one counts
  int clear_percent;                     // by which the kernel has to be faster to win: a tie is the engines', which
                                         // leave the whole GPU to the model
  std::int64_t limit_ns;                 // for all of it
};

// Nanoseconds, from any beginning.
using RaceClock = std::function<std::int64_t()>;
// Copies the same bytes in pieces so long, and returns when they have arrived. False: it cannot.
using RaceCopy = std::function<bool(Racer racer, std::size_t piece_bytes)>;

// The mean length of pieces up to which the kernel is to copy: the last one before that at which the engines win for
// the first time, half of the first one when they win there, the last one when they never do. Nullopt when a copy
// cannot be done, or when the limit has passed; the copy in which it passes is the last one. Throws what they throw.
std::optional<std::size_t> race_pieces(const RaceRules& rules, const RaceClock& clock, const RaceCopy& copy);

}  // namespace kvpool
