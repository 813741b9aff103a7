// Blocks are taken and given back, and every address that a caller names is checked.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

bool Pool::take(std::size_t n, Medium medium, BlockState to, Address* out) noexcept {
  if (medium != Medium::kMixed) {
    if (n > store(medium).free_count()) return false;
    return store(medium).take(static_cast<std::uint32_t>(n), to, out);
  }
  const std::size_t in_hbm = engine_allocates_ ? 0 : std::min<std::size_t>(n, store(Medium::kHbm).free_count());
  if (n - in_hbm > store(Medium::kDram).free_count()) return false;
  return store(Medium::kHbm).take(static_cast<std::uint32_t>(in_hbm), to, out) &&
         store(Medium::kDram).take(static_cast<std::uint32_t>(n - in_hbm), to, out + in_hbm);
}

void Pool::guard_alloc(Medium medium) const {
  guard();
  if (engine_allocates_ && medium == Medium::kHbm) {
    throw Error(ErrorCode::kState, "the engine allocates this pool's HBM: tell the pool with adopt()");
  }
}

bool Pool::try_alloc(std::size_t n, Medium medium, Address* out) {
  guard_alloc(medium);
  Lock lock(mutex_);
  guard();
  if (!take(n, medium, BlockState::kActive, out)) return false;
  hand_over(lock, out, n);
  return true;
}

// Blocks that were just taken go to the caller. Lets go of the lock: nobody else knows of the blocks while they are
// filled with zeros.
void Pool::hand_over(Lock& lock, const Address* addresses, std::size_t n) {
  counters_.allocated_blocks += n;
  audit_if_asked();
  zero_if_asked(lock, addresses, n);
}

// Lets go of the lock. Throws only where the memory is a GPU's: then the blocks are free again.
void Pool::zero_if_asked(Lock& lock, const Address* addresses, std::size_t n) {
  if (!zero_on_alloc_) return;
  const auto arenas = arenas_;  // kept, should the pool be closed now
  const auto mover = device_mover_;
  lock.unlock();
  std::vector<Address> on_device;
  try {
    for (std::size_t i = 0; mover != nullptr && i < n; ++i) {
      if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(Medium::kHbm)) on_device.push_back(addresses[i]);
    }
    if (!on_device.empty()) mover->zero(on_device.data(), on_device.size());
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->code() == ErrorCode::kDeviceLost) fail(*known);
    lock.lock();
    release_blocks(addresses, n);
    counters_.freed_blocks += n;
    throw;
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (arenas[medium_bits_of(addresses[i]) - 1]->on_device()) continue;
    for (const Segment& segment : arenas[medium_bits_of(addresses[i]) - 1]->segments()) {
      std::memset(segment.base + block_of(addresses[i]) * segment.stride, 0, segment.bytes);
    }
  }
}

void Pool::alloc_evicting(std::size_t n, Medium medium, Address* out, const CallerStream& after) {
  guard();
  check_stream(after);
  const std::lock_guard reclaim(reclaim_);
  Lock lock(mutex_);
  guard();
  take_evicting(lock, n, medium, BlockState::kActive, out, after);
  hand_over(lock, out, n);
}

// REQUIRES: reclaim_ is held. Throws kOutOfBlocks.
void Pool::take_evicting(Lock& lock, std::size_t n, Medium medium, BlockState to, Address* out,
                         const MoveOrder& order) {
  bool waited = false;
  while (!take(n, medium, to, out)) {
    if (!can_make_room(n, medium)) {
      // What a swap in copies leaves DRAM soon. No more than one of them: others may follow without end, and whoever
      // else makes room waits for this.
      if (waited || swaps_in_begun_ == swaps_in_over_ || medium == Medium::kHbm) throw_out_of_blocks_locked(n, medium);
      swap_in_ended_.wait(lock, [this, over = swaps_in_over_] { return swaps_in_over_ != over; });
      waited = true;
      guard();  // the copy may have ended because the device was lost
      continue;
    }
    if (medium == Medium::kHbm) {
      make_room(lock, n, order);
    } else if (medium == Medium::kDram) {
      make_dram_room(n);
    } else {
      // MIXED has taken what is free of both: the coldest DRAM blocks go, then the coldest HBM blocks.
      const std::size_t in_hbm = engine_allocates_ ? 0 : store(Medium::kHbm).free_count();
      const std::size_t in_dram =
          std::min<std::size_t>(n - in_hbm, store(Medium::kDram).free_count() + index_->evictable(ValueClass::kDram));
      make_dram_room(in_dram);
      const std::size_t have = store(Medium::kDram).free_count() + store(Medium::kHbm).free_count();
      if (have < n && !engine_allocates_) evict_locked(ValueClass::kHbm, n - have);
    }
  }
}

