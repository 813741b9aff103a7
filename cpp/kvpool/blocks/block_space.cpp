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
  if (!shared()) return;
  for (const Medium medium : kMedia) {
    if (units[medium] > kBlocksMax) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(units[medium]) + " units of " + medium_name(medium) +
                      " are more than several caches can share (" + std::to_string(kBlocksMax) +
                      "): make the units larger",
                  {{"units", units[medium]}, {"maximum", kBlocksMax}});
    }
    shared_units_[medium] = std::make_unique<UnitSet>(units[medium]);
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
    if (shared()) {
      seat.next_generation[medium] = std::max(seat.next_generation[medium], cache.store(medium).generation_after());
      leave_units(cache, medium);
    } else {
      const BlockStore& blocks = cache.store(medium);
      for (std::uint32_t block = 0; block < blocks.numbers(); ++block) {
        const BlockState state = blocks.state(block);
        if (state == BlockState::kFree || state == BlockState::kSuspended) continue;
        if (!cache.is_reusable(medium, block)) left_behind_[medium] += cache.block_units();
      }
    }
  }
}

// Walks the extents, which are as many as all caches have blocks or pieces, and not the numbers of blocks, which are as
// many as there are units.
void BlockSpace::leave_units(const CacheBlocks& cache, Medium medium) noexcept {
  UnitSet& units = mutable_units(medium);
  for (std::uint32_t unit = 0; unit < units.size();) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    if (extent.owner != cache.number()) continue;
    if (cache.is_reusable(medium, extent.block)) {
      // The run behind it is no extent any more when the two are one.
      if (unit < units.size() && units.at(unit).free()) unit = units.at(unit).end();
      units.give_back(extent.first, extent.length, 1);
    } else {
      units.abandon(extent.first);
      left_behind_[medium] += extent.length;
    }
  }
}

// --- units ---

UnitCounts BlockSpace::counts(Medium medium) const noexcept {
  UnitCounts counts;
  counts.capacity = units_[medium];
  std::uint32_t taken = left_behind_[medium];
  for (const Seat& seat : seats_) {
    if (seat.cache == nullptr) continue;
    for (int code = 0; code < kBlockStateCount; ++code) {
      const auto state = static_cast<BlockState>(code);
      if (state == BlockState::kFree) continue;
      const std::uint32_t units = seat.cache->store(medium).count(state) * seat.cache->block_units();
      counts.by_state[static_cast<std::size_t>(code)] += units;
      taken += units;
    }
  }
  counts.by_state[static_cast<std::size_t>(BlockState::kRetired)] += left_behind_[medium];
  counts.by_state[static_cast<std::size_t>(BlockState::kFree)] =
      shared() ? unit_set(medium).free() : units_[medium] - taken;
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
    if (shared()) audit_extents(medium);
    if (has_quotas_ && quota_tier(medium).committed() > units_[medium] - left_behind_[medium]) {
      fail(medium, std::to_string(quota_tier(medium).committed()) + " of " +
                       std::to_string(units_[medium] - left_behind_[medium]) + " are active or reserved (Z4)");
    }
  }
}

// Z1: each taken extent is an owned or retired block of its cache, or a piece of one, these have as many units as such
// blocks, and the extents cover every unit once (Z5).
void BlockSpace::audit_extents(Medium medium) const {
  const auto fail = [&](const std::string& what, std::uint32_t unit) {
    throw Error(ErrorCode::kAudit,
                std::string(medium_name(medium)) + " units: " + what + " (Z1, unit " + std::to_string(unit) + ")",
                {{"unit", unit}});
  };
  const UnitSet& units = unit_set(medium);
  units.audit(medium_name(medium));
  std::array<std::uint64_t, kCachesMax> owned{};  // units
  std::uint32_t behind = 0;
  for (std::uint32_t unit = 0; unit < units.size();) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    if (extent.free()) continue;
    if (extent.owner == UnitExtent::kNobody) {
      behind += extent.length;
      continue;
    }
    const CacheBlocks* const cache = extent.owner < seats_.size() ? seats_[extent.owner].cache : nullptr;
    if (cache == nullptr) fail("a block belongs to no cache", extent.first);
    if (extent.block >= cache->store(medium).numbers()) fail("a block has no number of its cache", extent.first);
    const BlockStore& blocks = cache->store(medium);
    if (!blocks.is_taken(extent.block)) fail("a free block has units", extent.first);
    bool its_own = false;
    cache->for_each_extent(medium, extent.block, [&](std::uint32_t first, std::uint32_t length) {
      its_own = its_own || (first == extent.first && length == extent.length);
    });
    if (!its_own) fail("a block has units that are not where it lies", extent.first);
    owned[extent.owner] += extent.length;
  }
  for (std::uint32_t number = 0; number < seats_.size(); ++number) {
    const CacheBlocks* const cache = seats_[number].cache;
    if (cache == nullptr) continue;
    const BlockStore& store = cache->store(medium);
    cache->pieces(medium).audit(medium_name(medium), [&](std::uint32_t block) { return store.is_taken(block); });
    const std::uint32_t blocks = store.capacity() - store.free_count();
    if (owned[number] == std::uint64_t{blocks} * cache->block_units()) continue;
    fail("cache " + std::to_string(number) + " has " + std::to_string(blocks) + " blocks in " +
             std::to_string(owned[number]) + " units",
         units.size());
  }
  if (behind != left_behind_[medium]) fail("a wrong count of units that closed caches left behind", behind);
}

}  // namespace kvpool
