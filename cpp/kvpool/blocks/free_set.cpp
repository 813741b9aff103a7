#include "kvpool/blocks/free_set.h"

#include <algorithm>

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

constexpr unsigned top_bit(std::uint64_t bits) noexcept { return static_cast<unsigned>(bits >> 63); }

}  // namespace

template <class Nodes>
inline void BasicFreeSet<Nodes>::enter_sector(std::uint32_t head) noexcept {
  if constexpr (!Nodes::kInnerKnown) return;  // nothing looks for the head of a run from inside
  const std::uint32_t sector = head >> sector_shift_;
  if (sector_heads_[sector]++ == 0) sectors_used_.set(sector);
}

template <class Nodes>
inline void BasicFreeSet<Nodes>::leave_sector(std::uint32_t head) noexcept {
  if constexpr (!Nodes::kInnerKnown) return;
  const std::uint32_t sector = head >> sector_shift_;
  if (--sector_heads_[sector] == 0) sectors_used_.clear(sector);
}

template <class Nodes>
BasicFreeSet<Nodes>::BasicFreeSet(Nodes nodes, std::uint32_t blocks, BinRuns* bin_runs) noexcept
    : nodes_(nodes), blocks_(blocks), bin_runs_(bin_runs) {
  bins_.fill(kNone);
  if (blocks == 0) return;
  while ((blocks - 1) >> sector_shift_ >= kSectors) ++sector_shift_;
  link(0, blocks);
}

template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::best_fit(std::uint32_t n) const noexcept {
  if (n <= kShortMax) {
    const std::uint32_t bin = bins_used_.first_from(n - 1);
    if (bin != Bitmap4096::kNone) return bins_[bin];
  }
  return trie_best_fit(n);
}

template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::longest() const noexcept {
  if (trie_root_ != kNone) return trie_longest();
  const std::uint32_t bin = bins_used_.last_below(kShortMax);
  return bin == Bitmap4096::kNone ? kNone : bins_[bin];
}

template <class Nodes>
std::size_t BasicFreeSet<Nodes>::fits(std::uint32_t n, std::size_t most) const noexcept {
  KVPOOL_DCHECK(bin_runs_ != nullptr);
  std::size_t found = trie_fits(trie_root_, n, most);
  if (n > kShortMax) return found;
  for (std::uint32_t bin = bins_used_.first_from(n - 1); bin != Bitmap4096::kNone && found < most;
       bin = bin + 1 < kShortMax ? bins_used_.first_from(bin + 1) : Bitmap4096::kNone) {
    found += std::size_t{(*bin_runs_)[bin]} * ((bin + 1) / n);
  }
  return std::min(found, most);
}

template <class Nodes>
void BasicFreeSet<Nodes>::remove_front(std::uint32_t head, std::uint32_t n) noexcept {
  const std::uint32_t length = nodes_.length(head);
  KVPOOL_DCHECK(n > 0 && n <= length && nodes_.is_head(head));
  unlink(head, length);
  if (n < length) link(head + n, length - n);
}

template <class Nodes>
void BasicFreeSet<Nodes>::remove(std::uint32_t first, std::uint32_t n) noexcept
  requires Nodes::kInnerKnown
{
  KVPOOL_DCHECK(n > 0 && first < blocks_ && nodes_.is_free(first));
  const std::uint32_t head = run_containing(first);
  const std::uint32_t end = head + nodes_.length(head);
  KVPOOL_DCHECK(n <= end - first);
  unlink(head, end - head);
  if (first > head) link(head, first - head);
  if (first + n < end) link(first + n, end - (first + n));
}

template <class Nodes>
void BasicFreeSet<Nodes>::insert(std::uint32_t first, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(n > 0 && n <= blocks_ && first <= blocks_ - n);
  std::uint32_t end = first + n;
  if (end < blocks_ && nodes_.free_at(end)) {
    const std::uint32_t length = nodes_.length(end);
    unlink(end, length);
    end += length;
  }
  if (first > 0 && nodes_.free_before(first)) {
    const std::uint32_t length = nodes_.length_before(first);
    first -= length;
    unlink(first, length);
  }
  link(first, end - first);
}

template <class Nodes>
std::size_t BasicFreeSet<Nodes>::take_exact(std::uint32_t n, std::span<std::uint32_t> heads) noexcept {
  if (n > kShortMax || heads.empty() || bins_[n - 1] == kNone) return 0;
  const std::uint32_t last = nodes_.high(bins_[n - 1]);
  std::uint32_t head = bins_[n - 1];
  std::size_t taken = 0;
  bool more = true;
  while (more && taken < heads.size()) {
    const std::uint32_t next = nodes_.low(head);
    nodes_.end_run(head, n);
    leave_sector(head);
    heads[taken++] = head;
    more = head != last;
    head = next;
  }
  if (more) {
    nodes_.set_high(head, last);
    nodes_.set_low(last, head);
    bins_[n - 1] = head;
  } else {
    bins_[n - 1] = kNone;
    bins_used_.clear(n - 1);
  }
  if (bin_runs_ != nullptr) (*bin_runs_)[n - 1] -= static_cast<std::uint32_t>(taken);
  runs_ -= static_cast<std::uint32_t>(taken);
  return taken;
}

