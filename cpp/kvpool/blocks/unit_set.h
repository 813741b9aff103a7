// The units of one medium that several caches share: one free set for all of them, and who has the others.
//
//   units      0  1  2 | 3  4  5  6 | 7  8  9 10 11 | 12 13 ...
//   extents    3 units,| 4 units,   | free          | 3 units,
//              cache 0 | cache 1    |               | cache 0
//
// Invariants
//   Z5  The extents cover every unit once. An extent is a maximal run of free units, or of the units of one block: all
//   of
//       them, or those of one of its pieces.
//   Z6  A taken extent has its length, its owner and its block in the word of its first unit; the words of its other
//       units are zero. So taking and giving back costs by the block, and not by the unit.
//   Z7  The free set holds the free runs (F1 to F4, free_set.h).
//   Z8  8 bytes a unit, whatever the number of caches, and nothing else that grows with them.
//
// Thread-safety: none; callers hold the lock of the space. Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "kvpool/blocks/free_set.h"

namespace kvpool {

// A free run of units, or the units of one block or piece.
struct UnitExtent {
  static constexpr std::uint32_t kFree = ~0U;
  static constexpr std::uint32_t kNobody = ~0U - 1;  // of a block that a closed cache left behind

  bool free() const noexcept { return owner == kFree; }
  std::uint32_t end() const noexcept { return first + length; }

  std::uint32_t first = 0;
  std::uint32_t length = 0;
  std::uint32_t owner = kFree;  // the number of a cache
  std::uint32_t block = 0;      // unless it is free
};

class UnitSet {
 public:
  static constexpr std::uint32_t kOwnersMax = 31;  // caches

  // All units are free. Throws kOutOfMemory. REQUIRES: units <= kBlocksMax.
  explicit UnitSet(std::uint32_t units);

  std::uint32_t size() const noexcept { return units_; }
  std::uint32_t free() const noexcept { return free_units_; }
  std::uint32_t free_runs() const noexcept { return free_.runs(); }
  // Units in the longest free run.
  std::uint32_t longest_free() const noexcept;
  // How many blocks of `size` units find a run now; `most` if more do. REQUIRES: size > 0.
  std::size_t fits(std::uint32_t size, std::size_t most) const noexcept;

  // Takes n blocks of `size` units, from the smallest runs that they fit into. Calls visit(first, count) for each run
  // of blocks: the first unit of the first one, which is its number, and how many lie one after another. REQUIRES:
  // fits(size, n) == n; the owner is a number of a cache.
  template <class Visit>
  void take(std::uint32_t size, std::size_t n, std::uint32_t owner, Visit&& visit) noexcept {
    while (n > 0) {
      const std::uint32_t head = free_.best_fit(size);
      const std::size_t here = free_.length(head) / size;
      const auto count = static_cast<std::uint32_t>(n < here ? n : here);
      take_run(head, size, count, owner);
      visit(head, count);
      n -= count;
    }
  }
  // Gives back n blocks of `size` units that lie one after another. REQUIRES: each is an extent; n > 0.
  void give_back(std::uint32_t first, std::uint32_t size, std::uint32_t n) noexcept;
  // Takes a run of `size` units for each of `firsts`, and writes where they begin, in ascending order. They are the
  // pieces of one block, whose number is the first of them. REQUIRES: fits(size, firsts.size()) == firsts.size(); the
  // owner is a number of a cache.
  void take_pieces(std::uint32_t size, std::span<std::uint32_t> firsts, std::uint32_t owner) noexcept;
  // Gives back the extents of `size` units that begin there. REQUIRES: ascending.
  void give_back_pieces(std::uint32_t size, std::span<const std::uint32_t> firsts) noexcept;
  // The extent is nobody's for ever. REQUIRES: a taken extent begins there.
  void abandon(std::uint32_t first) noexcept;

  // The extent that begins at this unit. REQUIRES: one does.
  UnitExtent at(std::uint32_t first) const noexcept;
  // Whether an extent begins at this unit. REQUIRES: unit < size().
  bool is_head(std::uint32_t unit) const noexcept;
  // Where the extent begins that has this unit. Visits the units in between. REQUIRES: unit < size().
  std::uint32_t head_of(std::uint32_t unit) const noexcept;

  // Checks Z5 to Z7. Throws kAudit; `name` names the medium.
  void audit(const char* name) const;
  std::uint64_t metadata_bytes() const noexcept {
    return std::uint64_t{units_} * sizeof(std::uint64_t) + sizeof(*this);
  }

 private:
  struct FreeMemory {
    void operator()(std::uint64_t* memory) const noexcept { std::free(memory); }
  };
  using Words = std::unique_ptr<std::uint64_t[], FreeMemory>;

  static Words zeros(std::uint32_t units);
  void take_run(std::uint32_t first, std::uint32_t size, std::uint32_t n, std::uint32_t owner) noexcept;

  Words words_;
  std::uint32_t units_;
  std::uint32_t free_units_;
  UnitFreeSet::BinRuns bin_runs_{};
  UnitFreeSet free_;
};

}  // namespace kvpool
