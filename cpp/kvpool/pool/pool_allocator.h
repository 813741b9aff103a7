// Allocates blocks for the application and for peers, and makes room when too few are free.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_memory.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

class PoolAllocator {
 public:
  // All of them outlive this. `zeroes`: fills allocated blocks with zeros.
  PoolAllocator(CacheBlocks& blocks, PromptCache& cache, TierMoves& moves, PoolMemory& memory, PoolGuard& guard,
                bool zeroes) noexcept
      : blocks_(blocks), cache_(cache), moves_(moves), memory_(memory), guard_(guard), zeroes_(zeroes) {}

  bool zeroes() const noexcept { return zeroes_; }
  // From now on at most so many blocks are lent at a time, of all media and to all peers; -1: no limit. What is lent
  // above it stays lent.
  void set_lend_max(std::int64_t blocks) noexcept { lend_max_.store(blocks, std::memory_order_relaxed); }
  std::int64_t lend_max() const noexcept { return lend_max_.load(std::memory_order_relaxed); }
  // Checks a request. Throws kUnsupported for DISK, kState for HBM that an engine allocates, and what
  // PoolGuard::check() throws.
  void check(MediumChoice medium) const;
  // Throws kUnsupported for DISK.
  static void check_kept(MediumChoice medium);

  // Takes n blocks for this owner if they are free; false if not. Here and below: throws kBusy for blocks to lend above
  // lend_max(); if others were lent while this made room, it has evicted for nothing.
  bool try_take(std::size_t n, MediumChoice medium, const BlockOwner& owner, Address* out);
  // The same, making room: HBM moves to DRAM, DRAM is dropped, the least recently used first. `after`: as in
  // Pool::swap_out. Throws kOutOfBlocks.
  void take_evicting(std::size_t n, MediumChoice medium, const BlockOwner& owner, Address* out,
                     const CallerStream& after);

 private:
  void check_lent(const BlockOwner& owner, std::size_t taken, std::size_t more) const;
  void hand_over(SpaceLock& lock, const BlockOwner& owner, const Address* addresses, std::size_t n);

  CacheBlocks& blocks_;
  PromptCache& cache_;
  TierMoves& moves_;
  PoolMemory& memory_;
  PoolGuard& guard_;
  const bool zeroes_;
  std::atomic<std::int64_t> lend_max_{-1};
};

}  // namespace kvpool
