#include "kvpool/blocks/block_space.h"

#include <algorithm>
#include <string>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/blocks/cache_blocks.h"

namespace kvpool {
namespace {

std::uint32_t checked_seats(std::uint32_t caches_max) {
  if (caches_max >= 1 && caches_max <= BlockSpace::kCachesMax) return caches_max;
  throw Error(
      ErrorCode::kArgument,
      "a space is for 1 to " + std::to_string(BlockSpace::kCachesMax) + " caches, not " + std::to_string(caches_max),
      {{"caches", caches_max}, {"maximum", BlockSpace::kCachesMax}});
}

}  // namespace

BlockSpace::BlockSpace(const MediumMap<std::uint32_t>& units, std::uint32_t caches_max)
    : units_(units), made_in_(fork_generation()), seats_(checked_seats(caches_max)) {
  for (const Medium medium : kMedia) {
    if (shared()) taken_[medium] = UnitMap(units[medium]);
  }
}

// --- who is here ---

std::uint32_t BlockSpace::take_seat() {
  const SpaceLock held = lock();
  for (std::uint32_t number = 0; number < seats_.size(); ++number) {
    if (seats_[number].taken) continue;
    seats_[number].taken = true;
    return number;
  }
  throw Error(ErrorCode::kState, "the space has " + std::to_string(seats_.size()) + " caches, its maximum",
              {{"maximum", static_cast<std::int64_t>(seats_.size())}});
}

void BlockSpace::leave_seat(std::uint32_t number) noexcept {
  if (made_in_ != fork_generation()) return;  // in a forked child somebody else may have had the lock
  const SpaceLock held = lock();
  // What a cache has left behind only a shared space tells from what is free.
  seats_[number].taken = seats_[number].used && !shared();
}

// The last generation of a range is given to nobody: it is what a retired block of the range has.
BlockSpace::Generations BlockSpace::generations_of(std::uint32_t number, Medium medium, std::uint32_t wish) const {
  Generations range{wish, kGenerationMax};
  if (shared()) {
    const std::uint32_t width = generations_each();
    range.first = number * width + 1 + (wish - 1) % (width / 2);
    range.last = (number + 1) * width - 2;
  }
  range.first = std::max(range.first, seats_[number].next_generation[medium]);
  if (range.first <= range.last) return range;
  throw Error(ErrorCode::kState, "earlier caches of the space have used up the generations of its blocks",
              {{"cache", number}});
}

void BlockSpace::enter(CacheBlocks& cache) noexcept {
  const SpaceLock held = lock();
  seats_[cache.number()].cache = &cache;
  seats_[cache.number()].used = true;
  if (!shared()) return;
  for (const Medium medium : kMedia) cache.overlap_taken(medium, taken_[medium]);
}

void BlockSpace::leave(CacheBlocks& cache) noexcept {
  if (made_in_ != fork_generation()) return;
  const SpaceLock held = lock();
  Seat& seat = seats_[cache.number()];
  seat.cache = nullptr;
  seat.rules = {};
  seat.held = false;
  seat.ended = false;
  for (const Medium medium : kMedia) {
    seat.next_generation[medium] = std::max(seat.next_generation[medium], cache.generation_after(medium));
    cache.for_each_owned(medium, [&](std::uint32_t block, bool reusable) {
      const std::uint32_t units = cache.block_units();
      if (!reusable) {
        left_behind_[medium] += units;
      } else if (shared()) {
        vacate(cache, medium, block * units, units);
      }
    });
  }
}

// --- units ---

void BlockSpace::occupy(const CacheBlocks& cache, Medium medium, std::uint32_t first_unit,
                        std::uint32_t units) noexcept {
  taken_[medium].take(first_unit, units);
  for (const Seat& seat : seats_) {
    if (seat.cache != nullptr && seat.cache != &cache) seat.cache->overlap(medium, first_unit, units);
  }
}

void BlockSpace::vacate(const CacheBlocks& cache, Medium medium, std::uint32_t first_unit,
                        std::uint32_t units) noexcept {
  taken_[medium].give_back(first_unit, units);
  for (const Seat& seat : seats_) {
    if (seat.cache != nullptr && seat.cache != &cache) {
      seat.cache->end_overlap(medium, first_unit, units, taken_[medium]);
    }
  }
}

UnitCounts BlockSpace::counts(Medium medium) const noexcept {
  UnitCounts counts;
  counts.capacity = units_[medium];
  std::uint32_t taken = left_behind_[medium];
  for (const Seat& seat : seats_) {
    if (seat.cache == nullptr) continue;
    for (int code = 0; code < kBlockStateCount; ++code) {
      const auto state = static_cast<BlockState>(code);
      if (state == BlockState::kFree || state == BlockState::kOverlapped) continue;
      const std::uint32_t units = seat.cache->store(medium).count(state) * seat.cache->block_units();
      counts.by_state[static_cast<std::size_t>(code)] += units;
      taken += units;
    }
  }
  counts.by_state[static_cast<std::size_t>(BlockState::kRetired)] += left_behind_[medium];
  counts.by_state[static_cast<std::size_t>(BlockState::kFree)] =
      units_[medium] - (shared() ? taken_[medium].taken() : taken);
  return counts;
}

void BlockSpace::audit() const {
  const auto fail = [](Medium medium, const std::string& what) {
    throw Error(ErrorCode::kAudit, std::string(medium_name(medium)) + " units: " + what);
  };
  for (const Medium medium : kMedia) {
    const UnitCounts units = counts(medium);
    std::uint64_t sum = 0;
    for (const std::uint32_t in_state : units.by_state) sum += in_state;
    if (sum != units.capacity) {
      fail(medium, std::to_string(units.capacity) + " there are, and " + std::to_string(sum) + " are counted (Z2)");
    }
    if (!shared()) continue;
    UnitMap owned(units_[medium]);
    for (const Seat& seat : seats_) {
      if (seat.cache == nullptr) continue;
      const std::uint32_t size = seat.cache->block_units();
      const BlockStore& blocks = seat.cache->store(medium);
      for (std::uint32_t block = 0; block < blocks.capacity(); ++block) {
        const BlockState state = blocks.state(block);
        const bool taken = taken_[medium].any(block * size, size);
        if (state == BlockState::kFree || state == BlockState::kOverlapped) {
          if (taken != (state == BlockState::kOverlapped)) fail(medium, "a block is free that is not, or is not (Z1)");
          continue;
        }
        if (owned.any(block * size, size)) fail(medium, "two blocks have one unit (Z1)");
        if (!taken_[medium].all(block * size, size)) fail(medium, "an owned block has a unit that is free (Z1)");
        owned.take(block * size, size);
      }
    }
    if (has_quotas_ && quota_tier(medium).committed() > units_[medium] - left_behind_[medium]) {
      fail(medium, std::to_string(quota_tier(medium).committed()) + " of " +
                       std::to_string(units_[medium] - left_behind_[medium]) + " are active or reserved (Z4)");
    }
    if (taken_[medium].count() != owned.taken() + left_behind_[medium]) {
      fail(medium, std::to_string(taken_[medium].count()) + " are taken, and the caches own " +
                       std::to_string(owned.taken()) + " (Z1)");
    }
  }
}

}  // namespace kvpool
