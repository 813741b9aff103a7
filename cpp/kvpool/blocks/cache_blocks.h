// The blocks of one cache in all media: their owners, their valid addresses, and their readers.
//
// This knows no prompts, peers or memory: it counts blocks. The cache above decides what is cached and what may be
// evicted. The space below knows which units other caches have taken.
//
//   L1  A block that is reserved or lent carries its owner's incarnation as its tag, and the transfer's mark.
//   L2  A block that a transfer reads is not reused before its last reader releases it. If it is freed meanwhile, it
//       waits in state reserved, with kUnreadTag.
//   L3  If the engine allocates, it owns an HBM block from adopt() to free(). The block is active then, or, while a
//       fetch of the engine fills it, reserved or quarantined, or lent by the engine. It is never cached; only the
//       engine frees it.
//   L4  While HBM is closed, no block of it is taken. It is closed while it is suspended, and while it is emptied
//       before; once it is suspended, every block of it that is not retired is kSuspended.
//
// Tags of blocks: reserved or lent: its owner's incarnation; active: a stamp that finds duplicates in a list;
// historical: set by the cache (a pointer, or kCacheTag).
//
// Thread-safety: none; callers hold the lock of the space, except for the constructor and the destructor, which take
// it. Every method that throws has changed nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/blocks/block_pieces.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/block_store.h"
#include "kvpool/blocks/reader_counts.h"

namespace kvpool {

// What keeps HBM from being suspended: blocks, by what they are.
struct HbmUse {
  std::uint32_t active = 0;
  std::uint32_t reserved = 0;
  std::uint32_t lent = 0;
  std::uint32_t quarantined = 0;
  std::uint32_t pinned = 0;  // cached ones that the cache above cannot give up
  std::uint32_t read = 0;    // by transfers, saves and sequences; among all others

  bool any() const noexcept { return (active | reserved | lent | quarantined | pinned | read) != 0; }
};

// The owner of a block: for a reserved or lent block, the peer and its transfer.
struct BlockOwner {
  BlockState state = BlockState::kReserved;
  std::uint64_t incarnation = 0;
  std::uint32_t mark = 0;
};

struct CacheShape {
  std::uint32_t block_units = 1;  // of each block
  // Into how many pieces of equal size a block may be cut that finds no run for all of it; in a space with several
  // caches.
  std::uint32_t pieces = 1;
  // By medium. Used while the space has no other cache; with several, the space makes their ranges disjoint.
  MediumMap<std::uint32_t> first_generations = same_for_all_media(std::uint32_t{1});
  bool engine_allocates = false;  // an engine allocates its HBM blocks (L3)
};

class CacheBlocks {
 public:
  static constexpr std::uint64_t kCacheTag = 1;   // of a historical block: set by the cache, not a pointer
  static constexpr std::uint64_t kUnreadTag = 2;  // of a freed block that waits for its readers (L2)
  // Mark of a block that is being filled, to which nothing comes any more.
  static constexpr std::uint32_t kNeverFilled = UINT32_MAX;

  // Has at most as many blocks as fit into the units of each medium. `space` outlives this. Throws kArgument for a size
  // of 0 or pieces that are no whole units, kUnsupported when an engine allocates in a space that several caches share,
  // kState when the space already has its maximum of caches, kOutOfMemory.
  CacheBlocks(BlockSpace& space, const CacheShape& shape);
  ~CacheBlocks();
  CacheBlocks(const CacheBlocks&) = delete;
  CacheBlocks& operator=(const CacheBlocks&) = delete;

  BlockSpace& space() const noexcept { return space_; }
  SpaceLock lock() const { return space_.lock(); }
  SpaceLock unlocked() const noexcept { return space_.unlocked(); }
  // Distinguishes it from the other caches of the space.
  std::uint32_t number() const noexcept { return seat_.number; }
  std::uint32_t block_units() const noexcept { return block_units_; }
  // The prompts over it, for quotas; null when they end. Takes the lock. REQUIRES: `cached` outlives that.
  void set_cached(const CachedBlocks* cached) noexcept { space_.set_cached(number(), cached); }

