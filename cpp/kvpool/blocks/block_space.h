// The blocks of one pool in all its media: who has which, which addresses are valid, and who reads them.
//
// A space knows nothing of prompts, peers or memory: it counts blocks. What is cached, and what may be evicted to make
// room, is the business of the cache above it.
//
//   L1  A block that is reserved or lent carries its owner's epoch as its tag, and the transfer's mark.
//   L2  A block that somebody reads for a transfer is not reused before the last reader lets go, whatever was done to
//       it meanwhile: it waits in state reserved, with kUnreadTag.
//   L3  Where the engine allocates, an HBM block is the engine's from adopt() to free(). It is active then; while a
//       fetch of the engine fills it, reserved or quarantined. It is never cached or lent; only the engine frees it.
//
// Tags of blocks: of a reserved or lent block its owner's epoch, of an active one what tells duplicates in a list, of a
// historical one what the cache makes of it (a pointer, or kCacheTag).
//
// Thread-safety: none, but for lock(), which callers hold in every call. What stands on the space is guarded by the
// same lock, since almost every verb changes both at once. It is held for microseconds: never while bytes are copied,
// never while waiting for Python. A thread that holds Python's GIL may take it. Every method that throws has changed
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_store.h"

namespace kvpool {

// Who has a block that is not free: of a reserved or lent one the peer, and which of its transfers.
struct BlockOwner {
  BlockState state = BlockState::kReserved;
  std::uint64_t epoch = 0;
  std::uint32_t mark = 0;
};

using SpaceLock = std::unique_lock<std::mutex>;

class BlockSpace {
 public:
  static constexpr std::uint64_t kCacheTag = 1;   // of a historical block: the cache's own, which is no pointer
  static constexpr std::uint64_t kUnreadTag = 2;  // of a reserved block that is free but for those who read it

  // `blocks` and the generations they begin with, by medium. `engine_allocates`: its HBM blocks are an engine's (L3).
  // Throws std::bad_alloc.
  BlockSpace(const MediumMap<std::uint32_t>& blocks, const MediumMap<std::uint32_t>& first_generations,
             bool engine_allocates);
  BlockSpace(const BlockSpace&) = delete;
  BlockSpace& operator=(const BlockSpace&) = delete;

  SpaceLock lock() { return SpaceLock(mutex_); }
  // The same, to be locked by its holder.
  SpaceLock unlocked() noexcept { return SpaceLock(mutex_, std::defer_lock); }

  BlockStore& store(Medium medium) noexcept { return stores_[medium]; }
  const BlockStore& store(Medium medium) const noexcept { return stores_[medium]; }
  // REQUIRES: the address names a medium.
  BlockStore& store_of(Address address) noexcept { return store(medium_of(address)); }
  const BlockStore& store_of(Address address) const noexcept { return store(medium_of(address)); }

  bool engine_allocates() const noexcept { return engine_allocates_; }
  std::uint32_t instance() const noexcept { return stores_[Medium::kHbm].instance(); }
  // From now on addresses that are given out carry this id.
  void set_instance(std::uint32_t instance) noexcept;
  // Instance 0 is this space, too: such an address is older than the id.
  bool is_local(Address address) const noexcept {
    const std::uint32_t of = instance_of(address);
    return of == 0 || of == instance();
  }
  // Whether take() may use this medium for such a request: MIXED has no HBM that an engine allocates.
  bool gives(MediumChoice choice, Medium medium) const noexcept {
    return choice.includes(medium) && !(engine_allocates_ && medium == Medium::kHbm);
  }
  // Blocks there are, free or not; of MIXED what take() can give.
  std::size_t capacity(MediumChoice choice) const noexcept;

  // --- taken and given back ---

  // All n or none. `out` has room for n.
  bool take(std::size_t n, MediumChoice choice, BlockState to, Address* out) noexcept;
  // Blocks become free, run by run; those that a transfer reads, when it has read them. REQUIRES: they are local, not
  // free, and none stands twice.
  void release(const Address* addresses, std::size_t n) noexcept;

  // --- addresses that callers name ---

  // Throws kArgument, kNotOwner, kStaleAddress, or kState, unless the address names a block here in state `wanted` (any
  // but free when nullopt). `position`: in the caller's list, for the error.
  void check(Address address, std::size_t position, std::optional<BlockState> wanted) const;
  // The same for a list of active blocks, in which none may stand twice. With skip_cached, historical blocks and those
  // of other instances are left out; returns whether there were such.
  bool check_active_and_distinct(const Address* addresses, std::size_t n, bool skip_cached);
  // Throws kArgument when a block stands twice in a list, or in two lists that are checked with one stamp.
  // REQUIRES: check() has passed all of them, or they are another instance's.
  void check_distinct(const Address* addresses, std::size_t n, std::uint64_t stamp);
  std::uint64_t new_stamp() noexcept { return ++check_stamp_; }
  // Throws kState when a transfer reads one of them: what an engine frees it uses again at once. Leaves out those of
  // other instances.
  void check_unread(const Address* addresses, std::size_t n) const;

  // --- owners ---

  BlockOwner owner_of(Address address) const noexcept;
  // REQUIRES: they are local and not free.
  void give(std::span<const Address> addresses, const BlockOwner& to) noexcept;
  // Throws kStaleAddress, kNotOwner, kArgument unless each is lent to this owner, or reserved for this mark of it.
  void check_writable(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark,
                      bool lent_only) const;

  // --- readers ---

  // `for_epoch`: of the peer that asks, which may not read what is lent to another one; 0: the application. Throws
  // kStaleAddress, kNotOwner, kState, kArgument; then none is held.
  void hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_epoch);
  // REQUIRES: each is held.
  void release_reading(const Address* addresses, std::size_t n) noexcept;

  // Checks every block: what BlockStore::audit() does, L2 and L3. Throws kAudit.
  void audit() const;

 private:
  void release_run(Medium medium, std::uint32_t first, std::uint32_t n) noexcept;

  std::mutex mutex_;
  const bool engine_allocates_;
  MediumMap<BlockStore> stores_;
  MediumMap<std::vector<std::uint16_t>> readers_;  // of each block; empty until the first transfer
  std::uint64_t check_stamp_ = kUnreadTag;         // tags active blocks while a list is checked for duplicates
};

}  // namespace kvpool
