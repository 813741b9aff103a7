// Copies between blocks that the caller owns in HBM and blocks in DRAM: for engines that allocate their blocks
// themselves, and use them again when they like. Unlike a swap, a copy leaves both blocks where they are.
//
// A save caches only what is not cached yet. Its source keeps its content until the copy has ended: the caller may not
// write to it, and an engine may not free it (kState). A copy reserves its destinations until it has ended. Copies of
// one direction take turns with the swaps of that direction.
//
// Thread-safety: all of it. Every method that throws has changed nothing, except that room that was made stays made,
// and that the destinations of a load that fails have undefined content.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "kvpool/base/address.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/cache_results.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_memory.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

class CacheCopies {
 public:
  // All of them outlive this. `pins`: the owner of the pins of matches.
  CacheCopies(CacheBlocks& blocks, PeerClaims& claims, PoolMemory& memory, TierMoves& moves, PoolGuard& guard,
              PinOwner& pins) noexcept
      : blocks_(blocks), claims_(claims), memory_(memory), moves_(moves), guard_(guard), pins_(pins) {}
  CacheCopies(const CacheCopies&) = delete;
  CacheCopies& operator=(const CacheCopies&) = delete;

  // Documented in Pool.
  std::size_t save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                   std::span<const Address> addresses, const CallerStream& after);
  StartedSave begin_save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                         std::span<const Address> addresses, const CallerStream& after);
  void copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into, const CallerStream& after);
  std::shared_ptr<Swap> begin_copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
                                   const CallerStream& after);

 private:
  class Save;
  class Copy;
  void check_memory(const CallerStream& after);
  void check_prompt(std::span<const Token> tokens, std::size_t first, std::span<const Address> addresses) const;

  CacheBlocks& blocks_;
  PeerClaims& claims_;
  PoolMemory& memory_;
  TierMoves& moves_;
  PoolGuard& guard_;
  PinOwner& pins_;
};

}  // namespace kvpool
