// The units of all media, and the caches that share them.
//
// A space counts memory in units. The blocks of a cache all have the same size, any number of units. With one cache,
// block b lies in units [b * k, b * k + k): the cache's own free set says which are free, and the space has nothing to
// do.
//
// Several caches share one set of free units (unit_set.h). Then a block with k units lies in any k units next to each
// other, and its number is the first of them:
//
//   units                 0  1  2  3  4  5  6  7  8  9 10 11
//   3 units a block      |   0    |           |   7    |
//   4 units a block               |     3     |
//
// So where a block lies follows from its number, for every reader of an address, in this process or in another:
// base + number * unit. Each cache keeps states and generations for its own blocks (CacheBlocks).
//
// Invariants
//   Z1  At most one block, of one cache, has a unit. A block that has an owner or is retired has its units: an extent
//   of
//       the unit set, with its cache's number.
//   Z2  free + active + historical + reserved + lent + quarantined + retired + suspended = capacity, counted in units
//       over all caches, and for each medium. Units that a closed cache could not free count as retired.
//   Z3  No two caches of a space give out the same address, now or later: their ranges of generations are disjoint.
//
//   Z4  With quotas: the sum over caches of max(active, reserve), and of units that closed caches left, is at most the
//       capacity, for each medium. Not active are historical blocks that nobody pins, also while they are moved, the
//       destinations of such moves, and blocks that were freed and wait for their readers.
//
// Locks: lock() guards the space, its caches' blocks and the prompts over them, since almost every verb changes both at
// once. It is held for microseconds: never while bytes are copied, never while waiting for Python. A thread that holds
// Python's GIL may take it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_meta.h"
#include "kvpool/blocks/quotas.h"
#include "kvpool/blocks/unit_set.h"

namespace kvpool {

class CacheBlocks;
class CachedBlocks;

using SpaceLock = std::unique_lock<std::mutex>;

struct UnitCounts {
  std::uint32_t capacity = 0;
  std::array<std::uint32_t, kBlockStateCount> by_state{};
};

// Frees units of other caches in the space. Without a hook, no cache loses blocks to another.
class PressureHook {
 public:
  virtual ~PressureHook() = default;
  // `starved` needs `blocks` more of its blocks than it can free. In a space with quotas it needs `blocks` together, in
  // one medium, and has evicted nothing itself: the hook decides whose blocks go. Called in the allocating thread,
  // which holds no lock of a space or a pool; may evict from other caches. The allocation throws what this throws.
  virtual void relieve(const CacheBlocks& starved, MediumChoice medium, std::size_t blocks) = 0;
};

class BlockSpace {
 public:
  static constexpr std::uint32_t kCachesMax = kQuotaModelsMax;
  static_assert(kCachesMax <= UnitSet::kOwnersMax);

  // `caches_max`: at a time; a space for one cache serves no second one later. The caches share the generations of an
  // address: with n caches, a block has 2^23 / n. Throws kArgument, also for more than kBlocksMax units that several
  // caches would share; kOutOfMemory, std::bad_alloc.
  explicit BlockSpace(const MediumMap<std::uint32_t>& units, std::uint32_t caches_max = 1);
  BlockSpace(const BlockSpace&) = delete;
  BlockSpace& operator=(const BlockSpace&) = delete;

  SpaceLock lock() { return SpaceLock(mutex_); }
  // The same lock, not locked yet.
  SpaceLock unlocked() noexcept { return SpaceLock(mutex_, std::defer_lock); }

  std::uint32_t capacity(Medium medium) const noexcept { return units_[medium]; }
  bool shared() const noexcept { return seats_.size() > 1; }
  // How many blocks of so many units there can be, and below which number all of them are.
  std::uint32_t blocks(Medium medium, std::uint32_t block_units) const noexcept { return units_[medium] / block_units; }
  std::uint32_t numbers(Medium medium, std::uint32_t block_units) const noexcept {
    if (!shared() || units_[medium] < block_units) return blocks(medium, block_units);
    return units_[medium] - block_units + 1;
  }
  // Whether the address has a generation that another cache than this one gives out, or an earlier one gave (Z3).
  bool is_of_another(std::uint32_t number, Address address) const noexcept {
    if (!shared()) return false;
    const std::uint32_t giver = generation_of(address) / generations_each();
    return giver != number && giver < seats_.size() && seats_[giver].used;
  }

  // --- REQUIRES, from here on: the caller holds lock() ---

  UnitCounts counts(Medium medium) const noexcept;
  void set_pressure_hook(std::shared_ptr<PressureHook> hook) noexcept { hook_ = std::move(hook); }
  const std::shared_ptr<PressureHook>& pressure_hook() const noexcept { return hook_; }
  // Checks Z1, Z2 and Z4. Throws kAudit, std::bad_alloc.
  void audit() const;
  // Which units are free, and whose the others are. REQUIRES: shared().
  const UnitSet& unit_set(Medium medium) const noexcept { return *shared_units_[medium]; }