bool Pool::can_make_room(std::size_t n, Medium medium) noexcept {
  std::size_t possible = 0;
  if (medium != Medium::kDram && !engine_allocates_) {
    possible += store(Medium::kHbm).free_count() + index_->evictable(ValueClass::kHbm);
  }
  if (medium != Medium::kHbm) possible += store(Medium::kDram).free_count() + index_->evictable(ValueClass::kDram);
  return n <= possible;
}

void Pool::throw_out_of_blocks(std::size_t n, Medium medium) {
  guard_alloc(medium);
  const std::lock_guard lock(mutex_);
  throw_out_of_blocks_locked(n, medium);
}

void Pool::throw_out_of_blocks_locked(std::size_t n, Medium medium) {
  std::string text = std::to_string(n) + " blocks of " + medium_name(medium) + " asked for";
  std::int64_t free = 0;
  std::int64_t active = 0;
  std::int64_t evictable = 0;
  std::int64_t historical = 0;
  for (const Medium tier : {Medium::kHbm, Medium::kDram}) {
    if (medium != tier && (medium != Medium::kMixed || (engine_allocates_ && tier == Medium::kHbm))) continue;
    free += store(tier).free_count();
    active += store(tier).count(BlockState::kActive);
    historical += store(tier).count(BlockState::kHistorical);
    evictable += static_cast<std::int64_t>(index_->evictable(static_cast<ValueClass>(tier)));
  }
  const auto total = static_cast<std::int64_t>(capacity(medium));
  text += ": of " + std::to_string(total) + ", " + std::to_string(free) + " are free, " + std::to_string(active) +
          " active, " + std::to_string(historical) + " cached (" + std::to_string(evictable) + " evictable, " +
          std::to_string(historical - evictable) + " pinned)";
  throw Error(ErrorCode::kOutOfBlocks, text,
              {{"requested", static_cast<std::int64_t>(n)},
               {"capacity", total},
               {"free", free},
               {"active", active},
               {"evictable", evictable},
               {"pinned", historical - evictable}});
}

void Pool::check(Address address, std::size_t position, std::optional<BlockState> wanted) {
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, "address " + std::to_string(address) + " (position " + std::to_string(position) + "): " + what,
                {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
  };
  const std::uint32_t bits = medium_bits_of(address);
  if (bits != static_cast<std::uint32_t>(Medium::kHbm) && bits != static_cast<std::uint32_t>(Medium::kDram)) {
    fail(ErrorCode::kArgument, "names no medium; it is no address of a pool");
  }
  if (!is_local(address)) {
    throw Error(ErrorCode::kNotOwner,
                "address " + std::to_string(address) + " (position " + std::to_string(position) +
                    ") belongs to instance " + std::to_string(instance_of(address)),
                {{"address", static_cast<std::int64_t>(address)},
                 {"position", static_cast<std::int64_t>(position)},
                 {"instance", instance_of(address)}});
  }
  const BlockStore& blocks = store_of(address);
  const std::uint32_t block = block_of(address);
  switch (blocks.find(address)) {
    case AddressFault::kNone:
      break;
    case AddressFault::kOutOfRange:
      fail(ErrorCode::kArgument, std::string(medium_name(blocks.medium())) + " has " +
                                     std::to_string(blocks.capacity()) + " blocks, and this is block " +
                                     std::to_string(block));
      break;
    default:
      fail(ErrorCode::kStaleAddress, std::string(medium_name(blocks.medium())) + " block " + std::to_string(block) +
                                         " is at generation " + std::to_string(blocks.generation(block)) +
                                         ", the address at " + std::to_string(generation_of(address)) +
                                         ": the block was freed or moved, or the address is another pool's");
  }
  const BlockState state = blocks.state(block);
  if (state == BlockState::kFree) fail(ErrorCode::kStaleAddress, "the block is not allocated");
  if (wanted && state != *wanted) {
    std::string what = std::string("the block is ") + block_state_name(state) + ", not " + block_state_name(*wanted);
    if (state == BlockState::kHistorical) what += " (it belongs to the index: see delete and evict)";
    fail(ErrorCode::kState, what);
  }
}

