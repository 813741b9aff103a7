#include "kvpool/blocks/free_set.h"

#include <algorithm>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// The two halves of a head's tag: next and previous of a bin's list, or child 0 and child 1 of a node of the trie.
constexpr std::uint64_t make_links(std::uint32_t low, std::uint32_t high) noexcept {
  return static_cast<std::uint64_t>(high) << 32 | low;
}
constexpr std::uint32_t low_link(std::uint64_t tag) noexcept { return static_cast<std::uint32_t>(tag); }
constexpr std::uint32_t high_link(std::uint64_t tag) noexcept { return static_cast<std::uint32_t>(tag >> 32); }

constexpr std::uint64_t kNoLinks = make_links(FreeSet::kNone, FreeSet::kNone);
constexpr int kTrieKeyBits = 2 * kBlockBits;
constexpr unsigned top_bit(std::uint64_t bits) noexcept { return static_cast<unsigned>(bits >> 63); }

[[noreturn]] void audit_failed(const char* name, const char* what, std::uint32_t block) {
  throw Error(ErrorCode::kAudit, std::string(name) + " free set: " + what + " (block " + std::to_string(block) + ")",
              {{"block", block}});
}

}  // namespace

FreeSet::FreeSet(BlockMeta* meta, std::uint32_t blocks, BinRuns* bin_runs) noexcept
    : meta_(meta), blocks_(blocks), bin_runs_(bin_runs) {
  bins_.fill(kNone);
  if (blocks == 0) return;
  while ((blocks - 1) >> sector_shift_ >= kSectors) ++sector_shift_;
  link(0, blocks);
}

std::uint32_t FreeSet::best_fit(std::uint32_t n) const noexcept {
  if (n <= kShortMax) {
    const std::uint32_t bin = bins_used_.first_from(n - 1);
    if (bin != Bitmap4096::kNone) return bins_[bin];
  }
  return trie_best_fit(n);
}

std::uint32_t FreeSet::longest() const noexcept {
  if (trie_root_ != kNone) return trie_longest();
  const std::uint32_t bin = bins_used_.last_below(kShortMax);
  return bin == Bitmap4096::kNone ? kNone : bins_[bin];
}

std::size_t FreeSet::fits(std::uint32_t n, std::size_t most) const noexcept {
  KVPOOL_DCHECK(bin_runs_ != nullptr);
  std::size_t found = trie_fits(trie_root_, n, most);
  if (n > kShortMax) return found;
  for (std::uint32_t bin = bins_used_.first_from(n - 1); bin != Bitmap4096::kNone && found < most;
       bin = bin + 1 < kShortMax ? bins_used_.first_from(bin + 1) : Bitmap4096::kNone) {
    found += std::size_t{(*bin_runs_)[bin]} * ((bin + 1) / n);
  }
  return std::min(found, most);
}

void FreeSet::remove_front(std::uint32_t head, std::uint32_t n) noexcept {
  const std::uint32_t length = meta_[head].mark;
  KVPOOL_DCHECK(n > 0 && n <= length && is_head(head));
  unlink(head, length);
  if (n < length) link(head + n, length - n);
}

void FreeSet::remove(std::uint32_t first, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(n > 0 && first < blocks_ && meta_[first].is_free());
  const std::uint32_t head = run_containing(first);
  const std::uint32_t end = head + meta_[head].mark;
  KVPOOL_DCHECK(n <= end - first);
  unlink(head, end - head);
  if (first > head) link(head, first - head);
  if (first + n < end) link(first + n, end - (first + n));
}

void FreeSet::insert(std::uint32_t first, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(n > 0 && n <= blocks_ && first <= blocks_ - n);
  std::uint32_t end = first + n;
  if (end < blocks_ && meta_[end].is_free()) {
    const std::uint32_t length = meta_[end].mark;
    unlink(end, length);
    end += length;
  }
  if (first > 0 && meta_[first - 1].is_free()) {
    const std::uint32_t length = meta_[first - 1].mark;
    first -= length;
    unlink(first, length);
  }
  link(first, end - first);
}

