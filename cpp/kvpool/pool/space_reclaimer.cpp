#include "kvpool/pool/space_reclaimer.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// How many of its blocks a model may lose to others. Its reserve is whole blocks.
std::uint32_t can_lose(const QuotaModel& model, std::uint32_t block_units) noexcept {
  const std::uint32_t keeps = model.rule.reserve > model.active ? model.rule.reserve - model.active : 0;
  return model.historical > keeps ? (model.historical - keeps) / block_units : 0;
}

}  // namespace

// Where a block of the growing model would lie, and what it costs the others.
struct SpaceReclaimer::Place {
  std::uint32_t block = 0;
  bool within_quotas = false;  // takes from a neighbour that is within its quota
  std::uint32_t units = 0;     // that are dropped
};

void SpaceReclaimer::enter(CacheBlocks& blocks, PromptCache& cache, TierMoves& moves) {
  const std::lock_guard lock(mutex_);
  members_[blocks.number()] = {&blocks, &cache, &moves};
}

void SpaceReclaimer::leave(std::uint32_t number) noexcept {
  const std::lock_guard lock(mutex_);
  members_[number] = {};
}

void SpaceReclaimer::relieve(const CacheBlocks& starved, MediumChoice choice, std::size_t n) {
  const auto medium = static_cast<Medium>(choice.code());
  const std::lock_guard one_at_a_time(mutex_);
  bool waited = false;
  bool places_counted = false;
  for (int in_vain = 0; in_vain < 2;) {
    bool done = false;
    const std::optional<QuotaRoom> room = plan(starved, medium, n, done);
    if (done) return;
    if (!room) {
      if (waited) {
        const SpaceLock lock = starved.lock();
        starved.space().check_growth(starved, medium, n);
        continue;  // it is admitted by now
      }
      wait_for_moves();
      waited = true;
      continue;
    }
    if (!places_counted) {
      places_counted = true;
      if (!enough_places(starved, medium, n)) {
        wait_for_moves();
        if (!enough_places(starved, medium, n)) throw_fragmented(starved, medium, n);
        continue;  // with a new plan
      }
    }
    std::size_t gone = evict(*room, medium);
    if (gone == 0) gone = make_places(starved, medium, n);
    in_vain = gone > 0 ? 0 : in_vain + 1;
  }
  throw_fragmented(starved, medium, n);
}

// Null when the quotas do not admit the growth. `done`: it needs no room.
std::optional<QuotaRoom> SpaceReclaimer::plan(const CacheBlocks& starved, Medium medium, std::size_t n,
                                              bool& done) const {
  const SpaceLock lock = starved.lock();
  const BlockSpace& space = starved.space();
  done = starved.takeable(n, medium) == n;
  if (done) return std::nullopt;
  const QuotaTier tier = space.quota_tier(medium);
  const std::uint32_t number = starved.number();
  const std::uint64_t units = std::min<std::uint64_t>(n, UINT32_MAX) * starved.block_units();
  if (space.holds_growth(number) || units > tier.growth(number)) return std::nullopt;
  const QuotaTier below = space.quota_tier(Medium::kDram);
  return reclaim(tier, number, static_cast<std::uint32_t>(units), medium == Medium::kHbm ? &below : nullptr);
}

// What was being moved when the plan was made has arrived, or stays.
void SpaceReclaimer::wait_for_moves() {
  for (const Member& member : members_) {
    if (member.moves != nullptr) static_cast<void>(member.moves->reclaiming());
  }
}

std::size_t SpaceReclaimer::evict(const QuotaRoom& room, Medium medium) {
  std::size_t gone = 0;
  for (const QuotaEviction& eviction : room) {
    const Member& member = members_[eviction.model];
    if (member.blocks == nullptr) continue;
    const std::uint32_t size = member.blocks->block_units();
    gone += evict_from(member, medium, (eviction.units + size - 1) / size, eviction.swapped / size);
  }
  return gone;
}

