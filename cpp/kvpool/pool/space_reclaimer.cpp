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
  std::uint32_t first = 0;  // an extent begins there
  std::uint32_t end = 0;
  bool within_quotas = false;  // takes from a neighbour that is within its quota
  std::uint32_t units = 0;     // that are dropped
};

// A sequence of extents up to the one that came last, in which no model loses more than it can. With enough units for a
// block it is a place. Whether the rest of a prompt allows it, price() says.
class SpaceReclaimer::Window {
 public:
  Window(const SpaceReclaimer& reclaimer, const CacheBlocks& starved, Medium medium, const QuotaTier& tier)
      : reclaimer_(reclaimer), starved_(starved), medium_(medium), tier_(tier) {}

  // The next extent; it adjoins the one before. Returns whether the window is a place then.
  bool add(const UnitExtent& extent) {
    const Member* const owner = extent.free() ? nullptr : reclaimer_.owner_of(extent);
    if (!extent.free() && (owner == nullptr || !owner->cache->unused(medium_, extent.block))) {
      extents_.clear();
      begin_ = 0;
      units_ = 0;
      lost_ = {};
      return false;
    }
    extents_.push_back(extent);
    units_ += extent.length;
    if (counts(extent)) {
      ++lost_[extent.owner];
      const std::uint32_t can = can_lose(tier_.models[extent.owner], owner->blocks->block_units());
      while (lost_[extent.owner] > can) drop_first();
    }
    return is_place();
  }
  // Goes on behind the place: what is left of its last extent is free when the place is cleared. REQUIRES: it was none
  // before the last extent came, and is one now.
  void next() {
    const std::uint32_t left = units_ - starved_.run_units();
    const std::uint32_t end = extents_.back().end();
    extents_.clear();
    begin_ = 0;
    lost_ = {};
    units_ = left;
    if (left > 0) extents_.push_back({end - left, left, UnitExtent::kFree});
  }
  bool is_place() const noexcept { return units_ >= starved_.run_units(); }
  // The shortest place that ends here. REQUIRES: is_place().
  Place shortest() {
    while (units_ - extents_[begin_].length >= starved_.run_units()) drop_first();
    return {extents_[begin_].first, extents_.back().end()};
  }

 private:
  // Whether a neighbour loses the block.
  bool counts(const UnitExtent& extent) const noexcept { return !extent.free() && extent.owner != starved_.number(); }
  void drop_first() {
    const UnitExtent& first = extents_[begin_++];
    units_ -= first.length;
    if (counts(first)) --lost_[first.owner];
  }

  const SpaceReclaimer& reclaimer_;
  const CacheBlocks& starved_;
  const Medium medium_;
  const QuotaTier& tier_;
  std::vector<UnitExtent> extents_;
  std::size_t begin_ = 0;                                     // of the window in them
  std::uint32_t units_ = 0;                                   // of its extents
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost_{};  // blocks
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

const SpaceReclaimer::Member* SpaceReclaimer::owner_of(const UnitExtent& extent) const noexcept {
  if (extent.owner >= members_.size() || members_[extent.owner].blocks == nullptr) return nullptr;
  return &members_[extent.owner];
}

// Whether at least n places for a block are free, or have only blocks in them that could go.
bool SpaceReclaimer::enough_places(const CacheBlocks& starved, Medium medium, std::size_t n) const {
  const std::uint32_t size = starved.run_units();
  n *= starved.pieces_count();
  const bool always = std::ranges::all_of(members_, [&](const Member& member) {
    return member.blocks == nullptr || member.blocks->run_units() % size == 0;  // each block that goes is places
  });
  if (always) return true;
  const UnitSet& units = starved.space().unit_set(medium);
  std::size_t found = 0;
  for (std::uint32_t unit = 0; unit < units.size() && found < n;) {
    const SpaceLock lock = starved.lock();
    const QuotaTier tier = starved.space().quota_tier(medium);
    Window window(*this, starved, medium, tier);
    unit = units.head_from(unit);
    for (std::size_t visited = 0; unit < units.size() && found < n && visited < kVisitsMax; ++visited) {
      const UnitExtent extent = units.at(unit);
      unit = extent.end();
      for (bool is_place = window.add(extent); is_place; is_place = window.is_place()) {
        ++found;
        window.next();
      }
    }
  }
  return found >= n;
}

// Fills in what the place costs. False if it costs too much, or something there cannot be dropped any more.
bool SpaceReclaimer::price(const CacheBlocks& starved, Medium medium, const QuotaTier& tier, Place& place,
                           std::size_t& visited) const {
  const UnitSet& units = starved.space().unit_set(medium);
  if (!units.is_head(place.first)) return false;  // what lay before it is free now
  place.units = 0;
  place.within_quotas = false;
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost{};
  for (std::uint32_t unit = place.first; unit < place.end;) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    ++visited;
    if (extent.free()) continue;
    const Member* const member = owner_of(extent);
    if (member == nullptr) return false;
    const QuotaModel& model = tier.models[extent.owner];
    const std::optional<std::uint32_t> drops = member->cache->droppable(medium, extent.block, kDropMax);
    visited += drops.value_or(kDropMax);
    if (!drops) return false;
    const std::uint32_t size = member->blocks->block_units();
    lost[extent.owner] += *drops;
    place.units += *drops * size;
    if (member->blocks == &starved) continue;
    // Blocks of one prompt are counted for each of them that is dropped with it, though not more than there are.
    if (std::min(lost[extent.owner], model.historical / size) > can_lose(model, size)) return false;
    place.within_quotas =
        place.within_quotas || model.active + model.historical < model.rule.quota + lost[extent.owner] * size;
  }
  return true;
}

