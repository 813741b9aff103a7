// Moves cached blocks between the tiers, and makes room by moves and evictions. This takes longer than a step of the
// cache, because it copies bytes and waits for a GPU.
//
// Both directions work the same way: choose and protect blocks under the space's lock, copy without it, then, under the
// lock again, point the index at the copies.
//
// Locks, in the order in which they are taken
//   swap_in_mutex_  serialises swaps in. Their pages are pinned from the first step until the caller gets the pins, so
//                   nothing evicts, deletes or moves them meanwhile; others may match, cut or read them, like any
//                   pinned pages. A swap in takes reclaim_ only to make room, so both directions can copy at once.
//   reclaim_        serialises swaps out, eviction, deletion and making room. Held while bytes are copied to DRAM, so
//                   callers release the GIL first. So only matches, insertions, frees and swaps in can meet a node that
//                   is held for copying.
//   the space's     guards the space and the cache; held for microseconds. Swaps and evictions work in batches of
//                   kBatchBlocks.
//
// Errors: every method that throws, Error or std::bad_alloc, has changed nothing, except that room that was made stays
// made: cached prompts may have moved down a tier or been dropped, although another thread took the room, memory ran
// out or the GPU refused.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/wait.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/move_order.h"
#include "kvpool/pool/pending_swap_in.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_memory.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

class Executor;
class Swap;
class SwapQueue;

class TierMoves {
 public:
  // All of them outlive this. `pins`: the owner of the pins that swaps return.
  TierMoves(CacheBlocks& blocks, PromptCache& cache, PoolMemory& memory, PoolGuard& guard, PinOwner& pins,
            Executor& executor);
  ~TierMoves();
  TierMoves(const TierMoves&) = delete;
  TierMoves& operator=(const TierMoves&) = delete;

  // --- room (tier_room.cpp) ---

  // While the caller holds this lock, no other thread makes room, evicts, deletes or swaps out.
  std::unique_lock<std::mutex> reclaiming() { return std::unique_lock(reclaim_); }
  // Takes n blocks to `to`, making room: moves HBM blocks to DRAM and drops DRAM blocks, the least recently used first;
  // if that is not enough, asks the space's pressure hook, which alone decides in a space with quotas. Releases both
  // locks meanwhile. REQUIRES: `reclaim` is reclaiming(), `lock` the space's. Throws kOutOfBlocks, and what the hook
  // throws.
  void take_evicting(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n, MediumChoice medium,
                     BlockState to, Address* out, const MoveOrder& order);
  // Drops up to n blocks, those farthest from the GPU first, and returns how many.
  std::size_t evict(std::size_t n, MediumChoice medium);
  // Moves up to n HBM blocks, the coldest, to DRAM blocks that are free, and returns how many.
  std::size_t spill(std::size_t n);

  // --- swaps (tier_moves.cpp): documented in Pool ---

  std::vector<Address> swap_out(std::size_t n, const CallerStream& after);
  std::vector<IndexPin> swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                const CallerStream& after);
  std::shared_ptr<Swap> begin_swap_out(std::size_t n, const CallerStream& after);
  std::shared_ptr<Swap> begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                      const CallerStream& after);

  // For pages of which some are on DISK. `bring`, in a thread of the pool, brings those to DRAM, and returns where all
  // of them lie and the pins on them; with `to_hbm` they go to HBM then. Does not call it when the swap was stopped
  // before, but `never`.
  using Brought = std::pair<std::vector<Address>, std::vector<IndexPin>>;
  std::shared_ptr<Swap> begin_from_disk(const CallerStream& after, bool to_hbm, std::function<Brought(Swap&)> bring,
                                        std::function<void()> never);

  // --- HBM that the engine takes back (tier_suspend.cpp): documented in Pool ---

  std::size_t suspend(bool keep, const Waiting& waiting, const CallerStream& after);

  // --- copies of blocks that somebody else protects (CacheCopies) ---

  // In its turn with the swaps of that direction. Throws kClosed, kOutOfMemory, kDeviceLost.
  void copy(TierWay way, std::span<const Address> from, std::span<const Address> to, const CopyOrder& order);
  // A thread of the pool does the work, which calls copy(), when the work of that stream, or without one of the device,
  // has ended. Lets `work` go before the handle says that it is done.
  std::shared_ptr<Swap> begin_copy(TierWay way, const CallerStream& after, std::function<void()> work);

  // --- the end ---

  void set_mover(TierMover* mover);
  // As in SwapQueue.
  void refuse() noexcept;
  void close() noexcept;
  // Nothing is copied while the caller holds these locks.
  struct Idle {
    std::unique_lock<std::mutex> swaps_in;
    std::unique_lock<std::mutex> reclaim;
  };
  Idle idle() { return {std::unique_lock(swap_in_mutex_), std::unique_lock(reclaim_)}; }

 private:
  static constexpr std::size_t kBatchBlocks = 4096;  // moved or dropped before others get the lock

  const BlockStore& store(Medium medium) const noexcept { return blocks_.store(medium); }
  void check_two_tiers() const;

  void make_room_by_quotas(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n, MediumChoice medium);
  bool relieve_if_possible(PressureHook& hook, Medium medium, std::size_t n);
  bool ask_others(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, std::size_t n, MediumChoice medium);
  void make_room(SpaceLock& lock, std::size_t n, const MoveOrder& order);
  void make_dram_room(std::size_t n) noexcept;
  std::size_t move_to_dram(SpaceLock& lock, std::size_t n, std::vector<Address>* moved, const MoveOrder& order);

  std::size_t save_hbm(SpaceLock& lock, const MoveOrder& order, bool& again);
  std::vector<Address> carry_out_swap(std::size_t n, const MoveOrder& order);
  void check_swap_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending);
  void finish_swap_in(PendingSwapIn& pending, const MoveOrder& order);
  void abandon_swap_in(PendingSwapIn& pending) noexcept;
  void prepare_swap_in(PendingSwapIn& pending, const MoveOrder& order);
  void reserve_swap_in(SpaceLock& lock, PendingSwapIn& pending, const MoveOrder& order);
  void copy_swap_in(SpaceLock& lock, const PendingSwapIn& pending, const MoveOrder& order);

  // Waits for the GPU (device_turns.cpp).
  std::shared_ptr<Swap> make_swap(const CallerStream& after);
  bool is_late(TierWay way, const MoveOrder& order) const noexcept;
  void follow_device(Swap& swap, const ReuseCounts& now);
  void lock_to_reclaim(std::unique_lock<std::mutex>& reclaim, SpaceLock& lock, const MoveOrder& order);
  void probe_device(SpaceLock& lock);

  CacheBlocks& blocks_;
  PromptCache& cache_;
  PoolMemory& memory_;
  PoolGuard& guard_;
  PinOwner& pins_;
  const std::unique_ptr<SwapQueue> swaps_;
  std::mutex swap_in_mutex_;
  std::mutex reclaim_;
  std::condition_variable swap_in_ended_;  // with the space's lock: a swap in has finished copying
  std::uint64_t swaps_in_begun_ = 0;       // copies of swaps in; at most one is under way
  std::uint64_t swaps_in_over_ = 0;
};

}  // namespace kvpool
