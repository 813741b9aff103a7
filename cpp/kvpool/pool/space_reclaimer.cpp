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

// Whether a piece of a scattered block lies in the units [first, end).
bool has_piece(const CacheBlocks& blocks, Medium medium, std::uint32_t block, std::uint32_t first, std::uint32_t end) {
  const BlockPieces& pieces = blocks.pieces(medium);
  return !pieces.whole(block) &&
         std::ranges::any_of(pieces.units_of(block), [&](std::uint32_t unit) { return unit >= first && unit < end; });
}

// What an extent adds to the units that more blocks can be made from. Blocks find a place already in a free run that is
// long enough, so only what they leave of it counts.
std::uint32_t adds(const UnitExtent& extent, std::uint32_t size) noexcept {
  return extent.free() ? extent.length % size : extent.length;
}

}  // namespace

// Where one more block of the growing model would lie, and what it costs the others.
struct SpaceReclaimer::Place {
  std::uint32_t first = 0;  // an extent begins there
  std::uint32_t end = 0;
  bool within_quotas = false;  // takes from a neighbour that is within its quota
  std::uint32_t units = 0;     // that are dropped
  std::uint32_t blocks = 0;    // that find a place then and find none before, or pieces
};

// A sequence of extents up to the one that came last, in which no model loses more blocks than it can. If it adds
// enough units for a block, it is a place. Whether the rest of a prompt allows it, price() says. Good under one hold of
// the lock.
class SpaceReclaimer::Window {
 public:
  // REQUIRES: the first extent that is added has this unit.
  Window(const SpaceReclaimer& reclaimer, const CacheBlocks& starved, Medium medium, const QuotaTier& tier,
         std::uint32_t from)
      : reclaimer_(reclaimer), starved_(starved), medium_(medium), tier_(tier), end_(from) {}

  // The next extent; it adjoins the one before. Returns whether the window is a place then.
  bool add(const UnitExtent& extent) {
    const Member* const owner = extent.free() ? nullptr : reclaimer_.owner_of(extent);
    if (!extent.free() && (owner == nullptr || !owner->cache->unused(medium_, extent.block))) {
      begin_again(extent.end());
      return false;
    }
    if (counts(extent) && !has_piece(*owner->blocks, medium_, extent.block, first(), extent.first)) {
      ++lost_[extent.owner];
    }
    extents_.push_back(extent);
    end_ = extent.end();
    units_ += adds(extent, starved_.run_units());
    if (counts(extent)) {
      const std::uint32_t can = can_lose(tier_.models[extent.owner], owner->blocks->block_units());
      while (lost_[extent.owner] > can) drop_first();
    }
    return is_place();
  }
  // How many places the window is that do not overlap; goes on behind them. What is left of the last extent is free
  // when they are cleared.
  std::uint32_t pass() {
    const std::uint32_t places = units_ / starved_.run_units();
    const std::uint32_t left = units_ % starved_.run_units();
    begin_again(end_);
    if (left > 0) extents_.push_back({end_ - left, left});
    units_ = left;
    return places;
  }
  bool is_place() const noexcept { return units_ >= starved_.run_units(); }
  // The shortest place that ends here. REQUIRES: is_place().
  Place shortest() {
    while (units_ - adds(extents_[begin_], starved_.run_units()) >= starved_.run_units()) drop_first();
    return {first(), end_};
  }
  // Places that are still to come begin here or behind it.
  std::uint32_t first() const noexcept { return begin_ < extents_.size() ? extents_[begin_].first : end_; }

 private:
  // Whether a neighbour loses the block.
  bool counts(const UnitExtent& extent) const noexcept { return !extent.free() && extent.owner != starved_.number(); }
  void drop_first() {
    const UnitExtent gone = extents_[begin_++];
    units_ -= adds(gone, starved_.run_units());
    if (!counts(gone)) return;
    const CacheBlocks& blocks = *reclaimer_.owner_of(gone)->blocks;
    if (!has_piece(blocks, medium_, gone.block, gone.end(), end_)) --lost_[gone.owner];
  }
  void begin_again(std::uint32_t unit) {
    extents_.clear();
    begin_ = 0;
    end_ = unit;
    units_ = 0;
    lost_ = {};
  }

  const SpaceReclaimer& reclaimer_;
  const CacheBlocks& starved_;
  const Medium medium_;
  const QuotaTier& tier_;
  std::vector<UnitExtent> extents_;
  std::size_t begin_ = 0;                                     // of the window in them
  std::uint32_t end_;                                         // of the last one
  std::uint32_t units_ = 0;                                   // that they add
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost_{};  // blocks that have a piece in the window
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
  const UnitSet& units = starved.space().unit_set(medium);
  const std::size_t wanted = n * starved.pieces_count();
  std::size_t found = 0;
  for (std::uint32_t from = 0; from < units.size() && found < wanted;) {
    const SpaceLock lock = starved.lock();
    if (from == 0) found = units.fits(starved.run_units(), wanted);
    from = count_places(starved, medium, from, wanted, found);
  }
  return found >= wanted;
}