  const BlockStore& store(Medium medium) const noexcept { return stores_[medium]; }
  // REQUIRES: the address names a medium.
  const BlockStore& store_of(Address address) const noexcept { return store(medium_of(address)); }

  bool engine_allocates() const noexcept { return engine_allocates_; }
  std::uint32_t instance() const noexcept { return stores_[Medium::kHbm].instance(); }
  // accept_instance: addresses with this id, by which peers know this cache, are valid here; 0 ends that.
  // set_instance: from now on new addresses carry it, too. Both throw kState when another cache of the space has the
  // id.
  void accept_instance(std::uint32_t instance);
  void set_instance(std::uint32_t instance);
  // Instance 0 also means this cache: such an address was given out before the id was set.
  bool is_local(Address address) const noexcept {
    const std::uint32_t of = instance_of(address);
    return of == 0 || of == instance();
  }
  // Whether take() may use this medium for such a request: MIXED has no HBM that an engine allocates, or has taken
  // back.
  bool gives(MediumChoice choice, Medium medium) const noexcept {
    return choice.includes(medium) && !((engine_allocates_ || hbm_closed_) && medium == Medium::kHbm);
  }
  // The address by which take() would give out this block now: with the id since set_instance(), without it before.
  // REQUIRES: it is local.
  Address as_made(Address address) const noexcept {
    return without_instance(address) | static_cast<Address>(store_of(address).made_instance()) << kInstanceShift;
  }
  // The number of blocks, free or not; for MIXED, of those that take() can use.
  std::size_t capacity(MediumChoice choice) const noexcept;
  // How many blocks take() can take now, of `most` that somebody wants. In a space with several caches only blocks
  // count that find a run of units for all of them, or for each of their pieces.
  std::size_t free_blocks(Medium medium, std::size_t most = SIZE_MAX) const noexcept {
    const std::size_t at_most = std::min<std::size_t>(store(medium).free_count(), most);
    if (shared_) [[unlikely]] {
      return space_.unit_set(medium).fits(run_units(), at_most * pieces_count()) / pieces_count();
    }
    return at_most;
  }
  // Units of the shortest run that take() can use.
  std::uint32_t run_units() const noexcept { return block_units_ / pieces_count(); }
  // Where blocks lie, if the space has several caches. A block that has an owner may be read without the lock.
  const BlockPieces& pieces(Medium medium) const noexcept { return *pieces_[medium]; }
  std::uint32_t pieces_count() const noexcept { return pieces_[Medium::kHbm]->pieces(); }
  // The same, for those who copy blocks, and may do so when the cache has ended; null if no block is cut.
  std::shared_ptr<const BlockPlaces> places(Medium medium) const noexcept {
    return pieces_count() == 1 ? nullptr : pieces_[medium];
  }
  // Blocks without an owner for which there are no units, or no run of them, because other caches have blocks there.
  std::uint32_t displaced(Medium medium) const noexcept {
    return shared_ ? store(medium).free_count() - static_cast<std::uint32_t>(free_blocks(medium)) : 0;
  }
  FreeRuns free_runs(Medium medium) const noexcept;

  // --- HBM that the engine takes back for a while (cache_blocks_suspend.cpp) ---

  // From now on no block of HBM is taken. Throws kSuspended if it is closed already, kState without HBM, kUnsupported
  // if other caches share it.
  void close_hbm();
  void open_hbm() noexcept;
  bool hbm_closed() const noexcept { return hbm_closed_; }
  // Throws kSuspended for HBM alone, while it is closed.
  void check_open(MediumChoice choice) const;
  // Of blocks that have an owner, and of cached blocks that are read. `evictable`: how many of the historical ones the
  // cache can give up.
  HbmUse hbm_use(std::size_t evictable) const noexcept;
  // REQUIRES, of both: HBM is closed. Of suspend_hbm(): no block of it has an owner.
  void suspend_hbm() noexcept;
  bool hbm_suspended() const noexcept { return hbm_suspended_; }
  void resume_hbm() noexcept;

  // --- allocation ---

