// Room on disk for what is to be written there.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kvpool/pool/disk_copies.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {
namespace {

constexpr std::size_t kPassedMax = 64;  // nodes that cannot go and are passed over, before the search ends
constexpr std::size_t kSlotsMax = 64;   // slots of which the coldest copy goes

}  // namespace

// Makes room for n pages of the prompt that ends with `end`, as far as there is something that may go for them. Nothing
// that lies in HBM or DRAM is dropped for a write, nor any page on DISK that such a page continues.
void PromptCache::make_disk_room(std::size_t n, const PromptNode& end) noexcept {
  const std::size_t room = blocks_.free_blocks(Medium::kDisk);
  if (room >= n) return;
  const std::size_t gone = drop_disk_leaves(n - room);
  if (room + gone < n) drop_cold_copies(n - room - gone, end);
}

// Drops up to n pages on DISK that nothing continues, the coldest first.
std::size_t PromptCache::drop_disk_leaves(std::size_t n) noexcept {
  std::array<PromptNode*, kPassedMax> passed;
  std::size_t n_passed = 0;
  std::size_t gone = 0;
  while (gone < n) {
    PromptNode* const node = index_.coldest(ValueClass::kDisk);
    if (node == nullptr) break;
    if (node->children == nullptr) {
      gone += evict(Medium::kDisk, std::min<std::size_t>(n - gone, node->pages));
      continue;
    }
    if (n_passed == kPassedMax) break;
    passed[n_passed++] = index_.hold_coldest(ValueClass::kDisk, node->pages);  // whole: it cuts nothing, nor throws
  }
  for (std::size_t i = 0; i < n_passed; ++i) index_.release_hold(passed[i]);
  return gone;
}

// Drops the copies of up to n pages that lie in memory, are not pinned, and were used before that prompt: the last
// pages of their prompts first (A18). So a disk that is smaller than what memory caches still takes what is hotter.
std::size_t PromptCache::drop_cold_copies(std::size_t n, const PromptNode& end) noexcept {
  const std::uint64_t before = end.payload.pins > 0 ? UINT64_MAX : end.payload.stamp;
  std::size_t gone = 0;
  while (gone < n) {
    const PromptNode* const node = cold_copied_node(before);
    if (node == nullptr) break;
    for (std::uint32_t page = copied_pages(*node); page > 0 && gone < n; ++gone)
      drop_copy(node->payload.values[--page]);
  }
  return gone;
}

// Of the pages whose copies the next slots are: the node of the coldest whose last copy may go. Null without one.
PromptNode* PromptCache::cold_copied_node(std::uint64_t before) noexcept {
  const BlockStore& disk = store(Medium::kDisk);
  PromptNode* coldest = nullptr;
  for (std::size_t left = std::min<std::size_t>(kSlotsMax, disk.capacity()); left > 0; --left) {
    const std::uint32_t slot = next_slot_;
    next_slot_ = slot + 1 < disk.capacity() ? slot + 1 : 0;
    if (disk.state(slot) != BlockState::kHistorical || disk.tag(slot) != CacheBlocks::kCacheTag) continue;
    const std::uint32_t mark = disk.mark(slot);
    PromptNode* const node = node_of(store(medium_of_mark(mark)).address_of(block_of_mark(mark)));
    if (node->payload.pins > 0 || node->payload.held || node->payload.stamp >= before) continue;
    if (continued_on_disk(node, copied_pages(*node))) continue;
    coldest = node;
    before = node->payload.stamp;
  }
  return coldest;
}

// How many of its pages, from the first on, have copies. REQUIRES: they lie in memory.
std::uint32_t PromptCache::copied_pages(const PromptNode& node) const noexcept {
  std::uint32_t copied = node.pages;
  while (copied > 0 && copies_->slot_of(node.payload.values[copied - 1]) == DiskCopies::kNone) --copied;
  return copied;
}

// Whether a page that follows these is on disk, or is being written.
bool PromptCache::continued_on_disk(PromptNode* node, std::uint32_t copied) const noexcept {
  if (copied < node->pages) return copies_->being_written(node->payload.values[copied]);
  bool continued = false;
  index_.for_each_child(node, [&](const PromptNode& child) {
    if (child.payload.value_class == ValueClass::kRemote) return;
    const Address first = child.payload.values[0];
    continued = continued || copies_->on_disk(first) || copies_->being_written(first);
  });
  return continued;
}

}  // namespace kvpool