// Runs that find no free neighbour are linked to each other first, and then together to the others of their length.
template <class Nodes>
void BasicFreeSet<Nodes>::insert_each(std::uint32_t n, std::span<const std::uint32_t> firsts) noexcept {
  std::uint32_t first = kNone;  // of the chain
  std::uint32_t last = kNone;
  std::uint32_t chained = 0;
  for (std::size_t i = 0; i < firsts.size();) {
    const std::uint32_t head = firsts[i];
    std::uint32_t end = head;
    for (; i < firsts.size() && firsts[i] == end; ++i) end += n;
    if (end - head > n || n > kShortMax || (end < blocks_ && nodes_.free_at(end)) ||
        (head > 0 && nodes_.free_before(head))) {
      insert(head, end - head);
      continue;
    }
    nodes_.begin_run(head, n);
    nodes_.set_links(head, head, last);
    if (last != kNone) {
      nodes_.set_low(last, head);
    } else {
      first = head;
    }
    last = head;
    enter_sector(head);
    ++chained;
  }
  if (chained == 0) return;
  runs_ += chained;
  bin_append(first, last, chained, n);
}

// A run's ends are told by their neighbours and know its length. From inside, the head is the nearest block below with
// a mark; if it is not in the block's sector, it is the last head of the nearest sector that has one, and all that lies
// between is inside this run.
template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::run_containing(std::uint32_t block) const noexcept
  requires Nodes::kInnerKnown
{
  if (nodes_.is_head(block)) return block;
  if (block + 1 == blocks_ || !nodes_.is_free(block + 1)) return block - nodes_.length_before(block + 1) + 1;
  const std::uint32_t sector = block >> sector_shift_;
  const std::uint32_t sector_first = sector << sector_shift_;
  while (!nodes_.has_mark(block) && block > sector_first) --block;
  if (nodes_.has_mark(block)) return block;
  const std::uint32_t head_sector = sectors_used_.last_below(sector);
  KVPOOL_CHECK(head_sector != Bitmap4096::kNone);
  block = ((head_sector + 1) << sector_shift_) - 1;
  while (!nodes_.has_mark(block)) --block;
  return block;
}

template <class Nodes>
void BasicFreeSet<Nodes>::link(std::uint32_t head, std::uint32_t length) noexcept {
  nodes_.begin_run(head, length);
  if (length <= kShortMax) {
    bin_insert(head, length);
  } else {
    trie_insert(head);
  }
  enter_sector(head);
  ++runs_;
}

template <class Nodes>
void BasicFreeSet<Nodes>::unlink(std::uint32_t head, std::uint32_t length) noexcept {
  KVPOOL_DCHECK(nodes_.length(head) == length && nodes_.length_before(head + length) == length);
  if (length <= kShortMax) {
    bin_remove(head, length);
  } else {
    trie_remove(head);
  }
  nodes_.end_run(head, length);
  leave_sector(head);
  --runs_;
}

// A run below the bin's first one becomes the first, another one the last. The first is what best_fit gives out, so
// allocations drift down and the high end of the medium stays in long runs.
template <class Nodes>
void BasicFreeSet<Nodes>::bin_insert(std::uint32_t head, std::uint32_t length) noexcept {
  std::uint32_t& first = bins_[length - 1];
  if (bin_runs_ != nullptr) ++(*bin_runs_)[length - 1];
  if (first == kNone) {
    nodes_.set_links(head, head, head);
    first = head;
    bins_used_.set(length - 1);
    return;
  }
  const std::uint32_t last = nodes_.high(first);
  nodes_.set_links(head, first, last);
  nodes_.set_high(first, head);
  nodes_.set_low(last, head);
  if (head < first) first = head;
}

template <class Nodes>
void BasicFreeSet<Nodes>::bin_append(std::uint32_t chain, std::uint32_t last, std::uint32_t n,
                                     std::uint32_t length) noexcept {
  std::uint32_t& first = bins_[length - 1];
  if (bin_runs_ != nullptr) (*bin_runs_)[length - 1] += n;
  if (first == kNone) {
    first = chain;
    bins_used_.set(length - 1);
    nodes_.set_high(chain, last);
    nodes_.set_low(last, chain);
    return;
  }
  const std::uint32_t before = nodes_.high(first);
  nodes_.set_low(before, chain);
  nodes_.set_high(chain, before);
  nodes_.set_low(last, first);
  nodes_.set_high(first, last);
  if (chain < first) first = chain;
}