  // All n or none. `out` has room for n. take_within: as many as the quotas of the space admit at most.
  bool take_within(std::size_t n, MediumChoice choice, BlockState to, Address* out) noexcept;
  bool take(std::size_t n, MediumChoice choice, BlockState to, Address* out) noexcept;
  // How many of n blocks take_within() can take now.
  std::size_t takeable(std::size_t n, Medium medium) const noexcept;
  // Free blocks that the limit leaves for cached content, of `most` that somebody wants.
  std::size_t cacheable(Medium medium, std::size_t most) const noexcept;
  // Takes exactly this block; false if it is not free or does not exist. REQUIRES: the space has no other caches.
  bool take_block(Medium medium, std::uint32_t block, BlockState to, Address* out) noexcept;
  // Frees blocks, run by run; blocks that a transfer reads become free after it has read them. REQUIRES: they are
  // local, not free, and without duplicates.
  void release(const Address* addresses, std::size_t n) noexcept;

  // --- addresses that callers name ---

  // Whether the address names a block of a medium here that has been freed since, though its last readers may still
  // have to let go of it (L2).
  bool is_gone(Address address) const noexcept {
    if (!is_medium(medium_bits_of(address))) return false;
    const AddressFault fault = store_of(address).find(address);
    return fault == AddressFault::kStale || (fault == AddressFault::kNone && is_unread(address));
  }
  // Throws kArgument, kNotOwner, kStaleAddress, or kState, unless the address names a block here in state `wanted` (any
  // but free when nullopt). `position`: in the caller's list, for the error.
  void check(Address address, std::size_t position, std::optional<BlockState> wanted) const;
  // The same for a list of active blocks without duplicates. With skip_cached, skips historical blocks and blocks of
  // other instances; returns whether it skipped any.
  bool check_active_and_distinct(const Address* addresses, std::size_t n, bool skip_cached);
  // Throws kArgument when a list, or two lists that are checked with the same stamp, contain a block twice.
  // REQUIRES: each has passed check(), or is of another instance.
  void check_distinct(const Address* addresses, std::size_t n, std::uint64_t stamp);
  std::uint64_t new_stamp() noexcept { return ++check_stamp_; }
  // Throws kState when a transfer reads one of them. Skips blocks of other instances.
  void check_unread(const Address* addresses, std::size_t n) const;
  // Throws kState when an engine frees a block that it allocates and that a transfer reads, because it reuses that at
  // once. Blocks that kvpool allocates wait for their readers (L2).
  void check_freeable(const Address* addresses, std::size_t n) const;

  // --- owners ---

  BlockOwner owner_of(Address address) const noexcept;
  // REQUIRES, here and below: they are local and owned.
  void give(std::span<const Address> addresses, const BlockOwner& to) noexcept;
  void set_state(Address address, BlockState to) noexcept { own(address).set_state(block_of(address), to); }
  void set_tag(Address address, std::uint64_t tag) noexcept { own(address).set_tag(block_of(address), tag); }
  void set_mark(Address address, std::uint32_t mark) noexcept { own(address).set_mark(block_of(address), mark); }
  void set_filling(Address address, bool filling) noexcept { own(address).set_filling(block_of(address), filling); }
  // Whether the content of this block is still to come: such a block is historical, and cannot be read.
  bool filling(Address address) const noexcept { return store_of(address).filling(block_of(address)); }
  // REQUIRES: filling().
  bool never_filled(Address address) const noexcept {
    return store_of(address).mark(block_of(address)) == kNeverFilled;
  }
  // Throws kBusy if it is still to come, kState if it never comes. REQUIRES: it has passed check().
  void check_filled(Address address, std::size_t position) const;
  // Throws kStaleAddress, kNotOwner, kArgument unless each is reserved for this transfer of this owner. A block that is
  // lent to the owner is refused too: the owner may be giving it back, or it may be on its way into the index.
  void check_reserved(const Address* addresses, std::size_t n, std::uint64_t incarnation, std::uint32_t mark) const;

  // --- readers (cache_blocks_read.cpp) ---