// With skip_cached, historical blocks and those of other instances are left to the caller, who is told of them.
bool Pool::check_active_and_distinct(const Address* addresses, std::size_t n, bool skip_cached) {
  bool skipped = false;
  bool ascending = true;
  Address before = 0;
  // Without the instance: one block has two addresses when one of them is older than the pool's id.
  constexpr Address kPlaceMask =
      (Address{1} << kInstanceShift) - 1 - (static_cast<Address>(kGenerationMax) << kGenerationShift);
  for (std::size_t i = 0; i < n; ++i) {
    const Address address = addresses[i];
    const std::uint32_t bits = medium_bits_of(address);
    const bool plain = bits == 1 || bits == 2;
    const bool fine = plain && store_of(address).find(address) == AddressFault::kNone &&
                      store_of(address).state(block_of(address)) == BlockState::kActive;
    if (!fine) [[unlikely]] {
      if (!skip_cached || !plain ||
          (is_local(address) && (store_of(address).find(address) != AddressFault::kNone ||
                                 store_of(address).state(block_of(address)) != BlockState::kHistorical))) {
        check(address, i, BlockState::kActive);
      }
      skipped = true;
      continue;
    }
    const Address place = address & kPlaceMask;
    ascending = ascending && place > before;
    before = place;
  }
  if (!ascending) check_distinct(addresses, n, ++check_stamp_);  // strictly ascending: none stands twice
  return skipped;
}

// REQUIRES: checked otherwise. Lists that are checked with one stamp may not share a block either.
void Pool::check_distinct(const Address* addresses, std::size_t n, std::uint64_t stamp) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_local(addresses[i]) || store_of(addresses[i]).state(block_of(addresses[i])) != BlockState::kActive)
      continue;
    BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    if (blocks.tag(block) == stamp) {
      throw Error(
          ErrorCode::kArgument,
          "address " + std::to_string(addresses[i]) + " stands twice in the list (position " + std::to_string(i) + ")",
          {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    }
    blocks.set_tag(block, stamp);
  }
}

// Frees blocks run by run. REQUIRES: checked; no address twice.
void Pool::release_blocks(const Address* addresses, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n;) {
    const std::uint32_t first = block_of(addresses[i]);
    const std::uint32_t bits = medium_bits_of(addresses[i]);
    std::uint32_t run = 1;
    while (i + run < n && block_of(addresses[i + run]) == first + run && medium_bits_of(addresses[i + run]) == bits) {
      ++run;
    }
    release_unread(static_cast<Medium>(bits), first, run);
    i += run;
  }
}

// Frees blocks [first, first + n); those that a transfer reads, when it has read them.
void Pool::release_unread(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  BlockStore& blocks = store(medium);
  const auto& readers = readers_[static_cast<std::size_t>(medium_index(medium))];
  const std::uint32_t end = first + n;
  std::uint32_t unread = first;  // [unread, block) can go
  const auto release_until = [&](std::uint32_t block) {
    if (block > unread) blocks.release(unread, block - unread);
    unread = block + 1;
  };
  for (std::uint32_t block = first; !readers.empty() && block < end; ++block) {
    if (readers[block] == 0) continue;
    blocks.set_state(block, BlockState::kReserved);
    blocks.set_tag(block, kUnreadTag);
    release_until(block);
  }
  release_until(end);
}

std::vector<Address> Pool::check_free(const Address* addresses, std::size_t n) {
  guard();
  std::vector<Address> own;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_local(addresses[i])) continue;
    check(addresses[i], i, BlockState::kActive);
    own.push_back(addresses[i]);
  }
  check_distinct(addresses, n, ++check_stamp_);  // of the whole list, so that errors name positions in it
  if (engine_allocates_) check_unread(addresses, n);
  return own;
}

void Pool::free(const Address* addresses, std::size_t n) {
  guard();
  const std::lock_guard lock(mutex_);
  check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  if (engine_allocates_) check_unread(addresses, n);
  release_blocks(addresses, n);
  counters_.freed_blocks += n;
  audit_if_asked();
}

void Pool::adopt(const std::uint32_t* blocks, std::size_t n, Address* out) {
  guard();
  if (!engine_allocates_) {
    throw Error(ErrorCode::kState, "adopt() is for adopted memory whose engine allocates; use alloc()");
  }
  const std::lock_guard lock(mutex_);
  BlockStore& hbm = store(Medium::kHbm);
  for (std::size_t i = 0; i < n; ++i) {
    if (hbm.take_block(blocks[i], BlockState::kActive, out + i)) continue;
    const std::string what = blocks[i] >= hbm.capacity()
                                 ? "there are " + std::to_string(hbm.capacity()) + " blocks"
                                 : std::string("it is ") + block_state_name(hbm.state(blocks[i])) + ", not free";
    const Error error(blocks[i] >= hbm.capacity() ? ErrorCode::kArgument : ErrorCode::kState,
                      "block " + std::to_string(blocks[i]) + " (position " + std::to_string(i) + "): " + what,
                      {{"block", blocks[i]}, {"position", static_cast<std::int64_t>(i)}});
    release_blocks(out, i);
    throw error;
  }
  counters_.allocated_blocks += n;
  audit_if_asked();
}

}  // namespace kvpool
