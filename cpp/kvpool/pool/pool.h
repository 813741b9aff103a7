// The pool of one instance: one cache of prompts in one space of units, and the verbs.
//
//   Pool ── PoolGuard       closed, failed, forked: every verb checks it first
//        ├─ BlockSpace      blocks/: units, and the lock of everything below; pools may share one
//        ├─ CacheBlocks     blocks/: states and owners of this cache's blocks
//        ├─ PoolMemory      the arenas, and copies between the tiers
//        ├─ PromptCache     index, pins, eviction order, limbo: each step under the space's lock
//        ├─ TierMoves       swaps and making room, which take longer than a step
//        ├─ PoolAllocator   allocates blocks, if necessary after making room
//        ├─ PeerClaims      the claims of peers on the blocks
//        ├─ DiskTier        blocks on DISK, if there are any: the store, its writer, reads
//        └─ Executor        exec/: the threads of the pool and of its service
//
// Locks: first those of TierMoves, then the space's. The short verbs take only the space's, and a thread that holds
// Python's GIL may take it.
//
// Errors: every verb that throws, Error or std::bad_alloc, has changed nothing, except that TierMoves may have made
// room.
//
// After fork every verb throws kFork in the child, and destruction there frees nothing that the parent uses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/error.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/wait.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/cache_results.h"
#include "kvpool/pool/named_caches.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_observer.h"
#include "kvpool/pool/pool_options.h"
#include "kvpool/pool/pool_stats.h"

namespace kvpool {

class BlockSpace;
class CacheBlocks;
class CacheCopies;
class DeviceOrder;
class DiskTier;
struct DiskTierStats;
class Executor;
class PeerClaims;
class PoolAllocator;
class PoolMemory;
class PromptCache;
class SpaceReclaimer;
class Swap;
class TierMover;
class TierMoves;
enum class TierWay : std::uint8_t;

// The share of a pool in a space with caches of other pools: its blocks are made of the space's units, and its arenas
// are views of the common memory.
struct SpaceShare {
  std::shared_ptr<BlockSpace> space;
  std::uint32_t block_units = 1;
  MediumMap<std::shared_ptr<Arena>> arenas;  // with as many blocks as fit into the units of each medium
  // For a space with quotas: makes room among its pools. Null: no pool takes from another.
  std::shared_ptr<SpaceReclaimer> reclaimer = nullptr;
  // Into how many pieces of whole units a block may be cut that finds no run. More than 1: only copies, within the pool
  // and to peers, can read its blocks, and others are refused (check_whole).
  std::uint32_t pieces = 1;
};

class Pool final : public PinOwner, public std::enable_shared_from_this<Pool> {
 public:
  // Throws kArgument, kOutOfMemory, kUnsupported, kLayoutMismatch.
  explicit Pool(const PoolOptions& options);
  // A cache of prompts in that space. Ignores what `options` says of memory. Throws kState when the space already has
  // its maximum of caches; and as above.
  Pool(const PoolOptions& options, SpaceShare share);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the pool: every verb but unpin throws kClosed from now on. Views of the memory stay valid. Idempotent.
  void close() noexcept;
  bool closed() const noexcept { return guard_.closed(); }
  // The keyed caches that stand on it and have a name.
  NamedCaches& named_caches() noexcept { return named_caches_; }
  // Every verb begins with this: throws kFork, kClosed, and the error with which the pool has failed.
  void guard() const { guard_.check(); }
  // For verbs that work on a failed pool: throws kFork, kClosed.
  void guard_open() const { guard_.check_open(); }
  // For handles, which outlive a closed pool: throws kFork.
  void guard_process() const { guard_.check_process(); }
  // The content of its blocks is lost: from now on every verb but close and unpin throws `why`. The first call counts.
  void fail(const Error& why) { guard_.fail(why); }
  // The threads of the pool and of its service. They end in close().
  Executor& executor() noexcept { return *executor_; }
  // The error with which the pool has failed, if it has.
  std::optional<Error> failure() { return guard_.failure(); }
  // Sets the observer of the pool's end; null removes it. REQUIRES: there is no observer yet, or this removes it. When
  // this returns, the pool no longer calls a removed observer.
  void observe(PoolObserver* observer) { guard_.observe(observer); }

