#include "kvpool/pool/pool_allocator.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 100'000;  // loans last long

}  // namespace

void PoolAllocator::check_kept(MediumChoice medium) {
  if (medium != Medium::kDisk) return;
  throw Error(ErrorCode::kUnsupported, "nobody can use blocks on DISK directly: ask for HBM, DRAM or MIXED");
}

void PoolAllocator::check(MediumChoice medium) const {
  guard_.check();
  check_kept(medium);
  if (blocks_.engine_allocates() && medium == Medium::kHbm) {
    throw Error(ErrorCode::kState, "the engine allocates this pool's HBM: tell the pool with adopt()");
  }
}

bool PoolAllocator::try_take(std::size_t n, MediumChoice medium, const BlockOwner& owner, Address* out) {
  check(medium);
  SpaceLock lock = blocks_.lock();
  guard_.check();
  blocks_.check_open(medium);
  check_lent(owner, 0, n);
  if (!blocks_.take_within(n, medium, owner.state, out)) return false;
  hand_over(lock, owner, out, n);
  return true;
}

void PoolAllocator::take_evicting(std::size_t n, MediumChoice medium, const BlockOwner& owner, Address* out,
                                  const CallerStream& after) {
  check(medium);
  memory_.check_stream(after);
  auto reclaim = moves_.reclaiming();
  SpaceLock lock = blocks_.lock();
  guard_.check();
  check_lent(owner, 0, n);
  moves_.take_evicting(reclaim, lock, n, medium, owner.state, out, after);
  try {
    check_lent(owner, n, n);  // others may have been lent while the lock was let go of
  } catch (...) {
    blocks_.release(out, n);
    throw;
  }
  hand_over(lock, owner, out, n);
}

// Whether `more` blocks may be lent in addition to those that are; of them `taken` are in that state already. What an
// engine lends of the blocks that it allocates does not count: no peer takes it.
// REQUIRES: the lock is held.
void PoolAllocator::check_lent(const BlockOwner& owner, std::size_t taken, std::size_t more) const {
  const std::int64_t most = lend_max();
  if (owner.state != BlockState::kLent || most < 0) return;
  std::int64_t lent = -static_cast<std::int64_t>(taken);
  for (const Medium medium : kMedia) {
    if (blocks_.engine_allocates() && medium == Medium::kHbm) continue;
    lent += blocks_.store(medium).count(BlockState::kLent);
  }
  const auto wanted = static_cast<std::int64_t>(more);
  if (lent + wanted <= most) return;
  throw Error(ErrorCode::kBusy,
              "this pool lends " + std::to_string(most) + " blocks at most, and " + std::to_string(lent) + " are lent",
              {{"requested", wanted},
               {"limit", most},
               {"free", std::max<std::int64_t>(0, most - lent)},
               {"retry_after_us", kRetryAfterUs}});
}

// Lets go of the lock: nobody else knows of the blocks while they are filled with zeros, which a borrower could read
// otherwise. Throws only where the memory is a GPU's: then the blocks are free again.
void PoolAllocator::hand_over(SpaceLock& lock, const BlockOwner& owner, const Address* addresses, std::size_t n) {
  const bool to_application = owner.state == BlockState::kActive;
  if (to_application) {
    cache_.counters().allocated_blocks += n;
  } else {
    blocks_.give({addresses, n}, owner);
  }
  cache_.audit_if_asked();
  if (!zeroes_) return;
  const PoolMemory::Kept kept = memory_.keep();
  lock.unlock();
  try {
    memory_.zero(kept, addresses, n);
  } catch (...) {
    lock.lock();
    blocks_.release(addresses, n);
    if (to_application) cache_.counters().freed_blocks += n;
    throw;
  }
}

}  // namespace kvpool