// A run's ends are told by their neighbours and know its length. From inside, the head is the nearest block below with
// a mark; if it is not in the block's sector, it is the last head of the nearest sector that has one, and all that lies
// between is inside this run.
std::uint32_t FreeSet::run_containing(std::uint32_t block) const noexcept {
  if (is_head(block)) return block;
  if (is_tail(block)) return block - meta_[block].mark + 1;
  const std::uint32_t sector = block >> sector_shift_;
  const std::uint32_t sector_first = sector << sector_shift_;
  while (meta_[block].mark == 0 && block > sector_first) --block;
  if (meta_[block].mark != 0) return block;
  const std::uint32_t head_sector = sectors_used_.last_below(sector);
  KVPOOL_CHECK(head_sector != Bitmap4096::kNone);
  block = ((head_sector + 1) << sector_shift_) - 1;
  while (meta_[block].mark == 0) --block;
  return block;
}

void FreeSet::link(std::uint32_t head, std::uint32_t length) noexcept {
  meta_[head + length - 1].mark = length;
  meta_[head].mark = length;
  if (length <= kShortMax) {
    bin_insert(head, length);
  } else {
    trie_insert(head);
  }
  const std::uint32_t sector = head >> sector_shift_;
  if (sector_heads_[sector]++ == 0) sectors_used_.set(sector);
  ++runs_;
}

void FreeSet::unlink(std::uint32_t head, std::uint32_t length) noexcept {
  KVPOOL_DCHECK(meta_[head].mark == length && meta_[head + length - 1].mark == length);
  if (length <= kShortMax) {
    bin_remove(head, length);
  } else {
    trie_remove(head);
  }
  meta_[head].mark = 0;
  meta_[head].tag = 0;
  meta_[head + length - 1].mark = 0;
  const std::uint32_t sector = head >> sector_shift_;
  if (--sector_heads_[sector] == 0) sectors_used_.clear(sector);
  --runs_;
}

// A run below the bin's first one becomes the first, another one the last. The first is what best_fit gives out, so
// allocations drift down and the high end of the medium stays in long runs.
void FreeSet::bin_insert(std::uint32_t head, std::uint32_t length) noexcept {
  std::uint32_t& first = bins_[length - 1];
  if (bin_runs_ != nullptr) ++(*bin_runs_)[length - 1];
  if (first == kNone) {
    meta_[head].tag = make_links(head, head);
    first = head;
    bins_used_.set(length - 1);
    return;
  }
  const std::uint32_t last = high_link(meta_[first].tag);
  meta_[head].tag = make_links(first, last);
  meta_[first].tag = make_links(low_link(meta_[first].tag), head);  // before last's: they may be one
  meta_[last].tag = make_links(head, high_link(meta_[last].tag));
  if (head < first) first = head;
}

void FreeSet::bin_remove(std::uint32_t head, std::uint32_t length) noexcept {
  if (bin_runs_ != nullptr) --(*bin_runs_)[length - 1];
  const std::uint32_t next = low_link(meta_[head].tag);
  const std::uint32_t previous = high_link(meta_[head].tag);
  std::uint32_t& first = bins_[length - 1];
  if (next == head) {
    first = kNone;
    bins_used_.clear(length - 1);
    return;
  }
  meta_[next].tag = make_links(low_link(meta_[next].tag), previous);
  meta_[previous].tag = make_links(next, high_link(meta_[previous].tag));
  if (first == head) first = next;
}

// (length, head) at the top of 64 bits. A length of 2^24 does not fit 24 bits, length - 1 does.
std::uint64_t FreeSet::trie_key(std::uint32_t head) const noexcept {
  const std::uint64_t key = static_cast<std::uint64_t>(meta_[head].mark - 1) << kBlockBits | head;
  return key << (64 - kTrieKeyBits);
}

std::uint32_t FreeSet::trie_child(std::uint32_t node, unsigned side) const noexcept {
  return side == 0 ? low_link(meta_[node].tag) : high_link(meta_[node].tag);
}

// The root is the child of kNone.
void FreeSet::trie_set_child(std::uint32_t parent, unsigned side, std::uint32_t child) noexcept {
  if (parent == kNone) {
    trie_root_ = child;
    return;
  }
  std::uint64_t& tag = meta_[parent].tag;
  tag = side == 0 ? make_links(child, high_link(tag)) : make_links(low_link(tag), child);
}

void FreeSet::trie_insert(std::uint32_t head) noexcept {
  std::uint64_t bits = trie_key(head);
  std::uint32_t parent = kNone;
  unsigned side = 0;
  for (std::uint32_t node = trie_root_; node != kNone; node = trie_child(node, side)) {
    parent = node;
    side = top_bit(bits);
    bits <<= 1;
  }
  meta_[head].tag = kNoLinks;
  trie_set_child(parent, side, head);
}