template <class Nodes>
void BasicFreeSet<Nodes>::bin_remove(std::uint32_t head, std::uint32_t length) noexcept {
  if (bin_runs_ != nullptr) --(*bin_runs_)[length - 1];
  const std::uint32_t next = nodes_.low(head);
  const std::uint32_t previous = nodes_.high(head);
  std::uint32_t& first = bins_[length - 1];
  if (next == head) {
    first = kNone;
    bins_used_.clear(length - 1);
    return;
  }
  nodes_.set_high(next, previous);
  nodes_.set_low(previous, next);
  if (first == head) first = next;
}

// (length, head) at the top of 64 bits. A length of 2^24 does not fit 24 bits, length - 1 does.
template <class Nodes>
std::uint64_t BasicFreeSet<Nodes>::trie_key(std::uint32_t head) const noexcept {
  const std::uint64_t key = static_cast<std::uint64_t>(nodes_.length(head) - 1) << kBlockBits | head;
  return key << (64 - kTrieKeyBits);
}

template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::trie_child(std::uint32_t node, unsigned side) const noexcept {
  const std::uint32_t child = side == 0 ? nodes_.low(node) : nodes_.high(node);
  return child == Nodes::kNoLink ? kNone : child;
}

template <class Nodes>
bool BasicFreeSet<Nodes>::trie_is_leaf(std::uint32_t node) const noexcept {
  return nodes_.low(node) == Nodes::kNoLink && nodes_.high(node) == Nodes::kNoLink;
}

// The root is the child of kNone.
template <class Nodes>
void BasicFreeSet<Nodes>::trie_set_child(std::uint32_t parent, unsigned side, std::uint32_t child) noexcept {
  if (parent == kNone) {
    trie_root_ = child;
    return;
  }
  if (side == 0) {
    nodes_.set_low(parent, child);
  } else {
    nodes_.set_high(parent, child);
  }
}

template <class Nodes>
void BasicFreeSet<Nodes>::trie_insert(std::uint32_t head) noexcept {
  std::uint64_t bits = trie_key(head);
  std::uint32_t parent = kNone;
  unsigned side = 0;
  for (std::uint32_t node = trie_root_; node != kNone; node = trie_child(node, side)) {
    parent = node;
    side = top_bit(bits);
    bits <<= 1;
  }
  nodes_.set_links(head, kNone, kNone);
  trie_set_child(parent, side, head);
}

// Any leaf below a node may stand in its place, for its key begins with the same bits.
template <class Nodes>
void BasicFreeSet<Nodes>::trie_remove(std::uint32_t head) noexcept {
  std::uint64_t bits = trie_key(head);
  std::uint32_t parent = kNone;
  unsigned side = 0;
  for (std::uint32_t node = trie_root_; node != head; node = trie_child(node, side)) {
    KVPOOL_CHECK(node != kNone);
    parent = node;
    side = top_bit(bits);
    bits <<= 1;
  }
  if (trie_is_leaf(head)) {
    trie_set_child(parent, side, kNone);
    return;
  }
  std::uint32_t leaf = head;
  std::uint32_t leaf_parent = kNone;
  unsigned leaf_side = 0;
  while (!trie_is_leaf(leaf)) {
    leaf_parent = leaf;
    leaf_side = trie_child(leaf, 1) != kNone ? 1 : 0;
    leaf = trie_child(leaf, leaf_side);
  }
  trie_set_child(leaf_parent, leaf_side, kNone);  // before head's links are copied: head may be the leaf's parent
  nodes_.set_links(leaf, nodes_.low(head), nodes_.high(head));
  trie_set_child(parent, side, leaf);
}

// The smallest key >= (n, 0). It lies on the path that the wanted key spells, or else in the last subtree of larger
// keys that the path passed by; of a subtree the smallest lies on the path that goes to child 0 where there is one.
template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::trie_best_fit(std::uint32_t n) const noexcept {
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
template <class Nodes>
std::uint32_t BasicFreeSet<Nodes>::trie_longest() const noexcept {
  std::uint32_t best = trie_root_;
  for (std::uint32_t node = trie_root_; node != kNone;) {
    if (nodes_.length(node) > nodes_.length(best)) best = node;
    node = trie_child(node, trie_child(node, 1) != kNone ? 1 : 0);
  }
  return best;
}

// The nodes below `node` too. At most 48 calls deep.
template <class Nodes>
std::size_t BasicFreeSet<Nodes>::trie_fits(std::uint32_t node, std::uint32_t n, std::size_t most) const noexcept {
  if (node == kNone) return 0;
  std::size_t found = nodes_.length(node) / n;
  if (found < most) found += trie_fits(trie_child(node, 1), n, most - found);
  if (found < most) found += trie_fits(trie_child(node, 0), n, most - found);
  return std::min(found, most);
}

template class BasicFreeSet<BlockNodes>;
template class BasicFreeSet<UnitNodes>;

}  // namespace kvpool
