// The pool's numbers, and the check that they are true.
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

PoolStats Pool::stats() {
  guard_open();
  const std::lock_guard lock(mutex_);
  return stats_locked();
}

PoolStats Pool::audit() {
  guard_open();
  const std::lock_guard lock(mutex_);
  return audit_locked();
}

void Pool::audit_if_asked() {
  if (audit_each_call_) [[unlikely]] {
    audit_locked();
  }
}

PoolStats Pool::stats_locked() noexcept {
  PoolStats stats;
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const BlockStore& blocks = store(medium);
    const auto value_class = static_cast<ValueClass>(medium);
    MediumCounts& counts = stats.media[static_cast<std::size_t>(medium_index(medium))];
    counts.capacity = blocks.capacity();
    for (int state = 0; state < kBlockStateCount; ++state) {
      counts.by_state[static_cast<std::size_t>(state)] = blocks.count(static_cast<BlockState>(state));
    }
    counts.evictable = static_cast<std::uint32_t>(index_->evictable(value_class));
    counts.free_runs = blocks.free_runs();
    stats.metadata_bytes += blocks.metadata_bytes();
  }
  for (int value_class = 0; value_class < kValueClassCount; ++value_class) {
    stats.index_blocks += index_->pages(static_cast<ValueClass>(value_class));
  }
  if (arenas_[0] != nullptr && arenas_[0]->on_device()) stats.device_bytes = arenas_[0]->mapped_bytes();
  if (device_mover_ != nullptr) stats.device_bytes += device_mover_->device_bytes();
  stats.counters = counters_;
  stats.index_nodes = index_->node_count();
  stats.index_bytes = index_->bytes();
  stats.namespaces = index_->namespace_count();
  return stats;
}

// Checks, beyond what each floor checks of itself, that the index and the stores tell the same story:
//   A1  every local address in the index names a historical block whose tag is that node;
//   L2  no free block is being read;
//   L3  where the engine allocates, no HBM block is cached or lent;
//   A2  every other historical block is in limbo, with the limbo tag, and its node still has the pins that hold it.
PoolStats Pool::audit_locked() {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "pool: " + what); };
  for (const BlockStore& blocks : stores_) blocks.audit();
  for (std::size_t i = 0; i < kMediaCount; ++i) {
    for (std::uint32_t block = 0; block < readers_[i].size(); ++block) {
      if (readers_[i][block] > 0 && stores_[i].state(block) == BlockState::kFree) fail("a free block is read (L2)");
    }
  }
  if (engine_allocates_ && (stores_[0].count(BlockState::kHistorical) > 0 || stores_[0].count(BlockState::kLent) > 0)) {
    fail("a block of the engine is cached or lent (L3)");
  }
  index_->audit();
  index_->for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Address address = node.payload.values[i];
      const BlockStore& blocks = store_of(address);
      if (blocks.find(address) != AddressFault::kNone) fail("the index holds a stale address (A1)");
      if (blocks.state(block_of(address)) != BlockState::kHistorical) fail("the index holds a block of another (A1)");
      if (node_of(address) != &node) fail("a cached block does not know its node (A1)");
    }
  });
  std::array<std::size_t, kMediaCount> in_limbo{};
  for (const Limbo& limbo : limbo_) {
    if (limbo.remaining == 0 || limbo.remaining > limbo.node->payload.pins || !limbo.node->payload.has_limbo) {
      fail("limbo that nobody holds (A2)");
    }
    for (const Address address : limbo.blocks) {
      const BlockStore& blocks = store_of(address);
      if (blocks.find(address) != AddressFault::kNone || blocks.tag(block_of(address)) != kLimboTag) {
        fail("a block in limbo was reused (A2)");
      }
      ++in_limbo[medium_bits_of(address) - 1];
    }
  }
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const std::size_t cached = index_->pages(static_cast<ValueClass>(medium));
    const std::size_t limbo = in_limbo[static_cast<std::size_t>(medium_index(medium))];
    if (store(medium).count(BlockState::kHistorical) != cached + limbo) {
      fail(std::string(medium_name(medium)) + ": " + std::to_string(store(medium).count(BlockState::kHistorical)) +
           " blocks are historical, and the index holds " + std::to_string(cached) + " and limbo " +
           std::to_string(limbo) + " (A2)");
    }
  }
  return stats_locked();
}

}  // namespace kvpool