  // --- blocks (pool_blocks.cpp) ---

  // Throws kUnsupported if its blocks may lie in several pieces, which `what` cannot read or write.
  void check_whole(const char* what) const;
  // Throws kUnsupported if it shares the units of a space: then a block's number is its first unit, and `what` needs
  // blocks that are numbered one after another.
  void check_unshared(const char* what) const;
  // The first units of the pieces of these blocks: piece p of block i at out[p * n + i]. Returns how many pieces a
  // block has; with one, a block's number. Throws as CacheBlocks::check. `out` has room for all.
  std::uint32_t pieces() const noexcept;
  // For code that copies blocks, also when the pool is closed; null where no block is cut.
  MediumMap<std::shared_ptr<const BlockPlaces>> places() const noexcept;
  void block_table(const Address* addresses, std::size_t n, std::int32_t* out) const;

  bool zeroes_on_alloc() const noexcept;
  // Takes n blocks if they are free; false if not. Throws kUnsupported for DISK, whose blocks nobody can use directly,
  // here and below.
  bool try_alloc(std::size_t n, MediumChoice medium, Address* out);
  // The same, making room: HBM moves to DRAM, DRAM is dropped, the least recently used first. `after`: as in swap_out.
  // Throws kOutOfBlocks.
  void alloc_evicting(std::size_t n, MediumChoice medium, Address* out, const CallerStream& after = {});
  // Throws kUnsupported for DISK.
  static void check_kept(MediumChoice medium);
  // Throws kUnsupported for DISK, unless the pool has blocks there.
  void check_has(MediumChoice medium) const;
  [[noreturn]] void throw_out_of_blocks(std::size_t n, MediumChoice medium);
  // Counts an allocation that the application was refused for want of blocks.
  void note_failed_alloc() noexcept;
  std::size_t capacity(MediumChoice medium) const noexcept;

  // Frees active blocks of the caller. Frees nothing when an address is wrong.
  void free(const Address* addresses, std::size_t n);
  // Frees nothing, but throws what free() would throw for the blocks of this pool, and for duplicates. Returns the
  // blocks of this pool, without those of other instances.
  std::vector<Address> check_free(const Address* addresses, std::size_t n);
  // Throws unless these are active blocks of this pool, without duplicates. Others may read them.
  void check_active(std::span<const Address> addresses);

  // For adopted memory whose engine allocates: the engine holds these blocks (free -> active) until free(). Other than
  // active, HBM blocks of such a pool are only ever reserved, by a fetch that fills them: insert and swaps refuse them.
  void adopt(const std::uint32_t* blocks, std::size_t n, Address* out);

  // --- cached prompts (pool_prompts.cpp) ---

