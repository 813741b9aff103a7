// The claims of peers on a pool's blocks: those reserved for them, lent to them, quarantined, or read by them.
//
// The service that answers peers uses this. It knows the peers; the blocks only carry the incarnation and the mark of
// their owner.
//
// Thread-safety: all of it. Every method that throws has changed nothing.
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

  // From now on at most so many blocks are lent at a time, of all media and to all peers; -1: no limit. What is lent
  // above it stays lent.
  void set_lend_max(std::int64_t blocks) noexcept { allocator_.set_lend_max(blocks); }
  std::int64_t lend_max() const noexcept { return allocator_.lend_max(); }
  // Takes n blocks to `to` (reserved or lent) for an owner, as alloc does; without `evict`, returns false when too few
  // are free. Throws kBusy for blocks to lend above lend_max().
  bool take(std::size_t n, MediumChoice medium, BlockState to, std::uint64_t incarnation, std::uint32_t mark,
            bool evict, Address* out);
  // Frees reserved, lent or quarantined blocks; those that an engine allocates become active again, as before the fetch
  // that was to fill them. REQUIRES: each is in one of these states.
  void release(const Address* addresses, std::size_t n) noexcept;
  void quarantine(const Address* addresses, std::size_t n) noexcept;
  // Throws kStaleAddress, kNotOwner, kArgument unless each is reserved for the transfer `mark` of this owner.
  void check_reserved(const Address* addresses, std::size_t n, std::uint64_t incarnation, std::uint32_t mark);
  // The owner of a reserved or lent block.
  BlockOwner owner_of(Address address) noexcept;
  // Reserved or lent blocks become active.
  void take_over(const Address* addresses, std::size_t n) noexcept;
  // As Pool::insert(), for a prompt whose last blocks, `arrived`, are reserved for or lent to one owner. They are at no
  // time visible as active. Duplicates become free. `arrived` becomes the addresses that the pool gives out now, with
  // its instance id or without: the index has no others. Throws kBusy as well, when it can succeed later: a page is
  // cached already and still being filled, or the prefix was forgotten since. REQUIRES: `arrived` is the end of
  // item.values.
  IndexPin insert_arrived(std::string_view name_space, const InsertItem& item, std::span<Address> arrived);
  // The caller's active blocks become reserved for an owner, who is to write to them. Throws as Pool::free() does, and
  // kState when something still reads one of them.
  void reserve_active(const Address* addresses, std::size_t n, std::uint64_t incarnation, std::uint32_t mark);
  // Blocks that an engine allocates and holds become lent to an owner, until release(). Throws kState for others, and
  // as reserve_active().
  void lend_active(const Address* addresses, std::size_t n, std::uint64_t incarnation);
  // As Pool::match(), but does not count in the statistics, and finds only blocks of this pool whose content is there.
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);

  // Blocks keep their content while a transfer reads them: freeing, eviction and moves take effect when the last reader
  // releases them. `for_incarnation`: the peer that reads; it may not read blocks lent to another peer, nor those that
  // were forgotten (kStaleAddress). 0: the application. Throws kStaleAddress, kNotOwner, kState, kArgument, kBusy for a
  // block that is being filled, and holds no block then.
  void hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation);
  void release_reading(const Address* addresses, std::size_t n) noexcept;

 private:
  CacheBlocks& blocks_;
  PromptCache& cache_;
  PoolAllocator& allocator_;
  PoolGuard& guard_;
};

}  // namespace kvpool
