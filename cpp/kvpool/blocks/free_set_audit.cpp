// F1 to F4 of a free set, checked against what the metadata of all blocks say.
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/blocks/free_set.h"

namespace kvpool {
namespace {

[[noreturn]] void audit_failed(const char* name, const char* what, std::uint32_t block) {
  throw Error(ErrorCode::kAudit, std::string(name) + " free set: " + what + " (block " + std::to_string(block) + ")",
              {{"block", block}});
}

}  // namespace

template <class Nodes>
void BasicFreeSet<Nodes>::audit(const char* name) const {
  // Every linked run is a maximal run (audit_bins, audit_trie), none is linked twice (their links are injective), and
  // there are as many of them as maximal runs: so every maximal run is linked once.
  const std::uint64_t runs = audit_runs(name);
  if (runs != runs_) audit_failed(name, "the number of runs is not what was counted", 0);
  const std::uint64_t linked = audit_bins(name) + audit_trie(name, trie_root_, 0, 0);
  if (linked != runs) audit_failed(name, "a run is not linked", 0);
}

// F1 without the links, and F4, in one walk. Returns the number of maximal runs.
template <class Nodes>
std::uint64_t BasicFreeSet<Nodes>::audit_runs(const char* name) const {
  std::uint64_t runs = 0;
  std::array<std::uint16_t, kSectors> sector_heads{};
  for (std::uint32_t block = 0; block < blocks_;) {
    const std::uint32_t taken = nodes_.check_taken(block, blocks_);
    if (taken == kBadRun) audit_failed(name, "what is taken has a wrong length", block);
    if (taken > 0) {
      block += taken;
      continue;
    }
    const char* what = "";
    const std::uint32_t length = nodes_.check_run(block, blocks_, what);
    if (length == kBadRun) audit_failed(name, what, block);
    ++runs;
    if constexpr (Nodes::kInnerKnown) ++sector_heads[block >> sector_shift_];
    block += length;
  }
  audit_sectors(name, sector_heads);
  return runs;
}

// F4, when the heads that there are have been counted.
template <class Nodes>
void BasicFreeSet<Nodes>::audit_sectors(const char* name, const std::array<std::uint16_t, kSectors>& heads) const {
  if (!sectors_used_.consistent()) audit_failed(name, "the bitmap of sectors contradicts itself", 0);
  for (std::uint32_t sector = 0; sector < kSectors; ++sector) {
    const std::uint32_t block = sector << sector_shift_;
    if (sector_heads_[sector] != heads[sector]) audit_failed(name, "a sector counts its heads wrong", block);
    if (sectors_used_.test(sector) != (heads[sector] != 0)) audit_failed(name, "a sector has a wrong bit", block);
  }
}

// F2. Returns the number of runs in bins. REQUIRES: audit_runs has passed, so a head's mark is its run's length.
template <class Nodes>
std::uint64_t BasicFreeSet<Nodes>::audit_bins(const char* name) const {
  if (!bins_used_.consistent()) audit_failed(name, "the bitmap of bins contradicts itself", 0);
  std::uint64_t linked = 0;
  for (std::uint32_t bin = 0; bin < kShortMax; ++bin) {
    const std::uint32_t first = bins_[bin];
    if (bins_used_.test(bin) != (first != kNone)) audit_failed(name, "a bin has a wrong bit", bin + 1);
    const std::uint64_t before = linked;
    std::uint32_t head = first;
    while (head != kNone) {
      if (head >= blocks_ || !nodes_.is_head(head)) {
        audit_failed(name, "a bin links a block that is not the head of a run", head);
      }
      if (nodes_.length(head) != bin + 1) audit_failed(name, "a run is in the bin of another length", head);
      const std::uint32_t next = nodes_.low(head);
      if (next >= blocks_ || nodes_.high(next) != head) audit_failed(name, "a bin's links do not agree", head);
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
template <class Nodes>
std::uint64_t BasicFreeSet<Nodes>::audit_trie(const char* name, std::uint32_t node, std::uint64_t prefix,
                                              int depth) const {
  if (node == kNone) return 0;
  if (node >= blocks_ || !nodes_.is_head(node)) {
    audit_failed(name, "the trie links a block that is not the head of a run", node);
  }
  if (nodes_.length(node) <= kShortMax) audit_failed(name, "a short run is in the trie", node);
  if (depth > kTrieKeyBits) audit_failed(name, "the trie is too deep", node);
  if (depth > 0 && (trie_key(node) ^ prefix) >> (64 - depth) != 0) {
    audit_failed(name, "a run is on a wrong path of the trie", node);
  }
  const std::uint64_t one = std::uint64_t{1} << (63 - depth);
  return 1 + audit_trie(name, trie_child(node, 0), prefix, depth + 1) +
         audit_trie(name, trie_child(node, 1), prefix | one, depth + 1);
}

template void BasicFreeSet<BlockNodes>::audit(const char* name) const;
template void BasicFreeSet<UnitNodes>::audit(const char* name) const;

}  // namespace kvpool
