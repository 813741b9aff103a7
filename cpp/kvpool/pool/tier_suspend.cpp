// HBM that the engine takes back for a while: docs/adr/0056-suspended-memory-has-no-blocks.md.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {
namespace {

constexpr std::chrono::milliseconds kLookAgain{1};  // while blocks in use become free
constexpr int kRoundsUnasked = 64;                  // before the caller is asked whether it has given up
constexpr std::int64_t kRetryAfterUs = 10'000;

[[noreturn]] void throw_in_use(const HbmUse& use) {
  std::string what;
  const auto add = [&](std::uint32_t blocks, const char* name) {
    if (blocks > 0) what += (what.empty() ? "" : ", ") + std::to_string(blocks) + " " + name;
  };
  add(use.active, "active");
  add(use.reserved, "reserved");
  add(use.lent, "lent");
  add(use.quarantined, "quarantined");
  add(use.pinned, "pinned");
  add(use.read, "read by transfers, saves or sequences");
  throw Error(ErrorCode::kBusy, "HBM cannot be suspended: of its blocks " + what,
              {{"active", use.active},
               {"reserved", use.reserved},
               {"lent", use.lent},
               {"quarantined", use.quarantined},
               {"pinned", use.pinned},
               {"read", use.read},
               {"retry_after_us", kRetryAfterUs}});
}

}  // namespace

// HBM is closed from the first look on, so that what is in use only becomes less: except that a match may still pin
// what is cached there.
std::size_t TierMoves::suspend(bool keep, const Waiting& waiting, const CallerStream& after) {
  memory_.check_stream(after);
  {
    const SpaceLock lock = blocks_.lock();
    guard_.check();
    blocks_.close_hbm();
  }
  const MoveOrder order(after);
  std::size_t moved = 0;
  try {
    for (int round = 1;; ++round) {
      {
        std::unique_lock reclaim(reclaim_, std::defer_lock);
        SpaceLock lock = blocks_.unlocked();
        lock_to_reclaim(reclaim, lock, order);
        guard_.check();
        HbmUse use = blocks_.hbm_use(cache_.evictable(Medium::kHbm));
        bool again = false;  // what stayed because it was matched while it was copied
        if (!use.any() && keep) {
          moved += save_hbm(lock, order, again);
          guard_.check();  // the lock was let go of
          use = blocks_.hbm_use(cache_.evictable(Medium::kHbm));
        }
        const bool late = monotonic_ns() >= waiting.until_ns;
        if (!use.any() && (!again || late)) {
          // Not even a match can come between the last look and the end.
          while (cache_.evict(Medium::kHbm, kBatchBlocks) > 0) {
          }
          blocks_.suspend_hbm();
          cache_.audit_if_asked();
          return moved;
        }
        if (late) throw_in_use(use);
      }
      if (round % kRoundsUnasked == 0) waiting.check();
      std::this_thread::sleep_for(kLookAgain);
    }
  } catch (...) {
    const SpaceLock lock = blocks_.lock();
    if (!blocks_.hbm_suspended()) blocks_.open_hbm();
    throw;
  }
}

// Moves cached blocks to DRAM, as many as it has room for or can make: the coldest of both tiers are dropped. Returns
// how many moved; `again`: some stayed because they were matched meanwhile. Lets go of the lock while it copies.
// REQUIRES: reclaim_ is held.
std::size_t TierMoves::save_hbm(SpaceLock& lock, const MoveOrder& order, bool& again) {
  if (!memory_.two_tiers() || cache_.evictable(Medium::kHbm) == 0) return 0;
  if (order.of_device()) probe_device(lock);
  const BlockStore& dram = store(Medium::kDram);
  std::size_t moved = 0;
  while (const std::size_t left = cache_.evictable(Medium::kHbm)) {
    // The rest does not push out what has moved already.
    const std::size_t room = dram.free_count() + cache_.evictable(Medium::kDram);
    const std::size_t fits = room > moved ? room - moved : 0;
    if (left > fits) cache_.evict(Medium::kHbm, left - fits);
    const std::size_t batch = std::min({cache_.evictable(Medium::kHbm), fits, kBatchBlocks});
    if (batch == 0) break;
    make_dram_room(batch);
    const std::size_t gone = move_to_dram(lock, std::min<std::size_t>(batch, dram.free_count()), nullptr, order);
    moved += gone;
    again = gone == 0;
    if (again) break;
  }
  return moved;
}

}  // namespace kvpool
