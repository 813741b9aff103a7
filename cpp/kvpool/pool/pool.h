// The pool of one instance: one cache of prompts in one space of units, and the verbs.
//
//   Pool ── PoolGuard       closed, failed, forked: what every verb asks first
//        ├─ BlockSpace      blocks/: units, and the lock of everything below; pools may share one
//        ├─ CacheBlocks     blocks/: who has which of this cache's blocks
//        ├─ PoolMemory      the arenas, and copies between the tiers
//        ├─ PromptCache     index, pins, order of eviction, limbo: each step under the space's lock
//        ├─ TierMoves       swaps, and the room that is made: what takes longer than a step
//        ├─ PoolAllocator   takes blocks, with room made or not, and hands them out
//        └─ PeerClaims      what peers have of the blocks
//
// Locks: those of TierMoves, then the space's, which alone the short verbs take. A thread that holds Python's GIL may
// take the space's.
//
// Errors: every verb that throws, Error or std::bad_alloc, has changed nothing, but for the room that TierMoves has
// made.
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
#include "kvpool/blocks/layout.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/cache_results.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_observer.h"
#include "kvpool/pool/pool_options.h"
#include "kvpool/pool/pool_stats.h"

namespace kvpool {

class BlockSpace;
class CacheBlocks;
class DeviceOrder;
class PeerClaims;
class PoolAllocator;
class PoolMemory;
class PromptCache;
class Swap;
class TierMover;
class TierMoves;

// The place of a pool in a space that other pools have caches in: its blocks are made of the space's units, and its
// arenas show it the common memory.
struct SpaceShare {
  std::shared_ptr<BlockSpace> space;
  std::uint32_t block_units = 1;
  MediumMap<std::shared_ptr<Arena>> arenas;  // of as many blocks as the units of each medium make
};

class Pool final : public PinOwner, public std::enable_shared_from_this<Pool> {
 public:
  // Throws kArgument, kOutOfMemory, kUnsupported, kLayoutMismatch.
  explicit Pool(const PoolOptions& options);
  // A cache of prompts in that space. What `options` says of memory counts for nothing. Throws kState when the space
  // has as many caches as it is for; and as above.
  Pool(const PoolOptions& options, SpaceShare share);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the pool: every verb but unpin throws kClosed from now on. Views of the memory stay valid. Idempotent.
  void close() noexcept;
  bool closed() const noexcept { return guard_.closed(); }
  // What every verb begins with: throws kFork, kClosed, and what the pool has failed with.
  void guard() const { guard_.check(); }
  // For what tells of a pool that has failed: throws kFork, kClosed.
  void guard_open() const { guard_.check_open(); }
  // Throws kFork: for handles, which outlive a pool that was closed.
  void guard_process() const { guard_.check_process(); }
  // The content of its blocks is lost: from now on every verb but close and unpin throws this. The first call counts.
  void fail(const Error& why) { guard_.fail(why); }
  // What it has failed with; nothing as long as it has not.
  std::optional<Error> failure() { return guard_.failure(); }
  // Tells `observer` how the pool ends; null: nobody any more. REQUIRES: there is none, or null takes its place.
  // It is not called any more when this has returned.
  void observe(PoolObserver* observer) { guard_.observe(observer); }

  // --- blocks (pool_blocks.cpp) ---

  bool zeroes_on_alloc() const noexcept;
  // Takes n blocks if they are free; false if not. Of DISK there are none yet: it is kUnsupported, here and below.
  bool try_alloc(std::size_t n, MediumChoice medium, Address* out);
  // The same, making room: HBM moves to DRAM, DRAM is dropped, the least recently used first. `after`: as in swap_out.
  // Throws kOutOfBlocks.
  void alloc_evicting(std::size_t n, MediumChoice medium, Address* out, const CallerStream& after = {});
  // Throws kUnsupported for DISK.
  static void check_kept(MediumChoice medium);
  [[noreturn]] void throw_out_of_blocks(std::size_t n, MediumChoice medium);
  std::size_t capacity(MediumChoice medium) const noexcept;

  // Active blocks of the caller. Nothing is freed when an address is wrong.
  void free(const Address* addresses, std::size_t n);
  // Throws what free() would throw for those of this pool, and for an address that stands twice. Returns those of this
  // pool; leaves out the blocks of other instances, and frees nothing.
  std::vector<Address> check_free(const Address* addresses, std::size_t n);

