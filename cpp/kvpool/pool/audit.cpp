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
  for (const Medium medium : kMedia) {
    const BlockStore& blocks = store(medium);
    const auto value_class = value_class_of(medium);
    MediumCounts& counts = stats.media[medium];
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
  if (arenas_[Medium::kHbm] != nullptr && arenas_[Medium::kHbm]->on_device())
    stats.device_bytes = arenas_[Medium::kHbm]->mapped_bytes();
  if (device_mover_ != nullptr) stats.device_bytes += device_mover_->device_bytes();
  stats.counters = counters_;
  stats.index_nodes = index_->node_count();
  stats.index_bytes = index_->bytes();
  stats.namespaces = index_->namespace_count();
  return stats;
}

// Checks, beyond what each floor checks of itself, that the index and the stores tell the same story:
//   A1  every local address in the index names a historical block whose tag is that node;
//   A2  every other historical block is in limbo, with the limbo tag, and its node still has the pins that hold it.
PoolStats Pool::audit_locked() {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "pool: " + what); };
  space_.audit();
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
  MediumMap<std::size_t> in_limbo{};
  for (const Limbo& limbo : limbo_) {
    if (limbo.remaining == 0 || limbo.remaining > limbo.node->payload.pins || !limbo.node->payload.has_limbo) {
      fail("limbo that nobody holds (A2)");
    }
    for (const Address address : limbo.blocks) {
      const BlockStore& blocks = store_of(address);
      if (blocks.find(address) != AddressFault::kNone || blocks.tag(block_of(address)) != BlockSpace::kCacheTag) {
        fail("a block in limbo was reused (A2)");
      }
      ++in_limbo[medium_of(address)];
    }
  }
  for (const Medium medium : kMedia) {
    const std::size_t cached = index_->pages(value_class_of(medium));
    const std::size_t limbo = in_limbo[medium];
    if (store(medium).count(BlockState::kHistorical) != cached + limbo) {
      fail(std::string(medium_name(medium)) + ": " + std::to_string(store(medium).count(BlockState::kHistorical)) +
           " blocks are historical, and the index holds " + std::to_string(cached) + " and limbo " +
           std::to_string(limbo) + " (A2)");
    }
  }
  return stats_locked();
}

}  // namespace kvpool
