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

void Pool::check_kept(MediumChoice medium) {
  if (medium != Medium::kDisk) return;
  throw Error(ErrorCode::kUnsupported, "no pool keeps blocks on DISK yet: ask for HBM, DRAM or MIXED");
}

void Pool::guard_alloc(MediumChoice medium) const {
  guard();
  check_kept(medium);
  if (space_.engine_allocates() && medium == Medium::kHbm) {
    throw Error(ErrorCode::kState, "the engine allocates this pool's HBM: tell the pool with adopt()");
  }
}

bool Pool::try_alloc(std::size_t n, MediumChoice medium, Address* out) {
  guard_alloc(medium);
  Lock lock(mutex_);
  guard();
  if (!space_.take(n, medium, BlockState::kActive, out)) return false;
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
    space_.release(addresses, n);
    counters_.freed_blocks += n;
    throw;
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (arenas[medium_of(addresses[i])]->on_device()) continue;
    for (const Segment& segment : arenas[medium_of(addresses[i])]->segments()) {
      std::memset(segment.base + block_of(addresses[i]) * segment.stride, 0, segment.bytes);
    }
  }
}

void Pool::alloc_evicting(std::size_t n, MediumChoice medium, Address* out, const CallerStream& after) {
  guard_alloc(medium);
  check_stream(after);
  const std::lock_guard reclaim(reclaim_);
  Lock lock(mutex_);
  guard();
  take_evicting(lock, n, medium, BlockState::kActive, out, after);
  hand_over(lock, out, n);
}

// REQUIRES: reclaim_ is held. Throws kOutOfBlocks.
void Pool::take_evicting(Lock& lock, std::size_t n, MediumChoice medium, BlockState to, Address* out,
                         const MoveOrder& order) {
  bool waited = false;
  while (!space_.take(n, medium, to, out)) {
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
      const std::size_t in_hbm = space_.engine_allocates() ? 0 : store(Medium::kHbm).free_count();
      const std::size_t in_dram =
          std::min<std::size_t>(n - in_hbm, store(Medium::kDram).free_count() + index_->evictable(ValueClass::kDram));
      make_dram_room(in_dram);
      const std::size_t have = store(Medium::kDram).free_count() + store(Medium::kHbm).free_count();
      if (have < n && !space_.engine_allocates()) evict_locked(ValueClass::kHbm, n - have);
    }
  }
}

bool Pool::can_make_room(std::size_t n, MediumChoice medium) noexcept {
  std::size_t possible = 0;
  for (const Medium tier : kMedia) {
    if (space_.gives(medium, tier)) possible += store(tier).free_count() + index_->evictable(value_class_of(tier));
  }
  return n <= possible;
}

void Pool::throw_out_of_blocks(std::size_t n, MediumChoice medium) {
  guard_alloc(medium);
  const std::lock_guard lock(mutex_);
  throw_out_of_blocks_locked(n, medium);
}

void Pool::throw_out_of_blocks_locked(std::size_t n, MediumChoice medium) {
  std::string text = std::to_string(n) + " blocks of " + medium.name() + " asked for";
  std::int64_t free = 0;
  std::int64_t active = 0;
  std::int64_t evictable = 0;
  std::int64_t historical = 0;
  for (const Medium tier : kMedia) {
    if (!space_.gives(medium, tier)) continue;
    free += store(tier).free_count();
    active += store(tier).count(BlockState::kActive);
    historical += store(tier).count(BlockState::kHistorical);
    evictable += static_cast<std::int64_t>(index_->evictable(value_class_of(tier)));
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

std::vector<Address> Pool::check_free(const Address* addresses, std::size_t n) {
  guard();
  std::vector<Address> own;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    if (!space_.is_local(addresses[i])) continue;
    space_.check(addresses[i], i, BlockState::kActive);
    own.push_back(addresses[i]);
  }
  space_.check_distinct(addresses, n, space_.new_stamp());  // of the whole list, so that errors name positions in it
  if (space_.engine_allocates()) space_.check_unread(addresses, n);
  return own;
}

void Pool::free(const Address* addresses, std::size_t n) {
  guard();
  const std::lock_guard lock(mutex_);
  space_.check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  if (space_.engine_allocates()) space_.check_unread(addresses, n);
  space_.release(addresses, n);
  counters_.freed_blocks += n;
  audit_if_asked();
}

void Pool::adopt(const std::uint32_t* blocks, std::size_t n, Address* out) {
  guard();
  if (!space_.engine_allocates()) {
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
    space_.release(out, i);
    throw error;
  }
  counters_.allocated_blocks += n;
  audit_if_asked();
}

}  // namespace kvpool
