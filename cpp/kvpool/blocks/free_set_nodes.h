// Where a free set keeps its runs: in the metadata of the free blocks themselves, of 16 bytes each, or in one word of 8
// bytes for each unit of a space, where there is nothing else.
//
// A run's first and last block know its length, and its first one has two links, which a bin and a trie use
// differently: next and previous, or child 0 and child 1. The operations of the two kinds have the same names:
//
//   free_before(b), free_at(b)  whether a free run ends before block b, or begins at it. REQUIRES: there is a block
//   b-1,
//                               or b, and no free run has blocks on both sides.
//   is_head(b)                  whether b is the first block of a free run
//   length(b)                   of the run that begins at b
//   length_before(b)            of the run that ends before b
//   begin_run(b, n)             blocks [b, b + n) are a run, with no links. REQUIRES: their metadata is that of free
//                               blocks in no run
//   end_run(b, n)               and are in no run any more
//   low(b), high(b), set_links(b, low, high), set_low(b, to), set_high(b, to)
//   check_taken(b, blocks)      how many blocks are taken together from b on; 0 if b is free, kBad if that cannot be
//   check_run(b, blocks, what)  the length of the maximal run that begins at b; kBad if it is marked wrong, and why
#pragma once

#include <cstdint>

#include "kvpool/base/check.h"
#include "kvpool/blocks/block_meta.h"

namespace kvpool {

inline constexpr std::uint32_t kNoBlock = ~0U;
inline constexpr std::uint32_t kBadRun = ~0U;

// In the metadata of a store (block_meta.h): the length in the mark, the links in the tag. States say what is free.
class BlockNodes {
 public:
  static constexpr bool kInnerKnown = true;  // a block inside a run is told from one that is taken
  static constexpr std::uint32_t kNoLink = kNoBlock;

  BlockNodes(BlockMeta* meta) noexcept : meta_(meta) {}  // NOLINT(google-explicit-constructor)

  bool is_free(std::uint32_t block) const noexcept { return meta_[block].is_free(); }
  bool has_mark(std::uint32_t block) const noexcept { return meta_[block].mark != 0; }
  bool free_before(std::uint32_t block) const noexcept { return meta_[block - 1].is_free(); }
  bool free_at(std::uint32_t block) const noexcept { return meta_[block].is_free(); }
  bool is_head(std::uint32_t block) const noexcept {
    return meta_[block].is_free() && (block == 0 || !meta_[block - 1].is_free());
  }
  std::uint32_t length(std::uint32_t head) const noexcept { return meta_[head].mark; }
  std::uint32_t length_before(std::uint32_t end) const noexcept { return meta_[end - 1].mark; }
  void begin_run(std::uint32_t head, std::uint32_t length) noexcept {
    meta_[head + length - 1].mark = length;
    meta_[head].mark = length;
  }
  void end_run(std::uint32_t head, std::uint32_t length) noexcept {
    meta_[head].mark = 0;
    meta_[head].tag = 0;
    meta_[head + length - 1].mark = 0;
  }
  std::uint32_t low(std::uint32_t head) const noexcept { return static_cast<std::uint32_t>(meta_[head].tag); }
  std::uint32_t high(std::uint32_t head) const noexcept { return static_cast<std::uint32_t>(meta_[head].tag >> 32); }
  void set_links(std::uint32_t head, std::uint32_t low, std::uint32_t high) noexcept {
    meta_[head].tag = std::uint64_t{high} << 32 | low;
  }
  void set_low(std::uint32_t head, std::uint32_t to) noexcept { set_links(head, to, high(head)); }
  void set_high(std::uint32_t head, std::uint32_t to) noexcept { set_links(head, low(head), to); }

  std::uint32_t check_taken(std::uint32_t block, std::uint32_t /*blocks*/) const noexcept {
    return meta_[block].is_free() ? 0 : 1;
  }
  std::uint32_t check_run(std::uint32_t head, std::uint32_t blocks, const char*& what) const noexcept;

