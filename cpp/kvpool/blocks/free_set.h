// The free blocks, or units, of one medium as maximal runs, with exact best fit.
//
// Invariants
//   F1  Every maximal run of free blocks has its length at its head and at its tail, and is linked exactly
//       once: runs up to kShortMax blocks in the bin of their length, longer ones in the trie.
//   F2  A bin is a circular list through its runs' heads, and where they are counted it knows
//       how many they are; the bitmap has its bit while it is not empty.
//   F3  The trie is a binary digital tree on (length, head), most significant bit first: a node lies somewhere on the
//       path that its key spells, and its links are its two children. Depth is at most 48 bits in any case.
//   F4  Where blocks may leave from inside of a run, a sector knows how many heads lie in it; the sector bitmap has its
//       bit while that is not zero.
//
// Why best fit: under churn it keeps long runs whole, because a request takes the smallest hole that will do, a single
// block a hole of one. Among runs of one length a bin offers a low one first (see link): nearly as good as address
// order, and O(1).
//
// Cost: best_fit, longest, remove_front and insert are O(1) for short runs, and take at most 48 steps for longer ones.
// remove scans back to the head of the run, by sectors: at most capacity / 2048 blocks. fits visits the runs of the
// trie, of which there are at most capacity / 4096, and each bin once, until it has found what was wanted.
//
// Memory: the runs and their links lie in the metadata of the free blocks themselves (free_set_nodes.h); the set has a
// fixed size. Of blocks that are not free it reads what says so alone, and only of those next to a free run.
// Thread-safety: none. Nothing allocates. The owner of the metadata keeps it as long as the set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/blocks/bitmap4096.h"
#include "kvpool/blocks/free_set_nodes.h"

namespace kvpool {

template <class Nodes>
class BasicFreeSet {
 public:
  static constexpr std::uint32_t kNone = kNoBlock;
  static constexpr std::uint32_t kShortMax = Bitmap4096::kSize;  // longest run with a separate bin
  static constexpr std::uint32_t kSectors = Bitmap4096::kSize;

  using BinRuns = std::array<std::uint32_t, kShortMax>;

  // All blocks are free. `bin_runs`: zeros, to count the runs in each bin, for fits(). REQUIRES: `nodes` has `blocks`
  // zeroed entries; blocks <= kBlocksMax; `bin_runs` outlives the set.
  BasicFreeSet(Nodes nodes, std::uint32_t blocks, BinRuns* bin_runs = nullptr) noexcept;
  BasicFreeSet(const BasicFreeSet&) = delete;
  BasicFreeSet& operator=(const BasicFreeSet&) = delete;

  std::uint32_t runs() const noexcept { return runs_; }

  // The head of the shortest run of at least n blocks, or kNone. REQUIRES: n > 0.
  std::uint32_t best_fit(std::uint32_t n) const noexcept;
  // The head of the longest run, or kNone.
  std::uint32_t longest() const noexcept;
  // How many pieces of n blocks the runs have, each within one run; `most` if they have more. REQUIRES: n > 0;
  // runs are counted.
  std::size_t fits(std::uint32_t n, std::size_t most) const noexcept;
  // REQUIRES: `head` is the head of a run.
  std::uint32_t length(std::uint32_t head) const noexcept { return nodes_.length(head); }

  // The first n blocks of a run leave the set with metadata of no run; the caller changes their state before the next
  // call. REQUIRES: `head` is the head of a run of at least n blocks; n > 0.
  void remove_front(std::uint32_t head, std::uint32_t n) noexcept;
  // The same for neighbouring blocks anywhere in a run. REQUIRES: they are free; n > 0.
  void remove(std::uint32_t first, std::uint32_t n) noexcept
    requires Nodes::kInnerKnown;
  // Takes as many runs of exactly n blocks as there are and `heads` has room for, and writes where they begin. Returns
  // how many. REQUIRES: as remove_front().
  std::size_t take_exact(std::uint32_t n, std::span<std::uint32_t> heads) noexcept;
  // Inserts n blocks from each of `firsts` on. REQUIRES: ascending, and as insert() for each.
  void insert_each(std::uint32_t n, std::span<const std::uint32_t> firsts) noexcept;
  // Blocks join the set and coalesce with their neighbours. REQUIRES: they are free, with metadata of no run, and not
  // in the set; n > 0.
  void insert(std::uint32_t first, std::uint32_t n) noexcept;

  // Checks F1 to F4 against what the metadata of all blocks say. Throws Error(kAudit); `name` names the set in the
  // error.
  void audit(const char* name) const;

 private:
  std::uint32_t run_containing(std::uint32_t block) const noexcept
    requires Nodes::kInnerKnown;

  // Boundary tags, bin or trie, sector and counter of one run.
  void link(std::uint32_t head, std::uint32_t length) noexcept;
  void unlink(std::uint32_t head, std::uint32_t length) noexcept;

  void enter_sector(std::uint32_t head) noexcept;
  void leave_sector(std::uint32_t head) noexcept;
  void bin_insert(std::uint32_t head, std::uint32_t length) noexcept;
  // Puts a chain of runs, which link to each other, behind the last one.
  void bin_append(std::uint32_t first, std::uint32_t last, std::uint32_t n, std::uint32_t length) noexcept;
  void bin_remove(std::uint32_t head, std::uint32_t length) noexcept;

  static constexpr int kTrieKeyBits = 2 * kBlockBits;
  std::uint64_t trie_key(std::uint32_t head) const noexcept;
  std::uint32_t trie_child(std::uint32_t node, unsigned side) const noexcept;
  bool trie_is_leaf(std::uint32_t node) const noexcept;
  void trie_set_child(std::uint32_t parent, unsigned side, std::uint32_t child) noexcept;
  void trie_insert(std::uint32_t head) noexcept;
  void trie_remove(std::uint32_t head) noexcept;
  std::uint32_t trie_best_fit(std::uint32_t n) const noexcept;
  std::uint32_t trie_longest() const noexcept;
  std::size_t trie_fits(std::uint32_t node, std::uint32_t n, std::size_t most) const noexcept;

  std::uint64_t audit_runs(const char* name) const;
  void audit_sectors(const char* name, const std::array<std::uint16_t, kSectors>& heads) const;
  std::uint64_t audit_bins(const char* name) const;
  std::uint64_t audit_trie(const char* name, std::uint32_t node, std::uint64_t prefix, int depth) const;

  Nodes nodes_;
  std::uint32_t blocks_;
  BinRuns* bin_runs_;
  std::uint32_t runs_ = 0;
  std::uint32_t trie_root_ = kNone;
  int sector_shift_ = 0;
  Bitmap4096 bins_used_;                                // bit length - 1
  Bitmap4096 sectors_used_;                             // bit head >> sector_shift_
  std::array<std::uint32_t, kShortMax> bins_;           // a head, or kNone
  std::array<std::uint16_t, kSectors> sector_heads_{};  // a sector has at most 4096 blocks, so 2048 heads
};

using FreeSet = BasicFreeSet<BlockNodes>;
using UnitFreeSet = BasicFreeSet<UnitNodes>;

}  // namespace kvpool
