// Plans which rank sends what to which rank when two logical instances divide blocks differently among their ranks.
//
// A plan speaks of one block, in offsets within the ranks' contents of it, so it serves any number of blocks and is
// made once for a pair of instances. Memory order (aggregated, discrete) does not matter here: strips are cut at the
// ends of segments where addresses become memory.
//
// Invariants of a plan; S1 and S2 are checked when it is made in debug builds
//   S1  Every byte of every receiving rank's block content is the target of exactly one strip.
//   S2  A strip lies within the contents of both of its ranks, has at least one byte, and cuts no row: a token of a
//       head.
//   S3  If several sending ranks hold the same content, each sends at most its share plus 1/32 of it plus one row.
//   S4  Strips of a pair ascend in `from` and `to`, and no two can be joined. So a pair has one strip if both ranks
//       hold the same heads, otherwise one for each layer's K and V (of each token, if tokens come before heads), and
//       at most one more for each cut between senders that hold the same content.
//
// Pure: no I/O, no clock. Cost grows with the strips of the plan. Thread-safety: plans are const after they are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/blocks/parallel.h"

namespace kvpool {

// What one sending rank writes into one receiving rank.
struct ReshardPair {
  std::uint32_t from_rank = 0;
  std::uint32_t to_rank = 0;
  std::uint64_t bytes = 0;  // of one block
  std::vector<BlockStrip> strips;
};

struct ReshardPlan {
  Sharding from;
  Sharding to;
  std::vector<ReshardPair> pairs;  // by (from_rank, to_rank); without empty ones

  // The pairs of one sender. Valid as long as the plan.
  std::span<const ReshardPair> of_sender(std::uint32_t from_rank) const noexcept;
  std::size_t strips() const noexcept;
};

inline constexpr std::size_t kPlanStripsMax = std::size_t{1} << 22;

// Throws kLayoutMismatch when the two hold different logical blocks (fields sender, receiver: the numbers that differ),
// kArgument when the plan would have more than kPlanStripsMax strips.
ReshardPlan plan_reshard(const Sharding& from, const Sharding& to);

// The parts of `strips` whose source lies in [begin, end) of the source block's content: they can be sent when that
// part, a layer say, has been computed. REQUIRES: strips ascend in `from`.
std::vector<BlockStrip> clip_strips(std::span<const BlockStrip> strips, std::uint64_t begin, std::uint64_t end);

}  // namespace kvpool
