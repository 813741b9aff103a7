// Moves of cached blocks between HBM and DRAM.
//
// Both directions work the same way: choose and protect blocks under the lock, copy without it, then, under the lock
// again, point the index at the copies. What was chosen may have been cut meanwhile, by a match or an insertion, but no
// block can have left: so each block's node is looked up again by its tag.
#include <algorithm>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

bool in_dram(Address address) noexcept { return medium_bits_of(address) == static_cast<std::uint32_t>(Medium::kDram); }

}  // namespace

// Blocks that the index gave up. An engine that allocates for itself is told.
void Pool::release_cached(const Address* addresses, std::size_t n) noexcept {
  release_blocks(addresses, n, /*tell_engine=*/true);
}

// Counts what hangs below and goes too, of whatever medium; returns what went of this class.
std::size_t Pool::evict_locked(ValueClass value_class, std::size_t n) noexcept {
  const std::uint64_t before = dropped_blocks_;
  const std::size_t evicted = index_->evict(value_class, n);
  counters_.evicted_blocks += dropped_blocks_ - before;
  return evicted;
}

void Pool::make_dram_room(std::size_t n) noexcept {
  const BlockStore& dram = store(Medium::kDram);
  if (dram.free_count() < n) evict_locked(ValueClass::kDram, n - dram.free_count());
}

// Makes at least n HBM blocks free: moves the coldest down, or drops them where DRAM has no room for them even after
// its own coldest blocks went. REQUIRES: reclaim_ is held. Throws kOutOfBlocks.
void Pool::make_room(Lock& lock, std::size_t n, const CallerStream& after) {
  const BlockStore& hbm = store(Medium::kHbm);
  const BlockStore& dram = store(Medium::kDram);
  while (hbm.free_count() < n) {
    if (!can_make_room(n, Medium::kHbm)) throw_out_of_blocks_locked(n, Medium::kHbm);
    make_dram_room(std::min<std::size_t>(n - hbm.free_count(), dram.capacity()));
    // What went from DRAM may have taken HBM blocks that hung below with it.
    if (hbm.free_count() >= n) return;
    const std::size_t missing = n - hbm.free_count();
    if (missing > dram.free_count()) evict_locked(ValueClass::kHbm, missing - dram.free_count());
    if (hbm.free_count() >= n) return;
    // What a transfer reads is dropped, but not free yet: DRAM may have less room than was made, or none.
    const std::size_t down = std::min<std::size_t>({n - hbm.free_count(), kBatchBlocks, dram.free_count()});
    if (down > 0) move_to_dram(lock, down, nullptr, after);
  }
}

// Moves up to n of the coldest HBM blocks to free DRAM blocks and returns how many went. A block that is matched while
// it is copied stays. Throws what copying throws, with nothing moved. REQUIRES: reclaim_ is held; n DRAM blocks are
// free. The lock is let go while bytes are copied.
std::size_t Pool::move_to_dram(Lock& lock, std::size_t n, std::vector<Address>* moved, const CallerStream& after) {
  std::vector<Address> from;
  std::vector<Address> to;
  std::vector<PromptNode*> held;
  n = std::min(n, index_->evictable(ValueClass::kHbm));
  from.reserve(n);
  to.resize(n);
  held.reserve(std::min(n, index_->node_count() + 1));
  if (moved != nullptr) moved->reserve(moved->size() + n);
  try {
    while (from.size() < n) {
      PromptNode* node = index_->hold_coldest(ValueClass::kHbm, n - from.size());
      if (node == nullptr) break;
      held.push_back(node);
      from.insert(from.end(), node->payload.values.get(), node->payload.values.get() + node->pages);
    }
  } catch (...) {
    for (PromptNode* node : held) index_->release_hold(node);
    throw;
  }
  BlockStore& dram = store(Medium::kDram);
  KVPOOL_CHECK(dram.take(static_cast<std::uint32_t>(from.size()), BlockState::kReserved, to.data()));

  lock.unlock();
  try {
    copy_tier(TierWay::kOut, from.data(), to.data(), from.size(), after);
  } catch (...) {
    lock.lock();
    release_blocks(to.data(), from.size());
    for (std::size_t i = 0; i < from.size();) {
      PromptNode* node = node_of(from[i]);
      i += node->pages;
      index_->release_hold(node);
    }
    throw;
  }
  lock.lock();

  std::size_t gone = 0;
  for (std::size_t i = 0; i < from.size();) {
    PromptNode* node = node_of(from[i]);
    const std::uint32_t pages = node->pages;
    if (node->payload.pins > 0) {
      release_blocks(&to[i], pages);
    } else {
      index_->redirect(node, &to[i]);
      placed(*node);
      release_cached(&from[i], pages);
      if (moved != nullptr) moved->insert(moved->end(), &to[i], &to[i] + pages);
      gone += pages;
    }
    index_->release_hold(node);
    i += pages;
  }
  counters_.swapped_out_blocks += gone;
  return gone;
}