// Any leaf below a node may stand in its place, for its key begins with the same bits.
void FreeSet::trie_remove(std::uint32_t head) noexcept {
  std::uint64_t bits = trie_key(head);
  std::uint32_t parent = kNone;
  unsigned side = 0;
  for (std::uint32_t node = trie_root_; node != head; node = trie_child(node, side)) {
    KVPOOL_CHECK(node != kNone);
    parent = node;
    side = top_bit(bits);
    bits <<= 1;
  }
  if (meta_[head].tag == kNoLinks) {
    trie_set_child(parent, side, kNone);
    return;
  }
  std::uint32_t leaf = head;
  std::uint32_t leaf_parent = kNone;
  unsigned leaf_side = 0;
  while (meta_[leaf].tag != kNoLinks) {
    leaf_parent = leaf;
    leaf_side = trie_child(leaf, 1) != kNone ? 1 : 0;
    leaf = trie_child(leaf, leaf_side);
  }
  trie_set_child(leaf_parent, leaf_side, kNone);  // before head's links are copied: head may be the leaf's parent
  meta_[leaf].tag = meta_[head].tag;
  trie_set_child(parent, side, leaf);
}

// The smallest key >= (n, 0). It lies on the path that the wanted key spells, or else in the last subtree of larger
// keys that the path passed by; of a subtree the smallest lies on the path that goes to child 0 where there is one.
std::uint32_t FreeSet::trie_best_fit(std::uint32_t n) const noexcept {
  if (n > blocks_) return kNone;  // nor would its key fit
  const std::uint64_t wanted = static_cast<std::uint64_t>(n - 1) << (64 - kTrieKeyBits + kBlockBits);
  std::uint64_t bits = wanted;
  std::uint64_t best_key = ~std::uint64_t{0};  // above every key: their low 16 bits are zero
  std::uint32_t best = kNone;
  std::uint32_t larger = kNone;
  for (std::uint32_t node = trie_root_; node != kNone; bits <<= 1) {
    const std::uint64_t key = trie_key(node);
    if (key >= wanted && key < best_key) {
      best = node;
      best_key = key;
    }
    const unsigned side = top_bit(bits);
    if (side == 0 && trie_child(node, 1) != kNone) larger = trie_child(node, 1);
    node = trie_child(node, side);
  }
  while (larger != kNone) {
    const std::uint64_t key = trie_key(larger);
    if (key < best_key) {
      best = larger;
      best_key = key;
    }
    larger = trie_child(larger, trie_child(larger, 0) != kNone ? 0 : 1);
  }
  return best;
}

// The largest key lies on the path that goes to child 1 where there is one.
std::uint32_t FreeSet::trie_longest() const noexcept {
  std::uint32_t best = trie_root_;
  for (std::uint32_t node = trie_root_; node != kNone;) {
    if (meta_[node].mark > meta_[best].mark) best = node;
    node = trie_child(node, trie_child(node, 1) != kNone ? 1 : 0);
  }
  return best;
}

// The nodes below `node` too. At most 48 calls deep.
std::size_t FreeSet::trie_fits(std::uint32_t node, std::uint32_t n, std::size_t most) const noexcept {
  if (node == kNone) return 0;
  std::size_t found = meta_[node].mark / n;
  if (found < most) found += trie_fits(trie_child(node, 1), n, most - found);
  if (found < most) found += trie_fits(trie_child(node, 0), n, most - found);
  return std::min(found, most);
}

void FreeSet::audit(const char* name, TakenLength taken_length) const {
  // Every linked run is a maximal run (audit_bins, audit_trie), none is linked twice (their links are injective), and
  // there are as many of them as maximal runs: so every maximal run is linked once.
  const std::uint64_t runs = audit_runs(name, taken_length);
  if (runs != runs_) audit_failed(name, "the number of runs is not what was counted", 0);
  const std::uint64_t linked = audit_bins(name) + audit_trie(name, trie_root_, 0, 0);
  if (linked != runs) audit_failed(name, "a run is not linked", 0);
}

