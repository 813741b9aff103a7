// The units of all media, and the caches that share them.
//
// A unit is the memory that a space counts in. Each cache has blocks of one size, any number of units: block b of a
// cache with k units a block lies in units [b * k, b * k + k). So the blocks of two caches overlap:
//
//   units               0  1  2  3  4  5  6  7  8  9 10 11
//   3 units a block    |   0    |   1    |   2    |   3    |
//   4 units a block    |     0     |     1     |     2     |
//
// When a cache takes a block, the free blocks of other caches that overlap it leave their free sets (kOverlapped). They
// come back when all of their units are free again. Each cache keeps states, generations and a free set for its own
// blocks (CacheBlocks), so a space with one cache costs nothing more, whatever its blocks measure.
//
// Invariants
//   Z1  A unit belongs to one block at most, of one cache: of a free block none does, of an overlapped one at least one
//       belongs to a block of another cache.
//   Z2  free + active + historical + reserved + lent + quarantined + retired = capacity, counted in units over all
//       caches, and for each medium. What a cache left behind counts as retired.
//   Z3  No two caches of a space give out the same address, now or later: each has a range of generations of its own.
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
#include <vector>

#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_meta.h"
#include "kvpool/blocks/unit_map.h"

namespace kvpool {

class CacheBlocks;

using SpaceLock = std::unique_lock<std::mutex>;

struct UnitCounts {
  std::uint32_t capacity = 0;
  std::array<std::uint32_t, kBlockStateCount> by_state{};  // none is overlapped: its units count where they belong
};

// Frees units of a space's other caches. Without a hook no cache loses a block to another one.
class PressureHook {
 public:
  virtual ~PressureHook() = default;
  // `starved` has asked for `blocks` more of its blocks than it can make free. Called in the thread that allocates,
  // with no lock of a space or a pool held; may evict from other caches. What it throws the allocation throws.
  virtual void relieve(const CacheBlocks& starved, MediumChoice medium, std::size_t blocks) = 0;
};

class BlockSpace {
 public:
  static constexpr std::uint32_t kCachesMax = 16;

  // `caches_max`: at a time; a space for one cache serves no second one later. They share the generations of an
  // address: with one cache a block has 2^23 of them, with n caches an n-th part. Throws kArgument, std::bad_alloc.
  explicit BlockSpace(const MediumMap<std::uint32_t>& units, std::uint32_t caches_max = 1);
  BlockSpace(const BlockSpace&) = delete;
  BlockSpace& operator=(const BlockSpace&) = delete;

  SpaceLock lock() { return SpaceLock(mutex_); }
  // The same, to be locked by its holder.
  SpaceLock unlocked() noexcept { return SpaceLock(mutex_, std::defer_lock); }

  std::uint32_t capacity(Medium medium) const noexcept { return units_[medium]; }
  bool shared() const noexcept { return seats_.size() > 1; }

  // --- REQUIRES, from here on: the caller holds lock() ---

  UnitCounts counts(Medium medium) const noexcept;
  void set_pressure_hook(std::shared_ptr<PressureHook> hook) noexcept { hook_ = std::move(hook); }
  const std::shared_ptr<PressureHook>& pressure_hook() const noexcept { return hook_; }
  // Checks Z1 and Z2. Throws kAudit, std::bad_alloc.
  void audit() const;

 private:
  friend class CacheBlocks;

  // The place of one cache.
  struct Seat {
    bool taken = false;
    bool used = false;                           // by some cache, now or earlier
    CacheBlocks* cache = nullptr;                // null while it is being made
    MediumMap<std::uint32_t> next_generation{};  // above all that earlier caches of this seat gave out
  };
  struct Generations {
    std::uint32_t first;
    std::uint32_t last;
  };

  // Takes the lock. Returns the number of a seat. Throws kState when none is left.
  std::uint32_t take_seat();
  // Takes the lock. For a cache that could not be made, or that is gone.
  void leave_seat(std::uint32_t number) noexcept;
  // The generations of this seat's blocks, beginning where `wish` says. Throws kState when they are used up.
  Generations generations_of(std::uint32_t number, Medium medium, std::uint32_t wish) const;
  // Take the lock. A cache that leaves owns no free block any more: what is historical and not read becomes free; all
  // else somebody may still write or read, and it is lost to the space.
  void enter(CacheBlocks& cache) noexcept;
  void leave(CacheBlocks& cache) noexcept;
  // These units have become the cache's, or nobody's. REQUIRES: shared().
  void occupy(const CacheBlocks& cache, Medium medium, std::uint32_t first_unit, std::uint32_t units) noexcept;
  void vacate(const CacheBlocks& cache, Medium medium, std::uint32_t first_unit, std::uint32_t units) noexcept;

  std::mutex mutex_;
  const MediumMap<std::uint32_t> units_;
  const std::uint32_t made_in_;             // fork generation
  std::vector<Seat> seats_;                 // as many as caches_max
  MediumMap<UnitMap> taken_;                // of a space that is shared
  MediumMap<std::uint32_t> left_behind_{};  // units
  std::shared_ptr<PressureHook> hook_;
};

}  // namespace kvpool