std::vector<Address> Pool::swap_out(std::size_t n, const CallerStream& after) {
  guard();
  check_stream(after);
  const std::lock_guard reclaim(reclaim_);
  Lock lock(mutex_);
  guard();
  if (!two_tiers_) throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM or no DRAM blocks");
  // No more than DRAM has room for, or a later batch would push out what an earlier one brought.
  n = std::min({n, index_->evictable(ValueClass::kHbm),
                store(Medium::kDram).free_count() + index_->evictable(ValueClass::kDram)});
  std::vector<Address> moved;
  moved.reserve(n);
  // What has moved stays moved when memory runs out or a GPU refuses; only when nothing has does the caller hear of it.
  while (moved.size() < n) {
    const std::size_t before = moved.size();
    const std::size_t batch = std::min({n - before, kBatchBlocks, index_->evictable(ValueClass::kHbm)});
    try {
      make_dram_room(std::min<std::size_t>(batch, store(Medium::kDram).capacity()));
      move_to_dram(lock, std::min<std::size_t>(batch, store(Medium::kDram).free_count()), &moved, after);
    } catch (const std::exception&) {
      if (moved.empty()) throw;
      break;
    }
    if (moved.size() == before) break;
    lock.unlock();  // others get a turn
    lock.lock();
  }
  audit_if_asked();
  return moved;
}

// Checks the addresses, makes every run of them that lies in DRAM a node of its own, and pins all their nodes.
void Pool::gather_inbound(std::span<const Address> given, Inbound& inbound) {
  std::vector<Address>& addresses = inbound.addresses;
  addresses.assign(given.begin(), given.end());
  const std::uint32_t stamp = ++move_stamp_;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    check(addresses[i], i, BlockState::kHistorical);
    // In limbo: somebody swapped the page in after this caller had matched it. Its mark says where it lies now.
    if (store_of(addresses[i]).tag(block_of(addresses[i])) == kLimboTag) {
      addresses[i] = store(Medium::kHbm).address_of(store_of(addresses[i]).mark(block_of(addresses[i])));
    }
    BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    if (blocks.mark(block) == stamp) {
      throw Error(
          ErrorCode::kArgument,
          "address " + std::to_string(given[i]) + " (position " + std::to_string(i) + ") stands twice in the list",
          {{"address", static_cast<std::int64_t>(given[i])}, {"position", static_cast<std::int64_t>(i)}});
    }
    blocks.set_mark(block, stamp);
  }
  inbound.pins.reserve(addresses.size());
  inbound.from.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size();) {
    PromptNode* node = node_of(addresses[i]);
    const Address* values = node->payload.values.get();
    const auto at = static_cast<std::uint32_t>(std::find(values, values + node->pages, addresses[i]) - values);
    std::uint32_t run = 1;  // addresses [i, i + run) are the node's pages [at, at + run)
    while (i + run < addresses.size() && at + run < node->pages && addresses[i + run] == values[at + run]) ++run;
    if (in_dram(addresses[i])) {
      inbound.from.insert(inbound.from.end(), addresses.begin() + static_cast<std::ptrdiff_t>(i),
                          addresses.begin() + static_cast<std::ptrdiff_t>(i + run));
    }
    inbound.pins.push_back(index_->pin(index_->isolate(node, at, run)));
    i += run;
  }
}

// Blocks to swap into: the caller's, or taken here, making room. They are reserved until the copy is committed.
void Pool::reserve_inbound(Lock& lock, std::span<const Address> into, Inbound& inbound, const CallerStream& after) {
  const std::size_t moving = inbound.from.size();
  if (into.empty()) {
    if (moving == 0) return;
    if (engine_allocates_) {
      throw Error(ErrorCode::kState, "the engine allocates this pool's HBM: name the blocks to swap into");
    }
    if (!two_tiers_) throw Error(ErrorCode::kState, "swap needs both tiers: this pool has no HBM blocks");
    std::vector<Address> to(moving);
    while (!take(moving, Medium::kHbm, BlockState::kReserved, to.data())) make_room(lock, moving, after);
    inbound.to = std::move(to);
    return;
  }
  if (into.size() != moving) {
    throw Error(ErrorCode::kArgument,
                std::to_string(moving) + " blocks to swap in, and " + std::to_string(into.size()) + " to swap into",
                {{"needed", static_cast<std::int64_t>(moving)}, {"given", static_cast<std::int64_t>(into.size())}});
  }
  check_active_and_distinct(into.data(), into.size(), /*skip_cached=*/false);
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (medium_bits_of(into[i]) == static_cast<std::uint32_t>(Medium::kHbm)) continue;
    throw Error(ErrorCode::kArgument, "swap_in goes to HBM blocks, and position " + std::to_string(i) + " is in DRAM",
                {{"position", static_cast<std::int64_t>(i)}});
  }
  inbound.to.assign(into.begin(), into.end());
  for (const Address address : into) store_of(address).set_state(block_of(address), BlockState::kReserved);
  give_tags(into.data(), into.size(), 0, 0);  // nobody's: what the check above left there could be some peer's epoch
}