  // `for_incarnation`: the peer that reads; it may not read blocks lent to another peer. 0: the application. Throws
  // kStaleAddress, kNotOwner, kState, kArgument, kBusy for a block that is being filled, and holds no block then.
  void hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation);
  // Blocks that were freed and wait for their last readers (L2).
  std::uint32_t unread(Medium medium) const noexcept { return unread_[medium]; }
  bool is_read(Medium medium, std::uint32_t block) const noexcept {
    return !readers_[medium].empty() && readers_[medium][store(medium).slot_of(block)] > 0;
  }
  // REQUIRES: each is held.
  void release_reading(const Address* addresses, std::size_t n) noexcept;

  // Checks every block: what BlockStore::audit() does, L2 and L3, and what BlockSpace::audit() does. Throws kAudit.
  void audit() const;

 private:
  friend class BlockSpace;

  void check_instance(std::uint32_t instance) const;

  struct SeatClaim {
    explicit SeatClaim(BlockSpace& of) : space(of), number(of.take_seat()) {}
    ~SeatClaim() { space.leave_seat(number); }
    SeatClaim(const SeatClaim&) = delete;
    SeatClaim& operator=(const SeatClaim&) = delete;
    BlockSpace& space;
    const std::uint32_t number;
  };

  BlockStore make_store(Medium medium, const CacheShape& shape) const;
  std::shared_ptr<BlockPieces> make_pieces(Medium medium, const CacheShape& shape) const;
  BlockStore& own(Address address) noexcept { return stores_[medium_of(address)]; }
  bool take_from(Medium medium, std::size_t n, BlockState to, Address* out) noexcept;
  bool take_units(Medium medium, std::size_t n, BlockState to, Address* out) noexcept;
  void take_scattered(Medium medium, BlockState to, Address* out) noexcept;
  // Whether the block was freed, and waits for its readers (L2).
  bool is_unread(Address address) const noexcept {
    const BlockStore& blocks = store_of(address);
    const std::uint32_t block = block_of(address);
    return blocks.state(block) == BlockState::kReserved && blocks.tag(block) == kUnreadTag;
  }
  void check_not_read(Address address, std::size_t position) const;
  void release_run(Medium medium, std::uint32_t first, std::uint32_t n) noexcept;
  void release_units(Medium medium, std::uint32_t first, std::uint32_t n) noexcept;
  void give_back_whole(Medium medium, std::uint32_t first, std::uint32_t n) noexcept;
  // REQUIRES: somebody reads, or has read.
  std::uint16_t& readers_of(Address address) noexcept {
    return readers_[medium_of(address)][store_of(address).slot_of(block_of(address))];
  }
  // A block that is freed while a transfer reads it waits for its readers (L2).
  void wait_for_readers(Medium medium, std::uint32_t block) noexcept;

  // --- for the space ---

  // visit(first, units) for each extent of the block.
  template <class Visit>
  void for_each_extent(Medium medium, std::uint32_t block, Visit&& visit) const {
    const BlockPieces& pieces = *pieces_[medium];
    if (pieces.whole(block)) return visit(block, block_units_);
    for (const std::uint32_t first : pieces.units_of(block)) visit(first, pieces.piece_units());
  }
  // Whether nothing can write or reads this block, though it is not free.
  bool is_reusable(Medium medium, std::uint32_t block) const noexcept {
    const BlockStore& blocks = store(medium);
    return blocks.state(block) == BlockState::kHistorical && !is_read(medium, block) && !blocks.filling(block);
  }

  BlockSpace& space_;
  const SeatClaim seat_;
  const std::uint32_t block_units_;
  const bool engine_allocates_;
  const bool shared_;
  bool hbm_closed_ = false;
  bool hbm_suspended_ = false;
  MediumMap<BlockStore> stores_;
  MediumMap<std::shared_ptr<BlockPieces>> pieces_;
  std::vector<std::uint32_t> piece_units_;  // of a block that is being scattered
  MediumMap<ReaderCounts> readers_;         // of each block's slot; empty until the first transfer
  std::uint64_t check_stamp_ = kUnreadTag;  // tags active blocks while a list is checked for duplicates
  MediumMap<std::uint32_t> unread_{};       // blocks that were freed and wait for their readers (L2)
};

}  // namespace kvpool