 private:
  BlockMeta* meta_;
};

// One word for each unit (unit_set.h). Zero: inside an extent, free or taken.
//
//   first of a taken extent   1 | owner 5 at 3 | length 25 at 8 | block 24 at 40
//   first of a free run       kEnd | kHead (| kSingle: the run has one unit) | low link 24 at 16 | high link 24 at 40
//   second of a free run      (| kEnd: it is the last) | length 25 at 8; it is where the first one's length is found
//   last of a free run        kEnd | length 25 at 8
class UnitNodes {
 public:
  static constexpr bool kInnerKnown = false;
  // No run that a trie links begins at the last unit there can be.
  static constexpr std::uint32_t kNoLink = (1U << 24) - 1;
  static constexpr std::uint64_t kTaken = 1, kEnd = 2, kHead = 4, kSingle = 8;
  static constexpr int kLengthShift = 8, kLowShift = 16, kHighShift = 40;

  UnitNodes(std::uint64_t* words) noexcept : words_(words) {}  // NOLINT(google-explicit-constructor)

  bool free_before(std::uint32_t unit) const noexcept { return (words_[unit - 1] & (kTaken | kEnd)) == kEnd; }
  bool free_at(std::uint32_t unit) const noexcept { return is_head(unit); }
  bool is_head(std::uint32_t unit) const noexcept { return (words_[unit] & (kTaken | kHead)) == kHead; }
  std::uint32_t length(std::uint32_t head) const noexcept {
    return (words_[head] & kSingle) != 0 ? 1 : length_in(words_[head + 1]);
  }
  std::uint32_t length_before(std::uint32_t end) const noexcept {
    return (words_[end - 1] & kHead) != 0 ? 1 : length_in(words_[end - 1]);
  }
  void begin_run(std::uint32_t head, std::uint32_t length) noexcept {
    if (length == 1) {
      words_[head] = kEnd | kHead | kSingle;
      return;
    }
    words_[head] = kEnd | kHead;
    words_[head + 1] = std::uint64_t{length} << kLengthShift;
    words_[head + length - 1] = kEnd | std::uint64_t{length} << kLengthShift;
  }
  void end_run(std::uint32_t head, std::uint32_t length) noexcept {
    words_[head] = 0;
    if (length == 1) return;
    words_[head + 1] = 0;
    words_[head + length - 1] = 0;
  }
  std::uint32_t low(std::uint32_t head) const noexcept { return link(words_[head] >> kLowShift); }
  std::uint32_t high(std::uint32_t head) const noexcept { return link(words_[head] >> kHighShift); }
  void set_links(std::uint32_t head, std::uint32_t low, std::uint32_t high) noexcept {
    words_[head] = (words_[head] & kFlags) | std::uint64_t{low & kLinkMask} << kLowShift |
                   std::uint64_t{high & kLinkMask} << kHighShift;
  }
  void set_low(std::uint32_t head, std::uint32_t to) noexcept {
    words_[head] = (words_[head] & ~(std::uint64_t{kLinkMask} << kLowShift)) | std::uint64_t{to & kLinkMask}
                                                                                   << kLowShift;
  }
  void set_high(std::uint32_t head, std::uint32_t to) noexcept {
    words_[head] = (words_[head] & ~(std::uint64_t{kLinkMask} << kHighShift)) | std::uint64_t{to & kLinkMask}
                                                                                    << kHighShift;
  }

  std::uint32_t check_taken(std::uint32_t unit, std::uint32_t units) const noexcept;
  std::uint32_t check_run(std::uint32_t head, std::uint32_t units, const char*& what) const noexcept;

  static std::uint32_t length_in(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> kLengthShift) & ((1U << 25) - 1);
  }

 private:
  static constexpr std::uint64_t kFlags = 0xFF;
  static constexpr std::uint32_t kLinkMask = kNoLink;
  static std::uint32_t link(std::uint64_t shifted) noexcept { return static_cast<std::uint32_t>(shifted) & kLinkMask; }

  std::uint64_t* words_;
};

}  // namespace kvpool
