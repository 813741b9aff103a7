// What peers have of a pool's blocks: reserved, lent and quarantined ones, and those that they read.
//
// For the service that answers peers, which knows whose the blocks are: the space tells owners apart by incarnation and
// mark, and knows no peer.
//
// Thread-safety: all of it. Every method that throws has changed nothing then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/pool/pool_allocator.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

class PeerClaims {
 public:
  // All of them outlive this.
  PeerClaims(CacheBlocks& blocks, PromptCache& cache, PoolAllocator& allocator, PoolGuard& guard) noexcept
      : blocks_(blocks), cache_(cache), allocator_(allocator), guard_(guard) {}

  // Takes n blocks to `to` (reserved or lent) for an owner, as alloc does; false when that needs room to be made and
  // `evict` is not set.
  bool take(std::size_t n, MediumChoice medium, BlockState to, std::uint64_t incarnation, std::uint32_t mark,
            bool evict, Address* out);
  // Reserved, lent or quarantined blocks become free; those that an engine allocates become active, as they were before
  // a fetch was to fill them. REQUIRES: they are.
  void release(const Address* addresses, std::size_t n) noexcept;
  void quarantine(const Address* addresses, std::size_t n) noexcept;
  // Throws kStaleAddress, kNotOwner, kArgument unless each is lent to this owner, or reserved for this mark of it.
  void check_writable(const Address* addresses, std::size_t n, std::uint64_t incarnation, std::uint32_t mark,
                      bool lent_only);
  // Who owns a reserved or lent block.
  BlockOwner owner_of(Address address) noexcept;
  // Reserved or lent blocks become active. REQUIRES: they are.
  void take_over(const Address* addresses, std::size_t n) noexcept;
  // As Pool::insert(), of a prompt whose last blocks are reserved or lent, to one owner: nobody meets these active in
  // between. Duplicates become free. REQUIRES: they are.
  IndexPin insert_arrived(std::string_view name_space, const InsertItem& item, std::span<const Address> arrived);
  // The caller's active blocks become reserved for an owner. Throws as Pool::free() does.
  void reserve_active(const Address* addresses, std::size_t n, std::uint64_t incarnation, std::uint32_t mark);
  // As Pool::match(), but no use that is counted in the statistics; only what lies here.
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);

  // Blocks that are read for a transfer stay as they are: what frees, evicts or moves them takes effect when the last
  // reader lets go. `for_incarnation`: of the peer that asks, which may not read what is lent to another one; 0: the
  // application. Throws kStaleAddress, kNotOwner, kState, kArgument; then none is held.
  void hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation);
  void release_reading(const Address* addresses, std::size_t n) noexcept;

 private:
  CacheBlocks& blocks_;
  PromptCache& cache_;
  PoolAllocator& allocator_;
  PoolGuard& guard_;
};

}  // namespace kvpool
