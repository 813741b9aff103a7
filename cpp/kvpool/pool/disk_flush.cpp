// What callers wait for: flush(), and the erases of what was dropped.
#include <algorithm>
#include <chrono>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/exec/completion.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

// --- waiting ---

// Throws kClosed from the moment that close() begins.
void DiskTier::check_not_stopping() const {
  if (stopping_.load()) throw Error(ErrorCode::kClosed, "the pool was closed");
}

void DiskTier::check_waiting(const Waiting& waiting) const {
  guard_.check();
  check_not_stopping();
  waiting.check();
  if (monotonic_ns() < waiting.until_ns) return;
  throw Error(ErrorCode::kDeadline, "not all blocks were written to disk in time: what was written stays");
}

std::unique_lock<std::mutex> DiskTier::lock_to_write(const Waiting& waiting) {
  std::unique_lock alone(write_mutex_, std::defer_lock);
  while (!alone.try_lock()) {
    check_waiting(waiting);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return alone;
}

// For the writer. After close() has begun it waits this long at most, and may come back without the lock: a caller of
// flush() lets go within kLookNs, unless it is the one that closes, in a handler of a signal.
std::unique_lock<std::mutex> DiskTier::lock_until_stop(std::int64_t grace_ns) {
  std::unique_lock alone(write_mutex_, std::defer_lock);
  std::int64_t until = 0;
  while (!alone.try_lock()) {
    const std::int64_t now = monotonic_ns();
    if (until == 0 && stopping_.load()) until = now + grace_ns;
    if (until != 0 && now >= until) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return alone;
}

// Returns when the batch has ended; throws as check_waiting() before, and the batch goes on.
void DiskTier::await(DiskBatch& batch, const Waiting* waiting) {
  Completion& ended = batch.completion();
  while (!ended.done()) {
    std::int64_t until = monotonic_ns() + kLookNs;
    if (waiting != nullptr) {
      check_waiting(*waiting);
      until = std::min(until, waiting->until_ns);
    }
    ended.sleep_until(until);
  }
}

// --- erasing ---

// Returns when these, and those that were given before, are durable. What the store does not take is to be erased
// later. REQUIRES: write_mutex_ is held, so that no slot of these is written before.
void DiskTier::erase(std::vector<DiskErase> erased, const Waiting* waiting) {
  if (off_.load()) return;
  const std::shared_ptr<DiskStore> store = this->store();
  try {
    if (!erased.empty()) give_erases(*store, erased);
  } catch (...) {
    const SpaceLock lock = blocks_.lock();
    copies_.put_back(erased);
    throw;
  }
  if (erasing_ == nullptr) return;
  await(*erasing_, waiting);  // the journal keeps their order: with the last ones, all others have ended
  erasing_ = nullptr;
  if (!store->state().on) switch_off();
}

// Leaves in `erased`, if it throws, what the store has not taken.
void DiskTier::give_erases(DiskStore& store, std::vector<DiskErase>& erased) {
  try {
    erasing_ = store.erase(erased, kNoTimeNs);
    erased.clear();
    return;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kState) throw;
  }
  // One of them is not there: it must not keep the others.
  while (!erased.empty()) {
    try {
      erasing_ = store.erase({erased.back()}, kNoTimeNs);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kState) throw;
    }
    erased.pop_back();
  }
}

// --- flush ---

std::size_t DiskTier::flush(bool everything, const Waiting& waiting) {
  guard_.check();
  if (off_.load()) throw_off();
  std::deque<Address> lasts;
  {
    const SpaceLock lock = blocks_.lock();
    if (!cache_.has_disk()) throw_off();
    if (everything) {
      const std::vector<Address> ends = cache_.ends_without_copies();
      lasts.assign(ends.begin(), ends.end());
    } else {
      while (const Address last = copies_.next_wanted()) lasts.push_back(last);
    }
  }
  std::size_t written = 0;
  try {
    written = write_all(lasts, everything, waiting);
  } catch (...) {
    if (!everything) give_back(lasts);  // the others still wait as they did before
    throw;
  }
  if (off_.load()) throw_off();
  // Also what the writer has taken before this was called.
  const auto alone = lock_to_write(waiting);
  erase(next_erased(), &waiting);
  return written;
}

// Writes what the prompts that end with these pages lack on disk, and returns how many pages have copies now. Waits for
// the budget without write_mutex_, so that the writer can erase meanwhile.
std::size_t DiskTier::write_all(std::deque<Address>& lasts, bool everything, const Waiting& waiting) {
  std::size_t kept = 0;
  while (!lasts.empty() && !off_.load()) {
    check_waiting(waiting);
    auto alone = lock_to_write(waiting);
    const std::int64_t now = monotonic_ns();
    const std::int64_t wait = budget_.wait_ns(now);
    if (wait == 0) {
      kept += write_batch(lasts, everything, &waiting);
      continue;
    }
    alone.unlock();
    const std::int64_t left = std::max<std::int64_t>(waiting.until_ns - now, 0);
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min({wait, kLookNs, left})));
  }
  return kept;
}

// Prompts that wait for the writer again.
void DiskTier::give_back(const std::deque<Address>& lasts) {
  if (lasts.empty()) return;
  const SpaceLock lock = blocks_.lock();
  for (const Address last : lasts) copies_.want(last);
}

}  // namespace kvpool