// The coldest are dropped, the next go to DRAM, and what finds no place there is dropped after all.
std::size_t SpaceReclaimer::evict_from(const Member& member, Medium medium, std::size_t blocks, std::size_t swapped) {
  try {
    swapped = std::min(swapped, blocks);
    std::size_t gone = blocks > swapped ? member.moves->evict(blocks - swapped, medium) : 0;
    if (swapped > 0) {
      const std::size_t moved = member.moves->spill(swapped);
      gone += moved;
      if (moved < swapped) gone += member.moves->evict(swapped - moved, medium);
    }
    return gone;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kClosed) throw;
    return 0;  // its units come back when it leaves
  }
}

// visit(member, block) for each cached block of others in the units of this block, or for the block itself if it is
// cached. False, at once, if anything there cannot be dropped, or visit says so.
template <class Visit>
bool SpaceReclaimer::for_each_victim(const CacheBlocks& starved, Medium medium, std::uint32_t block,
                                     Visit&& visit) const {
  const std::uint32_t size = starved.block_units();
  const BlockState own = starved.store(medium).state(block);
  if (own == BlockState::kHistorical) return visit(members_[starved.number()], block);
  if (own != BlockState::kOverlapped) return false;
  const std::uint32_t first = block * size;
  std::uint32_t covered = 0;
  for (const Member& member : members_) {
    if (member.blocks == nullptr || member.blocks == &starved) continue;
    const BlockStore& blocks = member.blocks->store(medium);
    const std::uint32_t its = member.blocks->block_units();
    for (std::uint32_t other = first / its; other * its < first + size && other < blocks.capacity(); ++other) {
      const BlockState state = blocks.state(other);
      if (state == BlockState::kFree || state == BlockState::kOverlapped) continue;
      if (!visit(member, other)) return false;
      covered += std::min(first + size, (other + 1) * its) - std::max(first, other * its);
    }
  }
  // Units that a closed cache has left belong to nobody here.
  return covered == starved.space().taken_in(medium, first, size);
}

// Whether at least n places for a block are free, or have only blocks in them that could go.
bool SpaceReclaimer::enough_places(const CacheBlocks& starved, Medium medium, std::size_t n) const {
  const std::uint32_t size = starved.block_units();
  const bool always = std::ranges::all_of(members_, [&](const Member& member) {
    return member.blocks == nullptr || member.blocks->block_units() % size == 0;  // each block that goes is places
  });
  if (always) return true;
  std::size_t found = 0;
  const std::uint32_t blocks = starved.store(medium).capacity();
  for (std::uint32_t block = 0; block < blocks && found < n;) {
    const SpaceLock lock = starved.lock();
    const QuotaTier tier = starved.space().quota_tier(medium);
    for (std::size_t visited = 0; block < blocks && found < n && visited < kVisitsMax; ++block) {
      const bool free = starved.store(medium).state(block) == BlockState::kFree;
      if (free || clearable(starved, medium, block, tier, visited)) ++found;
      ++visited;
    }
  }
  return found >= n;
}

// Whether nothing there is in use, and no model would fall below its reserve: cheap, and no promise of place_at().
bool SpaceReclaimer::clearable(const CacheBlocks& starved, Medium medium, std::uint32_t block, const QuotaTier& tier,
                               std::size_t& visited) const {
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost{};
  return for_each_victim(starved, medium, block, [&](const Member& member, std::uint32_t other) {
    ++visited;
    if (member.cache == nullptr || !member.cache->unused(medium, other)) return false;
    if (member.blocks == &starved) return true;
    const std::uint32_t number = member.blocks->number();
    return ++lost[number] <= can_lose(tier.models[number], member.blocks->block_units());
  });
}

std::optional<SpaceReclaimer::Place> SpaceReclaimer::place_at(const CacheBlocks& starved, Medium medium,
                                                              std::uint32_t block, const QuotaTier& tier,
                                                              std::size_t& visited) const {
  if (!clearable(starved, medium, block, tier, visited)) return std::nullopt;
  Place place{block};
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost{};
  const bool possible = for_each_victim(starved, medium, block, [&](const Member& member, std::uint32_t other) {
    const std::uint32_t number = member.blocks->number();
    const QuotaModel& model = tier.models[number];
    const std::optional<std::uint32_t> drops = member.cache->droppable(medium, other, kDropMax);
    visited += drops.value_or(kDropMax);
    if (!drops) return false;
    const std::uint32_t size = member.blocks->block_units();
    lost[number] += *drops;
    place.units += *drops * size;
    if (member.blocks == &starved) return true;
    // Blocks of one prompt are counted for each of them that is dropped with it, though not more than there are.
    if (std::min(lost[number], model.historical / size) > can_lose(model, size)) return false;
    place.within_quotas =
        place.within_quotas || model.active + model.historical < model.rule.quota + lost[number] * size;
    return true;
  });
  return possible ? std::optional(place) : std::nullopt;
}