// F1 without the links, and F4, in one walk. Returns the number of maximal runs.
std::uint64_t FreeSet::audit_runs(const char* name, TakenLength taken_length) const {
  std::uint64_t runs = 0;
  std::array<std::uint16_t, kSectors> sector_heads{};
  std::uint32_t head = kNone;  // of the run that the walk is in
  for (std::uint32_t block = 0; block < blocks_;) {
    const BlockMeta& meta = meta_[block];
    if (!meta.is_free()) {
      const std::uint32_t taken = taken_length(meta);
      if (taken == 0 || taken > blocks_ - block) audit_failed(name, "what is taken has a wrong length", block);
      block += taken;
      continue;
    }
    const bool first = is_head(block);
    if (first) {
      head = block;
      ++runs;
      ++sector_heads[block >> sector_shift_];
    }
    if (is_tail(block)) {
      const std::uint32_t length = block - head + 1;
      if (meta.mark != length) audit_failed(name, "the tail of a run has a wrong length", block);
      if (meta_[head].mark != length) audit_failed(name, "the head of a run has a wrong length", head);
    } else if (!first && meta.mark != 0) {
      audit_failed(name, "a block inside a run has a mark", block);
    }
    if (!first && meta.tag != 0) audit_failed(name, "a free block that is no head has a tag", block);
    ++block;
  }
  audit_sectors(name, sector_heads);
  return runs;
}

// F4, when the heads that there are have been counted.
void FreeSet::audit_sectors(const char* name, const std::array<std::uint16_t, kSectors>& heads) const {
  if (!sectors_used_.consistent()) audit_failed(name, "the bitmap of sectors contradicts itself", 0);
  for (std::uint32_t sector = 0; sector < kSectors; ++sector) {
    const std::uint32_t block = sector << sector_shift_;
    if (sector_heads_[sector] != heads[sector]) audit_failed(name, "a sector counts its heads wrong", block);
    if (sectors_used_.test(sector) != (heads[sector] != 0)) audit_failed(name, "a sector has a wrong bit", block);
  }
}

// F2. Returns the number of runs in bins. REQUIRES: audit_runs has passed, so a head's mark is its run's length.
std::uint64_t FreeSet::audit_bins(const char* name) const {
  if (!bins_used_.consistent()) audit_failed(name, "the bitmap of bins contradicts itself", 0);
  std::uint64_t linked = 0;
  for (std::uint32_t bin = 0; bin < kShortMax; ++bin) {
    const std::uint32_t first = bins_[bin];
    if (bins_used_.test(bin) != (first != kNone)) audit_failed(name, "a bin has a wrong bit", bin + 1);
    const std::uint64_t before = linked;
    std::uint32_t head = first;
    while (head != kNone) {
      if (head >= blocks_ || !meta_[head].is_free() || !is_head(head)) {
        audit_failed(name, "a bin links a block that is not the head of a run", head);
      }
      if (meta_[head].mark != bin + 1) audit_failed(name, "a run is in the bin of another length", head);
      const std::uint32_t next = low_link(meta_[head].tag);
      if (next >= blocks_ || high_link(meta_[next].tag) != head) audit_failed(name, "a bin's links do not agree", head);
      if (++linked > runs_) audit_failed(name, "a bin's list does not end", head);
      head = next == first ? kNone : next;
    }
    if (bin_runs_ != nullptr && linked - before != (*bin_runs_)[bin])
      audit_failed(name, "a bin counts its runs wrong", bin + 1);
  }
  return linked;
}

// F3 below `node`, whose path from the root spells the first `depth` bits of `prefix`. Returns the number of nodes.
// A node cannot be met twice, for then its key would begin in two ways.
std::uint64_t FreeSet::audit_trie(const char* name, std::uint32_t node, std::uint64_t prefix, int depth) const {
  if (node == kNone) return 0;
  if (node >= blocks_ || !meta_[node].is_free() || !is_head(node)) {
    audit_failed(name, "the trie links a block that is not the head of a run", node);
  }
  if (meta_[node].mark <= kShortMax) audit_failed(name, "a short run is in the trie", node);
  if (depth > kTrieKeyBits) audit_failed(name, "the trie is too deep", node);
  if (depth > 0 && (trie_key(node) ^ prefix) >> (64 - depth) != 0) {
    audit_failed(name, "a run is on a wrong path of the trie", node);
  }
  const std::uint64_t one = std::uint64_t{1} << (63 - depth);
  return 1 + audit_trie(name, trie_child(node, 0), prefix, depth + 1) +
         audit_trie(name, trie_child(node, 1), prefix | one, depth + 1);
}

}  // namespace kvpool