  // `out` has room for n_tokens / block_tokens addresses.
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // All or nothing for the whole batch.
  std::vector<InsertOutcome> insert(std::string_view name_space, std::span<const InsertItem> items,
                                    bool free_duplicates);
  // As insert() of one prompt. The content of the blocks that it stores is still to come: until filled() they are
  // pinned, match() finds them, and nobody can read, send, move or match them for a peer (kBusy).
  InsertOutcome insert_unfilled(std::string_view name_space, const InsertItem& item, bool free_duplicates);
  // The content of these blocks is there; or, after forget(), nothing will write to them any more. Throws kState for a
  // block that is not being filled, and as check_free().
  void filled(std::span<const Address> addresses);
  // Drops cached blocks and everything that continues them: those that are pinned are found no more, and become free
  // with their last pin. Skips blocks that are gone already. Returns how many. What lies on DISK is erased soon after
  // (DiskTier). Throws kArgument, kNotOwner, kState.
  std::size_t forget(std::span<const Address> addresses);
  std::size_t erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants);
  std::size_t evict(std::size_t n, MediumChoice medium);
  MatchExplanation explain(std::string_view name_space, const Token* tokens, std::size_t n_tokens);
  void unpin(const IndexPin* pins, std::size_t n) noexcept override;

  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens, bool include_cached);
  EventQueue::Batch drain(EventQueue& queue);
  void unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept;

  // --- moves between the tiers (pool_prompts.cpp) ---

  // On a GPU the blocks are read after the work that `after` has been given so far; without a stream, after all work of
  // the device. The bytes have arrived when the call returns. Throws kArgument for a stream of another device, kState
  // without a stream while a CUDA graph is captured on the device, and kDeviceLost, as every verb does from then on.
  std::vector<Address> swap_out(std::size_t n, const CallerStream& after = {});
  // Takes addresses of cached blocks in any medium, writes their new addresses in HBM to `out`, and returns pins on
  // them. The pool chooses the destinations, unless `into` names active HBM blocks, one for each block in DRAM. When
  // another swap in brings some of the pages first, the last of `into` are not needed and stay active. `after`: as in
  // swap_out, for work that may still use the destinations.
  std::vector<IndexPin> swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                const CallerStream& after = {});
  // The same on a thread of the pool, which runs the swaps of one direction one after another. Wrong arguments throw
  // here; the handle reports other errors. The pages of swap_in are pinned, and `into` reserved, from now on. Other
  // blocks are chosen when the work that `after` has been given so far has ended. If some of them were inserted or
  // freed meanwhile, the swap also waits for all work that the device has by then (kState while a graph is captured).
  std::shared_ptr<Swap> begin_swap_out(std::size_t n, const CallerStream& after = {});
  std::shared_ptr<Swap> begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                      const CallerStream& after = {});
  // Copies active HBM blocks of the caller's, which hold the whole blocks [first, end) of these tokens, to DRAM, and
  // caches the copies: as many as are not cached yet, making room. Returns how many. Throws kState unless the blocks
  // before `first` are cached. `after`: as in swap_out, for work that may still
  // write the blocks. Throws kArgument, kStaleAddress, kNotOwner, kState, kOutOfBlocks; of a logical
  // instance kBusy until all ranks have joined, and kUnsupported for `after`.
  std::size_t save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                   std::span<const Address> addresses, const CallerStream& after = {});
  // Copies blocks in one of HBM and DRAM, active or cached, to active blocks of the caller's in the other, which are
  // reserved meanwhile; both stay where they are. Throws as save(). If it throws while it copies, the content of `into`
  // is undefined.
  void copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
            const CallerStream& after = {});
  // The same on a thread of the pool. Wrong arguments throw here. Sources cannot be freed by an engine, and
  // destinations are reserved, from now on until the handle is done.
  StartedSave begin_save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                         std::span<const Address> addresses, const CallerStream& after = {});
  std::shared_ptr<Swap> begin_copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
                                   const CallerStream& after = {});
  // The engine takes HBM back: when this returns, nothing here reads or writes it until resume(), and its addresses are
  // stale for good. Cached blocks move to DRAM if `keep`, as many as fit, and all others are dropped. Returns how many
  // moved. From the call on no block of HBM is given out (kSuspended); blocks in use may become free until
  // waiting.until_ns. Then it throws kBusy with their numbers, and HBM is open again; what has moved stays moved.
  // `after`: as in swap_out. Throws kState without HBM blocks, kSuspended if it is suspended or being suspended
  // already, kUnsupported in a shared space, kCancelled, and as swap_out.
  std::size_t suspend(bool keep, const Waiting& waiting, const CallerStream& after = {});
  // The memory is there again, at the same addresses, with any content. Throws kState unless it is suspended.
  void resume();
  bool suspended();
  // --- blocks on DISK (pool_disk.cpp) ---

  bool has_disk() const noexcept { return disk_ != nullptr; }
  // As swap_in, with DRAM as the target: pages on DISK come to DRAM, and all others stay where they are.
  std::vector<IndexPin> bring(std::span<const Address> addresses, Address* out, const GivenUp& given_up = {});
  std::shared_ptr<Swap> begin_bring(std::span<const Address> addresses);
  // Documented in DiskTier. Throw kUnsupported without a disk.
  std::size_t flush_disk(bool everything, const Waiting& waiting);
  DiskTierStats disk_stats();

  // Whether HBM is on a GPU: then the CPU may not dereference its addresses.
  bool on_device() const noexcept;
  // What has to end before the GPU's content may be read: the work so far of this stream, or without one of the device.
  // Null for a pool that is not on a GPU. Throws kArgument for a stream of another device.
  std::shared_ptr<const DeviceOrder> order_of_content(const CallerStream& stream);
  // After all work that the device has now; null for a pool that is not on a GPU. Throws kState while a CUDA graph is
  // captured there.
  std::shared_ptr<const DeviceOrder> order_of_all_now();
  // The order of a transfer after this stream; null without a stream. Throws kArgument for a stream of another device.
  std::shared_ptr<const DeviceOrder> order_after(const CallerStream& stream);

  // Tells it apart from the other pools of its space.
  std::uint32_t space_number() const noexcept;

  // --- as a member of a cluster (pool.cpp) ---

  // The pool's id among peers: addresses with it are valid here, and peers get such addresses, but the application does
  // not see the id yet. Throws kState when the pool has another id.
  void accept_instance(std::uint32_t instance);
  // From now on all addresses carry this id, for good. Throws kState when the pool has another id.
  void set_instance(std::uint32_t instance);
  // Takes back what accept_instance() did. Does nothing after set_instance(). REQUIRES: no peer has blocks.
  void forget_instance() noexcept;
  std::uint32_t instance() const noexcept { return instance_.load(std::memory_order_relaxed); }
  // For the service.
  PeerClaims& for_peers() noexcept { return *claims_; }

  // --- a logical instance ---
  const std::optional<Sharding>& sharding() const noexcept;
  // Sets the mover that copies blocks between the tiers, since their memory is in other processes. Null: none, before
  // all ranks have joined or after the end. When this returns, the previous mover is no longer called.
  void set_mover(TierMover* mover);

  // --- state (pool.cpp) ---

  PoolStats stats();
  PoolStats audit();
  const Layout& layout() const noexcept;
  std::shared_ptr<Arena> arena(Medium medium);
  MediumMap<std::shared_ptr<Arena>> arenas();

 private:
  PoolStats stats_locked() noexcept;
  DiskTier& disk() const;
  bool reaches_disk(std::span<const Address> addresses) const noexcept;
  std::vector<IndexPin> swap_in_from_disk(std::span<const Address> addresses, std::span<const Address> into,
                                          Address* out, const CallerStream& after);
  std::shared_ptr<Swap> begin_from_disk(std::span<const Address> addresses, const CallerStream& after, bool to_hbm);
  void check_instance(std::uint32_t instance) const;

  PoolGuard guard_;
  NamedCaches named_caches_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<PoolMemory> memory_;
  std::shared_ptr<BlockSpace> space_;
  std::unique_ptr<CacheBlocks> blocks_;
  std::unique_ptr<PromptCache> cache_;
  std::unique_ptr<TierMoves> moves_;
  std::unique_ptr<PoolAllocator> allocator_;
  std::unique_ptr<PeerClaims> claims_;
  std::unique_ptr<CacheCopies> copies_;
  std::shared_ptr<SpaceReclaimer> reclaimer_;
  std::atomic<std::uint32_t> instance_{0};
  bool keeps_instance_ = false;  // under the space's lock: set_instance() was called
  std::unique_ptr<DiskTier> disk_;
};

}  // namespace kvpool