std::vector<IndexPin> Pool::swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                    const CallerStream& after) {
  guard();
  check_stream(after);
  const std::lock_guard reclaim(reclaim_);
  Lock lock(mutex_);
  guard();
  Inbound inbound;
  std::vector<IndexPin> pins;
  try {
    pins.reserve(addresses.size());
    gather_inbound(addresses, inbound);
    reserve_inbound(lock, into, inbound, after);
    if (!inbound.from.empty()) {
      lock.unlock();
      copy_tier(TierWay::kIn, inbound.from.data(), inbound.to.data(), inbound.from.size(), after);
      lock.lock();
    }
    commit_inbound(inbound);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();  // the copy failed
    for (const IndexPin& pin : inbound.pins) index_->unpin(pin);
    if (into.empty()) {
      release_blocks(inbound.to.data(), inbound.to.size());
    } else {
      for (const Address address : inbound.to) store_of(address).set_state(block_of(address), BlockState::kActive);
    }
    throw;
  }
  const std::vector<Address>& current = inbound.addresses;
  const Address* arrived = inbound.to.data();
  for (std::size_t i = 0; i < current.size(); ++i) out[i] = in_dram(current[i]) ? *arrived++ : current[i];
  for (std::size_t i = 0; i < current.size(); ++i) {
    PromptNode* node = node_of(out[i]);
    const PromptNode* next = i + 1 < current.size() ? node_of(out[i + 1]) : nullptr;
    const bool covered = next != nullptr && (next == node || next->parent == node);
    if (!covered) pins.push_back(index_->pin(node));
  }
  counters_.swapped_in_blocks += inbound.from.size();
  audit_if_asked();
  return pins;
}

// Points the index at the copies. Blocks that others may still read by their old address stay, in limbo, until the last
// pin of that time goes. Throws std::bad_alloc with nothing moved.
void Pool::commit_inbound(Inbound& inbound) {
  const std::vector<Address>& from = inbound.from;
  // This call's own pins go first, so that what pins are left are others'.
  for (const IndexPin& pin : inbound.pins) index_->unpin(pin);
  inbound.pins.clear();

  std::vector<Limbo> limbo;
  for (std::size_t i = 0; i < from.size(); i += node_of(from[i])->pages) {
    PromptNode* node = node_of(from[i]);
    if (node->payload.pins > 0) limbo.push_back({node, 0, node->payload.pins, {&from[i], &from[i] + node->pages}});
  }
  limbo_.reserve(limbo_.size() + limbo.size());

  // From here on nothing throws.
  auto next_limbo = limbo.begin();
  for (std::size_t i = 0; i < from.size();) {
    PromptNode* node = node_of(from[i]);
    const std::uint32_t pages = node->pages;
    index_->redirect(node, &inbound.to[i]);
    placed(*node);
    if (node->payload.pins > 0) {
      node->payload.has_limbo = true;
      next_limbo->stamp = index_->tick();
      for (std::uint32_t k = 0; k < pages; ++k) {
        BlockStore& dram = store(Medium::kDram);
        dram.set_tag(block_of(from[i + k]), kLimboTag);
        dram.set_mark(block_of(from[i + k]), block_of(inbound.to[i + k]));
      }
      limbo_.push_back(std::move(*next_limbo++));
    } else {
      release_blocks(&from[i], pages);
    }
    i += pages;
  }
}

void Pool::unpinned(PromptNode& node, std::uint64_t stamp) noexcept {
  bool more = false;
  for (std::size_t i = 0; i < limbo_.size();) {
    Limbo& limbo = limbo_[i];
    if (limbo.node == &node && stamp < limbo.stamp && --limbo.remaining == 0) {
      release_blocks(limbo.blocks.data(), limbo.blocks.size());
      if (i + 1 < limbo_.size()) limbo = std::move(limbo_.back());
      limbo_.pop_back();
      continue;
    }
    more = more || limbo.node == &node;
    ++i;
  }
  node.payload.has_limbo = more;
}

}  // namespace kvpool