// The places from this unit on, as many as are compared under one hold of the lock. Returns where to go on.
// REQUIRES: the lock is held.
std::uint32_t SpaceReclaimer::find_places(const CacheBlocks& starved, Medium medium, std::uint32_t unit,
                                          std::vector<Place>& places) const {
  const UnitSet& units = starved.space().unit_set(medium);
  const QuotaTier tier = starved.space().quota_tier(medium);
  Window window(*this, starved, medium, tier);
  places.clear();
  std::size_t visited = 0;
  unit = units.head_from(unit);
  while (unit < units.size() && visited < kVisitsMax && places.size() < kPlacesMax) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    ++visited;
    if (!window.add(extent)) continue;
    Place place = window.shortest();
    if (price(starved, medium, tier, place, visited)) places.push_back(place);
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.within_quotas != b.within_quotas ? b.within_quotas : a.units < b.units;
  });
  return unit;
}

// Makes free runs for `starved` by dropping what lies where its blocks would. Returns how many blocks were dropped.
std::size_t SpaceReclaimer::make_places(const CacheBlocks& starved, Medium medium, std::size_t n) {
  std::array<std::unique_lock<std::mutex>, BlockSpace::kCachesMax> nothing_moves;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].moves != nullptr) nothing_moves[i] = members_[i].moves->reclaiming();
  }
  std::size_t dropped = 0;
  std::vector<Place> places;
  places.reserve(kPlacesMax);
  const std::uint32_t units = starved.space().capacity(medium);
  for (std::uint32_t next = 0; next < units;) {
    const SpaceLock lock = starved.lock();
    if (starved.takeable(n, medium) == n) break;
    next = find_places(starved, medium, next, places);
    for (Place& place : places) {
      if (starved.takeable(n, medium) == n) break;
      // What was dropped before may have changed what this one costs.
      std::size_t visited = 0;
      if (!price(starved, medium, starved.space().quota_tier(medium), place, visited)) continue;
      dropped += clear(starved, medium, place);
    }
  }
  return dropped;
}

// REQUIRES: price().
std::size_t SpaceReclaimer::clear(const CacheBlocks& starved, Medium medium, const Place& place) {
  const UnitSet& units = starved.space().unit_set(medium);
  std::vector<UnitExtent> victims;
  for (std::uint32_t unit = place.first; unit < place.end;) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    if (!extent.free()) victims.push_back(extent);
  }
  std::size_t dropped = 0;
  for (const UnitExtent& victim : victims) {
    const Member& member = members_[victim.owner];
    // It may have gone with the one before it.
    if (member.blocks->store(medium).state(victim.block) != BlockState::kHistorical) continue;
    member.cache->drop(medium, victim.block);
    ++dropped;
  }
  return dropped;
}

void SpaceReclaimer::throw_fragmented(const CacheBlocks& starved, Medium medium, std::size_t n) const {
  const SpaceLock lock = starved.lock();
  const BlockSpace& space = starved.space();
  const QuotaTier tier = space.quota_tier(medium);
  const QuotaModel& its = tier.models[starved.number()];
  const std::uint32_t largest = space.unit_set(medium).longest_free();
  const std::size_t usable = starved.takeable(n, medium);
  std::uint32_t evictable = 0;
  for (const QuotaModel& model : tier.models) evictable += model.historical;
  throw Error(ErrorCode::kOutOfBlocks,
              std::to_string(n) + " blocks of " + std::to_string(starved.block_units()) + " units of " +
                  medium_name(medium) + " asked for: " + std::to_string(tier.free()) + " units are free and " +
                  std::to_string(evictable) + " can be evicted, but a block lies in one run of units, and only " +
                  std::to_string(usable) + " find one; the largest free run is " + std::to_string(largest) + " units",
              {{"requested", static_cast<std::int64_t>(n)},
               {"free", static_cast<std::int64_t>(usable)},
               {"active", its.active / starved.block_units()},
               {"evictable", its.historical / starved.block_units()},
               {"capacity", starved.store(medium).capacity()},
               {"fragmented", 1},
               {"largest_run", largest}});
}

}  // namespace kvpool