  // --- quotas (space_quotas.cpp) ---

  // From now on no cache takes more than its rules admit; without rules it may have nothing. REQUIRES: shared(), no
  // cache yet.
  void enforce_quotas() noexcept { has_quotas_ = true; }
  bool has_quotas() const noexcept { return has_quotas_; }
  // The rules of a cache in each medium. Throws kArgument when the reserves exceed the capacity or a limit is below its
  // reserve, and kOutOfBlocks (kQuota) when a reserve does not fit beside what others have active now, and kState after
  // end_rules().
  void set_rules(std::uint32_t number, const MediumMap<QuotaRule>& rules, std::string model);
  // For good: the cache may have nothing any more.
  void end_rules(std::uint32_t number) noexcept {
    seats_[number].rules = {};
    seats_[number].ended = true;
  }
  // Sets targets alone. Those of other caches stay.
  void set_quota(std::uint32_t number, Medium medium, std::uint32_t units) noexcept {
    seats_[number].rules[medium].quota = units;
  }
  // While it is held, a cache may have no more active units than it has.
  void hold_growth(std::uint32_t number, bool held) noexcept { seats_[number].held = held; }
  bool holds_growth(std::uint32_t number) const noexcept { return seats_[number].held; }
  // What every cache may have and has.
  QuotaTier quota_tier(Medium medium) const noexcept;
  // How many more blocks the cache may take: active ones, which its limit, others' reserves and what is active leave;
  // historical ones, which its limit leaves. REQUIRES: has_quotas().
  std::size_t may_take(const CacheBlocks& cache, Medium medium) const noexcept;
  std::size_t may_cache(const CacheBlocks& cache, Medium medium) const noexcept;
  // Whether Z4 is broken, so that what was done last has to be undone.
  bool overdrawn(const CacheBlocks& cache, MediumMap<std::uint32_t> freed_soon) const noexcept;
  // Throws kOutOfBlocks (kQuota) unless the quotas, if there are any, admit n more active blocks.
  void check_growth(const CacheBlocks& cache, Medium medium, std::size_t n) const;
  [[noreturn]] void throw_out_of_quota(const CacheBlocks& cache, Medium medium, std::uint64_t units,
                                       const std::string& why) const;

 private:
  friend class CacheBlocks;

  // The place of one cache.
  struct Seat {
    bool taken = false;
    bool used = false;                     // by some cache, now or earlier
    CacheBlocks* cache = nullptr;          // null while it is being made
    const CachedBlocks* cached = nullptr;  // the prompts over it; null: no block is historical
    MediumMap<QuotaRule> rules{};
    std::string model = {};  // the rules' name
    bool held = false;
    bool ended = false;                          // its rules
    MediumMap<std::uint32_t> next_generation{};  // above all generations that earlier caches of this seat gave out
  };
  struct Generations {
    std::uint32_t first;
    std::uint32_t last;
  };

  std::uint32_t generations_each() const noexcept {
    return (kGenerationMax + 1) / static_cast<std::uint32_t>(seats_.size());
  }
  // Takes the lock. Returns the number of a seat. Throws kState when none is left.
  std::uint32_t take_seat();
  // Takes the lock. For a cache whose construction failed, or that has ended.
  void leave_seat(std::uint32_t number) noexcept;
  // The generations of this seat's blocks, beginning where `wish` says. Throws kState when they are used up.
  Generations generations_of(std::uint32_t number, Medium medium, std::uint32_t wish) const;
  // Take the lock. When a cache leaves, its historical blocks without readers become free. All its other blocks may
  // still be written or read, so the space loses their units.
  void enter(CacheBlocks& cache) noexcept;
  void set_cached(std::uint32_t number, const CachedBlocks* cached) noexcept;
  void leave(CacheBlocks& cache) noexcept;
  void leave_units(const CacheBlocks& cache, Medium medium) noexcept;
  UnitSet& mutable_units(Medium medium) noexcept { return *shared_units_[medium]; }
  void audit_extents(Medium medium) const;

  static QuotaModel model_of(const Seat& seat, Medium medium) noexcept;

  std::mutex mutex_;
  const MediumMap<std::uint32_t> units_;
  const std::uint32_t made_in_;                       // fork generation
  std::vector<Seat> seats_;                           // as many as caches_max
  MediumMap<std::unique_ptr<UnitSet>> shared_units_;  // null unless shared()
  MediumMap<std::uint32_t> left_behind_{};            // units
  std::shared_ptr<PressureHook> hook_;
  bool has_quotas_ = false;
};

}  // namespace kvpool
