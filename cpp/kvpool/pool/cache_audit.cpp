// The numbers of a cache, and the check that they are true.
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

ReuseCounts PromptCache::reuse_counts() const noexcept {
  return {counters_.inserted_blocks, blocks_.store(Medium::kHbm).released()};
}

PoolStats PromptCache::stats() const noexcept {
  PoolStats stats;
  for (const Medium medium : kMedia) {
    const BlockStore& blocks = blocks_.store(medium);
    MediumCounts& counts = stats.media[medium];
    counts.capacity = blocks.capacity();
    for (int state = 0; state < kBlockStateCount; ++state) {
      counts.by_state[static_cast<std::size_t>(state)] = blocks.count(static_cast<BlockState>(state));
    }
    counts.displaced = blocks_.displaced(medium);
    counts.by_state[static_cast<std::size_t>(BlockState::kFree)] -= counts.displaced;
    counts.evictable = static_cast<std::uint32_t>(evictable(medium));
    if (copies_ != nullptr && medium == Medium::kDisk) counts.copies = copies_->count();
    counts.free_runs = blocks_.free_runs(medium);
    // The counters of readers as if there were any: a call that is refused may begin to count.
    stats.metadata_bytes +=
        blocks.metadata_bytes() + blocks_.pieces(medium).metadata_bytes() + ReaderCounts::bytes_for(blocks.slots());
  }
  for (int value_class = 0; value_class < kValueClassCount; ++value_class) {
    stats.index_blocks += index_.pages(static_cast<ValueClass>(value_class));
  }
  stats.counters = counters_;
  stats.index_nodes = index_.node_count();
  stats.index_bytes = index_.bytes();
  stats.namespaces = index_.namespace_count();
  return stats;
}

// Beyond what each floor checks of itself: that the index and the stores tell the same story.
void PromptCache::audit() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "cache: " + what); };
  blocks_.audit();
  index_.audit();
  std::size_t filling = 0;
  const auto audit_node = [&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Address address = node.payload.values[i];
      const BlockStore& blocks = blocks_.store_of(address);
      if (blocks.find(address) != AddressFault::kNone) fail("the index holds a stale address (A1)");
      if (blocks.state(block_of(address)) != BlockState::kHistorical) fail("the index holds a block of another (A1)");
      if (node_of(address) != &node) fail("a cached block does not know its node (A1)");
      if (!blocks.filling(block_of(address))) continue;
      if (node.payload.pins == 0) fail("a block that is being filled is not pinned (A17)");
      if (blocks_.never_filled(address)) {
        if (!node.payload.forgotten) fail("a block that was never filled can be found (A17)");
        continue;
      }
      ++filling;
    }
  };
  index_.for_each_node(audit_node);
  index_.for_each_forgotten(audit_node);
  for (const Fill& fill : fills_) filling -= fill.remaining;
  if (filling != 0) fail("a wrong count of blocks that are being filled (A17)");
  MediumMap<std::size_t> in_limbo{};
  for (const Limbo& limbo : limbo_) {
    if (limbo.remaining == 0 || limbo.remaining > limbo.node->payload.pins || !limbo.node->payload.has_limbo) {
      fail("limbo that nobody holds (A2)");
    }
    for (const Address address : limbo.blocks) {
      const BlockStore& blocks = blocks_.store_of(address);
      if (blocks.find(address) != AddressFault::kNone || blocks.tag(block_of(address)) != CacheBlocks::kCacheTag) {
        fail("a block in limbo was reused (A2)");
      }
      ++in_limbo[medium_of(address)];
    }
  }
  for (const Medium medium : kMedia) {
    const std::size_t cached = index_.pages(value_class_of(medium)) + index_.forgotten(value_class_of(medium));
    const std::size_t copies = copies_ != nullptr && medium == Medium::kDisk ? copies_->count() : 0;
    const std::size_t limbo = in_limbo[medium] + copies;
    if (blocks_.store(medium).count(BlockState::kHistorical) != cached + limbo) {
      fail(std::string(medium_name(medium)) + ": " +
           std::to_string(blocks_.store(medium).count(BlockState::kHistorical)) +
           " blocks are historical, and the index holds " + std::to_string(cached) + " and limbo " +
           std::to_string(limbo) + " (A2)");
    }
  }
  if (copies_ != nullptr) audit_copies();
}

}  // namespace kvpool