// Makes free blocks for `starved` by dropping what lies where they would. Returns how many blocks were dropped.
std::size_t SpaceReclaimer::make_places(const CacheBlocks& starved, Medium medium, std::size_t n) {
  std::array<std::unique_lock<std::mutex>, BlockSpace::kCachesMax> nothing_moves;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].moves != nullptr) nothing_moves[i] = members_[i].moves->reclaiming();
  }
  std::size_t dropped = 0;
  std::vector<Place> places;
  places.reserve(kPlacesMax);
  const std::uint32_t blocks = starved.store(medium).capacity();
  for (std::uint32_t next = 0; next < blocks;) {
    const SpaceLock lock = starved.lock();
    if (starved.takeable(n, medium) == n) break;
    const QuotaTier tier = starved.space().quota_tier(medium);
    places.clear();
    std::size_t visited = 0;
    for (; next < blocks && visited < kVisitsMax && places.size() < kPlacesMax; ++next) {
      ++visited;
      if (const std::optional<Place> place = place_at(starved, medium, next, tier, visited)) places.push_back(*place);
    }
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
      return a.within_quotas != b.within_quotas ? b.within_quotas : a.units < b.units;
    });
    for (const Place& place : places) {
      if (starved.takeable(n, medium) == n) break;
      // What was dropped before may have changed what this one costs.
      if (!place_at(starved, medium, place.block, starved.space().quota_tier(medium), visited)) continue;
      dropped += clear(starved, medium, place.block);
    }
  }
  return dropped;
}

// REQUIRES: place_at().
std::size_t SpaceReclaimer::clear(const CacheBlocks& starved, Medium medium, std::uint32_t block) {
  std::vector<Victim> victims;
  for_each_victim(starved, medium, block, [&](const Member& member, std::uint32_t other) {
    victims.push_back({&member, other});
    return true;
  });
  std::size_t dropped = 0;
  for (const Victim& victim : victims) {
    // It may have gone with the one before it.
    if (victim.member->blocks->store(medium).state(victim.block) != BlockState::kHistorical) continue;
    victim.member->cache->drop(medium, victim.block);
    ++dropped;
  }
  return dropped;
}

void SpaceReclaimer::throw_fragmented(const CacheBlocks& starved, Medium medium, std::size_t n) const {
  const SpaceLock lock = starved.lock();
  const BlockSpace& space = starved.space();
  const QuotaTier tier = space.quota_tier(medium);
  const QuotaModel& its = tier.models[starved.number()];
  const std::uint32_t largest = space.longest_free(medium);
  const std::size_t usable = starved.takeable(n, medium);
  std::uint32_t evictable = 0;
  for (const QuotaModel& model : tier.models) evictable += model.historical;
  throw Error(ErrorCode::kOutOfBlocks,
              std::to_string(n) + " blocks of " + std::to_string(starved.block_units()) + " units of " +
                  medium_name(medium) + " asked for: " + std::to_string(tier.free()) + " units are free and " +
                  std::to_string(evictable) + " can be evicted, but blocks lie at multiples of their size, and only " +
                  std::to_string(usable) + " find a place; the largest free run is " + std::to_string(largest) +
                  " units",
              {{"requested", static_cast<std::int64_t>(n)},
               {"free", static_cast<std::int64_t>(usable)},
               {"active", its.active / starved.block_units()},
               {"evictable", its.historical / starved.block_units()},
               {"capacity", starved.store(medium).capacity()},
               {"fragmented", 1},
               {"largest_run", largest}});
}

}  // namespace kvpool