  // Adopted memory whose engine allocates: the engine holds these blocks now (free -> active), until free(). HBM blocks
  // of such a pool are never anything else but reserved by a fetch that fills them: insert and the swaps refuse them.
  void adopt(const std::uint32_t* blocks, std::size_t n, Address* out);

  // --- cached prompts (pool_prompts.cpp) ---

  // `out` has room for n_tokens / block_tokens addresses.
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // All or nothing over the whole batch.
  std::vector<InsertOutcome> insert(std::string_view name_space, std::span<const InsertItem> items,
                                    bool free_duplicates);
  std::size_t erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants);
  std::size_t evict(std::size_t n, MediumChoice medium);
  MatchExplanation explain(std::string_view name_space, const Token* tokens, std::size_t n_tokens);
  void unpin(const IndexPin* pins, std::size_t n) noexcept override;

  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens, bool include_cached);
  EventQueue::Batch drain(EventQueue& queue);
  void unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept;

  // --- moves between the tiers (pool_prompts.cpp) ---

  // On a GPU the blocks are read when the work that `after` had been given before has ended; without a stream, all work
  // of the device. The bytes have arrived when the call returns. Throws kArgument for a stream of something else,
  // kState for no stream while a CUDA graph is captured on the device, and kDeviceLost: every verb does, then.
  std::vector<Address> swap_out(std::size_t n, const CallerStream& after = {});
  // Addresses of cached blocks, in any medium; writes where each lies then, in HBM, and returns pins on them. The
  // blocks to move to are the pool's choice, or, when `into` is not empty, these active HBM blocks: one for each in
  // DRAM; when another swap in brings some of the pages first, the last of `into` are not needed and stay active.
  // `after`: as in swap_out, for what may still use the blocks that are moved to.
  std::vector<IndexPin> swap_in(std::span<const Address> addresses, std::span<const Address> into, Address* out,
                                const CallerStream& after = {});
  // The same, carried out by a thread of the pool, those of one direction one after the other. What is wrong with the
  // arguments is thrown here, the handle tells the rest. What swap_in brings is pinned, and `into` reserved, from now
  // on. Other blocks are chosen when the work that `after` has been given until now has ended: if some were inserted or
  // freed meanwhile, all that the device has been given by then has to end, too (kState while a graph is captured).
  std::shared_ptr<Swap> begin_swap_out(std::size_t n, const CallerStream& after = {});
  std::shared_ptr<Swap> begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                      const CallerStream& after = {});
  // Whether HBM is on a GPU: then the CPU may not follow its addresses.
  bool on_device() const noexcept;
  // For a transfer that is to follow this stream; null without one. Throws kArgument for a stream of something else.
  std::shared_ptr<const DeviceOrder> order_after(const CallerStream& stream);

  // --- as a member of a cluster (pool.cpp) ---

  // From now on addresses carry this id. Throws kState when they carry another one already.
  void set_instance(std::uint32_t instance);
  std::uint32_t instance() const noexcept { return instance_.load(std::memory_order_relaxed); }
  // For the service, which knows whose these blocks are.
  PeerClaims& for_peers() noexcept { return *claims_; }

  // --- a logical instance ---
  const std::optional<Sharding>& sharding() const noexcept;
  // Who copies blocks between the tiers, since their memory is not here. Null: nobody, there is no content yet, or no
  // more. It is not called any more when this has returned.
  void set_mover(TierMover* mover);

  // --- what there is (pool.cpp) ---

  PoolStats stats();
  PoolStats audit();
  const Layout& layout() const noexcept;
  std::shared_ptr<Arena> arena(Medium medium);
  MediumMap<std::shared_ptr<Arena>> arenas();

 private:
  PoolStats stats_locked() noexcept;

  PoolGuard guard_;
  std::unique_ptr<PoolMemory> memory_;
  std::shared_ptr<BlockSpace> space_;
  std::unique_ptr<CacheBlocks> blocks_;
  std::unique_ptr<PromptCache> cache_;
  std::unique_ptr<TierMoves> moves_;
  std::unique_ptr<PoolAllocator> allocator_;
  std::unique_ptr<PeerClaims> claims_;
  std::atomic<std::uint32_t> instance_{0};
};

}  // namespace kvpool