// Adds to `found` the places from this unit on, until there are as many as are wanted or others shall get the lock.
// Returns where to go on: perhaps within an extent, whose first part is in a place that was counted. REQUIRES: the lock
// is held.
std::uint32_t SpaceReclaimer::count_places(const CacheBlocks& starved, Medium medium, std::uint32_t from,
                                           std::size_t wanted, std::size_t& found) const {
  const UnitSet& units = starved.space().unit_set(medium);
  const QuotaTier tier = starved.space().quota_tier(medium);
  Window window(*this, starved, medium, tier, from);
  std::size_t visited = 0;
  std::uint32_t unit = units.head_of(from);
  while (unit < units.size() && found < wanted) {
    const bool goes_on = window.first() > from;  // else the next hold would do the same again
    if (goes_on && visited++ >= kVisitsMax) return window.first();
    UnitExtent extent = units.at(unit);
    unit = extent.end();
    if (extent.first < from) extent = {from, unit - from};
    if (window.add(extent)) found += window.pass();
  }
  return unit;
}

// How many more runs must be free. REQUIRES: the lock is held.
std::size_t SpaceReclaimer::places_missing(const CacheBlocks& starved, Medium medium, std::size_t n) noexcept {
  const std::size_t wanted = n * starved.pieces_count();
  return wanted - starved.space().unit_set(medium).fits(starved.run_units(), wanted);
}

// Fills in what the place costs and makes. False if it costs too much, or something there cannot be dropped any more,
// or another place that was cleared has some of it, so that no block would find room that finds none now.
bool SpaceReclaimer::price(const CacheBlocks& starved, Medium medium, const QuotaTier& tier, Place& place,
                           std::size_t& visited) const {
  const UnitSet& units = starved.space().unit_set(medium);
  if (!units.is_head(place.first)) return false;  // what lay before it is free now
  place.units = 0;
  place.within_quotas = false;
  std::uint32_t added = 0;  // units
  std::array<std::uint32_t, BlockSpace::kCachesMax> lost{};
  for (std::uint32_t unit = place.first; unit < place.end;) {
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    ++visited;
    added += adds(extent, starved.run_units());
    if (extent.free()) continue;
    const Member* const member = owner_of(extent);
    if (member == nullptr) return false;
    if (has_piece(*member->blocks, medium, extent.block, place.first, extent.first)) continue;  // it has its price
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
  place.blocks = added / starved.run_units();
  return place.blocks > 0;
}

// The places from this unit on, as many as are compared under one hold of the lock. Returns where to go on: where the
// first place can begin that was not seen. REQUIRES: the lock is held.
std::uint32_t SpaceReclaimer::find_places(const CacheBlocks& starved, Medium medium, std::uint32_t from,
                                          std::vector<Place>& places) const {
  const UnitSet& units = starved.space().unit_set(medium);
  const QuotaTier tier = starved.space().quota_tier(medium);
  Window window(*this, starved, medium, tier, from);
  places.clear();
  std::size_t visited = 0;
  std::uint32_t unit = units.head_of(from);  // what was dropped before it may have become one run with it
  while (unit < units.size()) {
    const bool goes_on = window.first() > from;  // else the next hold would do the same again
    if (goes_on && (visited++ >= kVisitsMax || places.size() >= kPlacesMax)) break;
    const UnitExtent extent = units.at(unit);
    unit = extent.end();
    if (!window.add(extent)) continue;
    Place place = window.shortest();
    if (price(starved, medium, tier, place, visited)) places.push_back(place);
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.within_quotas != b.within_quotas ? b.within_quotas : a.units < b.units;
  });
  return unit < units.size() ? window.first() : unit;
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
  for (std::uint32_t from = 0; from < units;) {
    const SpaceLock lock = starved.lock();
    std::size_t missing = places_missing(starved, medium, n);
    if (missing == 0) break;
    from = find_places(starved, medium, from, places);
    std::size_t made = 0;  // at most: what goes elsewhere with a prompt may make places, too
    for (Place& place : places) {
      // What was dropped before may have changed what this one costs.
      std::size_t visited = 0;
      if (!price(starved, medium, starved.space().quota_tier(medium), place, visited)) continue;
      dropped += clear(starved, medium, place);
      made += std::max(place.blocks, place.units / starved.run_units());
      if (made < missing) continue;
      missing = places_missing(starved, medium, n);
      if (missing == 0) break;
      made = 0;
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
  std::string lies = "a block lies in one run of units";
  if (starved.pieces_count() > 1) {
    lies += " or in " + std::to_string(starved.pieces_count()) + " pieces, each in one run of " +
            std::to_string(starved.run_units()) + " units";
  }
  throw Error(ErrorCode::kOutOfBlocks,
              std::to_string(n) + " blocks of " + std::to_string(starved.block_units()) + " units of " +
                  medium_name(medium) + " asked for: " + std::to_string(tier.free()) + " units are free and " +
                  std::to_string(evictable) + " can be evicted, but " + lies + ", and only " + std::to_string(usable) +
                  " find a place; the largest free run is " + std::to_string(largest) + " units",
              {{"requested", static_cast<std::int64_t>(n)},
               {"free", static_cast<std::int64_t>(usable)},
               {"active", its.active / starved.block_units()},
               {"evictable", its.historical / starved.block_units()},
               {"capacity", starved.store(medium).capacity()},
               {"fragmented", 1},
               {"largest_run", largest}});
}

}  // namespace kvpool
