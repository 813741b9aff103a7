// The pool of one instance: two tiers of blocks, the prompt index over them, and the verbs.
//
// Locks
//   mutex_    guards everything below; held for microseconds, never while bytes are copied, never while waiting for
//             Python. A thread that holds Python's GIL may take it. Swaps and evictions go in batches of kBatchBlocks;
//             delete and audit take as long as what they delete or look at.
//   reclaim_  one at a time: swaps out, eviction, deletion, room that is made. Taken before mutex_, held while bytes go
//             to DRAM; callers let go of the GIL first. So a node that is held for copying is met only by matches,
//             insertions, frees, and swaps in.
//   swap_in_mutex_  one at a time: swaps in. Taken before reclaim_, which a swap in has only while it makes room, so
//   both
//             directions copy at once. What it brings is pinned from its first look at the index to its last, in which
//             the pages become the caller's: nobody evicts, deletes or moves them meanwhile, and others may match, cut
//             or read them, as any pinned pages.
//
// Errors: every verb that throws, Error or std::bad_alloc, has changed nothing. One exception: room that alloc and the
// swaps made is not unmade. If another thread takes it, memory runs out, or the GPU begins to refuse, before it could
// be used, cached prompts have moved down a tier or gone.
//
// After fork every verb throws kFork in the child, and destruction there frees nothing that the parent uses.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/arena/device_memory.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/adopted_pages.h"
#include "kvpool/blocks/block_copy.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/blocks/parallel.h"
#include "kvpool/index/pins.h"
#include "kvpool/index/prompt_index.h"
#include "kvpool/pool/move_order.h"
#include "kvpool/pool/pending_swap_in.h"
#include "kvpool/pool/pool_observer.h"
#include "kvpool/pool/tier_mover.h"

namespace kvpool {

class DeviceMover;
class DeviceOrder;
class Swap;
class SwapThreads;
enum class TierWay : std::uint8_t;

struct AdoptedMemory {
  std::uint32_t blocks = 0;
  std::vector<Segment> segments;
  std::shared_ptr<void> keepalive;
  int device = -1;                        // the GPU that it is on; -1: ordinary memory
  bool engine_allocates = false;          // the engine's allocator decides; the pool mirrors it with adopt() and free()
  std::vector<TensorShape> tensors = {};  // what the segments are of; empty: only sizes are checked
};

struct PoolOptions {
  Layout layout;
  std::uint32_t hbm_blocks = 0;
  std::uint32_t dram_blocks = 0;
  std::optional<AdoptedMemory> adopted_hbm;
  int device = -1;  // the GPU that HBM is on; -1: ordinary memory. Of adopted memory: its own counts
  DeviceMemoryKind device_memory = DeviceMemoryKind::kAuto;
  EvictionPolicy policy = EvictionPolicy::kLru;
  int copy_threads = 2;
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;
  bool check_memory = true;
  bool pin_dram = false;               // REQUIRED of a pool with both tiers whose HBM is on a GPU
  bool audit = false;                  // after every verb
  bool zero_on_alloc = false;          // blocks are handed out as zeros
  std::uint32_t first_generation = 0;  // of the blocks; 0: far from other pools'. For tests that replay bit by bit
  // The scheduler of a logical instance: its blocks are counted and indexed here, and have their memory in ranks.
  std::optional<Sharding> sharding;
};

struct PoolCounters {
  std::uint64_t allocated_blocks = 0;
  std::uint64_t freed_blocks = 0;
  std::uint64_t match_calls = 0;
  std::uint64_t requested_tokens = 0;
  std::uint64_t matched_tokens = 0;
  std::uint64_t inserted_blocks = 0;
  std::uint64_t duplicate_blocks = 0;
  std::uint64_t evicted_blocks = 0;
  std::uint64_t swapped_out_blocks = 0;
  std::uint64_t swapped_in_blocks = 0;
};

struct MediumCounts {
  std::uint32_t capacity = 0;
  std::array<std::uint32_t, kBlockStateCount> by_state{};
  std::uint32_t evictable = 0;  // of the historical ones: neither pinned nor being moved
  FreeRuns free_runs{};
};

struct PoolStats {
  MediumMap<MediumCounts> media;
  PoolCounters counters;
  std::size_t index_nodes = 0;
  std::size_t index_blocks = 0;
  std::size_t index_bytes = 0;
  std::size_t namespaces = 0;
  std::uint64_t metadata_bytes = 0;
  std::uint64_t device_bytes = 0;  // of a GPU's memory, that the pool has taken
};

struct InsertOutcome {
  IndexPin pin;
  std::size_t inserted = 0;         // blocks newly stored
  std::vector<Address> duplicates;  // given blocks whose page was there before; still active
};

struct InsertItem {
  const Token* tokens;
  std::size_t n_tokens;
  const Address* addresses;
  std::size_t n_addresses;
  Address* canonical;  // room for n_addresses
};

struct MatchExplanation {
  std::size_t requested_tokens = 0;
  std::size_t matched_pages = 0;
  std::size_t partial_tokens = 0;
  MatchEnd end = MatchEnd::kComplete;
  std::vector<Address> addresses;
  // Other namespaces that hold more of these tokens, with how many pages.
  std::vector<std::pair<std::string, std::size_t>> elsewhere;
};

class Pool final : public PinOwner, public std::enable_shared_from_this<Pool>, private IndexObserver {
 public:
  // Throws kArgument, kOutOfMemory, kUnsupported, kLayoutMismatch.
  explicit Pool(const PoolOptions& options);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the pool: every verb but unpin throws kClosed from now on. Views of the memory stay valid. Idempotent.
  void close() noexcept;
  bool zeroes_on_alloc() const noexcept { return zero_on_alloc_; }
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
  // What every verb begins with: throws kFork, kClosed, and what the pool has failed with.
  void guard() const;
  // For what tells of a pool that has failed: throws kFork, kClosed.
  void guard_open() const;
  // The content of its blocks is lost: from now on every verb but close and unpin throws this. The first call counts.
  void fail(const Error& why);
  // What it has failed with; nothing as long as it has not.
  std::optional<Error> failure();
  // Tells `observer` how the pool ends; null: nobody any more. REQUIRES: there is none, or null takes its place.
  // It is not called any more when this has returned.
  void observe(PoolObserver* observer);
  // Throws kFork: for handles, which outlive a pool that was closed.
  void guard_process() const;

  // --- blocks (alloc.cpp) ---

  // Takes n blocks if they are free; false if not. Of DISK there are none yet: it is kUnsupported, here and below.
  bool try_alloc(std::size_t n, MediumChoice medium, Address* out);
  // The same, making room: HBM moves to DRAM, DRAM is dropped, the least recently used first. `after`: as in swap_out.
  // Throws kOutOfBlocks.
  void alloc_evicting(std::size_t n, MediumChoice medium, Address* out, const CallerStream& after = {});
  // Throws kUnsupported for DISK.
  static void check_kept(MediumChoice medium);
  [[noreturn]] void throw_out_of_blocks(std::size_t n, MediumChoice medium);
  std::size_t capacity(MediumChoice medium) const noexcept { return space_.capacity(medium); }

  // Active blocks of the caller. Nothing is freed when an address is wrong.
  void free(const Address* addresses, std::size_t n);
  // Throws what free() would throw for those of this pool, and for an address that stands twice. Returns those of this
  // pool; leaves out the blocks of other instances, and frees nothing.
  std::vector<Address> check_free(const Address* addresses, std::size_t n);

  // Adopted memory whose engine allocates: the engine holds these blocks now (free -> active), until free(). HBM blocks
  // of such a pool are never anything else but reserved by a fetch that fills them: insert and the swaps refuse them.
  void adopt(const std::uint32_t* blocks, std::size_t n, Address* out);

  // --- cached prompts (cache.cpp) ---

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

  // --- moves between the tiers (swap.cpp, swap_in.cpp, swap_begin.cpp) ---

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
  bool on_device() const noexcept { return on_device_; }
  // For a transfer that is to follow this stream; null without one. Throws kArgument for a stream of something else.
  std::shared_ptr<const DeviceOrder> order_after(const CallerStream& stream);

  // --- blocks of peers (remote.cpp): for the service, which knows whose they are ---

  // From now on addresses carry this id. Throws kState when they carry another one already.
  void set_instance(std::uint32_t instance);
  std::uint32_t instance() const noexcept { return instance_.load(std::memory_order_relaxed); }

  // Takes n blocks to `to` (reserved or lent) for an owner, as alloc does; false when that needs room to be made and
  // `evict` is not set.
  bool take_for_peer(std::size_t n, MediumChoice medium, BlockState to, std::uint64_t epoch, std::uint32_t mark,
                     bool evict, Address* out);
  // Reserved, lent or quarantined blocks become free; those that an engine allocates become active, as they were before
  // a fetch was to fill them. REQUIRES: they are.
  void release_from_peer(const Address* addresses, std::size_t n) noexcept;
  void quarantine(const Address* addresses, std::size_t n) noexcept;
  // Throws kStaleAddress, kNotOwner, kArgument unless each is lent to this owner, or reserved for this mark of it.
  void check_writable(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark, bool lent_only);
  // Who owns a reserved or lent block.
  BlockOwner ownership_of(Address address) noexcept;
  // Reserved or lent blocks become active. REQUIRES: they are.
  void take_over(const Address* addresses, std::size_t n) noexcept;
  // As insert(), of a prompt whose last blocks are reserved or lent, to one owner: nobody meets these active in
  // between. Duplicates become free. REQUIRES: they are.
  IndexPin insert_arrived(std::string_view name_space, const InsertItem& item, std::span<const Address> arrived);
  // The caller's active blocks become reserved for an owner. Throws as free() does.
  void reserve_active(const Address* addresses, std::size_t n, std::uint64_t epoch, std::uint32_t mark);
  // As match(), but no use that is counted in the statistics; only what lies here.
  IndexHit match_for_peer(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);

  // Blocks that are read for a transfer stay as they are: what frees, evicts or moves them takes effect when the last
  // reader lets go. `for_epoch`: of the peer that asks, which may not read what is lent to another one; 0: the
  // application. Throws kStaleAddress, kNotOwner, kState, kArgument; then none is held.
  void hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_epoch);
  void release_reading(const Address* addresses, std::size_t n) noexcept;

  // --- a logical instance ---
  const std::optional<Sharding>& sharding() const noexcept { return sharding_; }
  // Who copies blocks between the tiers, since their memory is not here. Null: nobody, there is no content yet, or no
  // more. It is not called any more when this has returned.
  void set_mover(TierMover* mover);

  // --- what there is (audit.cpp) ---

  PoolStats stats();
  PoolStats audit();
  const Layout& layout() const noexcept { return layout_; }
  std::shared_ptr<Arena> arena(Medium medium);
  MediumMap<std::shared_ptr<Arena>> arenas();

 private:
  using Lock = std::unique_lock<std::mutex>;

  static constexpr std::size_t kBatchBlocks = 4096;  // moved or dropped at most before others get the lock

  void copy_tier(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after);
  void check_stream(const CallerStream& after);
  BlockStore& store(Medium medium) noexcept { return space_.store(medium); }
  BlockStore& store_of(Address address) noexcept { return space_.store_of(address); }

  void guard_alloc(MediumChoice medium) const;
  void audit_if_asked();
  PoolStats audit_locked();
  PoolStats stats_locked() noexcept;

  bool can_make_room(std::size_t n, MediumChoice medium) noexcept;
  [[noreturn]] void throw_out_of_blocks_locked(std::size_t n, MediumChoice medium);
  void hand_over(Lock& lock, const Address* addresses, std::size_t n);
  void zero_if_asked(Lock& lock, const Address* addresses, std::size_t n);
  void take_evicting(Lock& lock, std::size_t n, MediumChoice medium, BlockState to, Address* out,
                     const MoveOrder& order = CallerStream());

  void check_not_the_engines(const InsertItem& item) const;
  void check_insertion(std::string_view name_space, const InsertItem& item);
  std::vector<InsertOutcome> insert_locked(std::string_view name_space, std::span<const InsertItem> items,
                                           bool free_duplicates);
  void take_back(const InsertItem& item, const IndexInsertion& insertion) noexcept;

  std::size_t evict_locked(ValueClass value_class, std::size_t n) noexcept;
  void make_room(Lock& lock, std::size_t n, const MoveOrder& order);
  std::size_t move_to_dram(Lock& lock, std::size_t n, std::vector<Address>* moved, const MoveOrder& order);
  void make_dram_room(std::size_t n) noexcept;
  void renew(std::vector<Address>& addresses) noexcept;
  void check_two_tiers() const;
  std::vector<Address> carry_out_swap(std::size_t n, const MoveOrder& order);
  void begin_swap_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending);
  void finish_swap_in(PendingSwapIn& pending, const MoveOrder& order);
  void abandon_swap_in(PendingSwapIn& pending) noexcept;
  Address page_of(Address address) noexcept;
  void gather_swap_in(std::span<const Address> given, PendingSwapIn& pending);
  void name_swap_in(std::span<const Address> into, PendingSwapIn& pending);
  void find_swap_in(PendingSwapIn& pending) noexcept;
  void prepare_swap_in(PendingSwapIn& pending, const MoveOrder& order);
  void reserve_swap_in(Lock& lock, PendingSwapIn& pending, const MoveOrder& order);
  void give_back_swap_in(PendingSwapIn& pending, std::size_t keep) noexcept;
  void copy_swap_in(Lock& lock, const PendingSwapIn& pending, const MoveOrder& order);
  void commit_swap_in(PendingSwapIn& pending);
  std::shared_ptr<Swap> make_swap(const CallerStream& after);
  ReuseCounts reuse_counts() noexcept;
  bool is_late(TierWay way, const MoveOrder& order) noexcept;
  void follow_device(Swap& swap, const ReuseCounts& now);
  void lock_to_reclaim(Lock& reclaim, Lock& lock, const MoveOrder& order);
  void probe_device(Lock& lock);

  void placed(PromptNode& node) noexcept override;
  void dropped(const Address* values, std::size_t n) noexcept override;
  void unpinned(PromptNode& node, std::uint64_t stamp) noexcept override;
  PromptNode* node_of(Address address) noexcept {
    return reinterpret_cast<PromptNode*>(
        store_of(address).tag(block_of(address)));  // NOLINT(performance-no-int-to-ptr)
  }

  Layout layout_;
  const std::optional<Sharding> sharding_;
  TierMover* mover_ = nullptr;  // set under both swap_in_mutex_ and reclaim_
  std::atomic<bool> failed_{false};
  std::optional<Error> why_failed_;  // written before failed_
  bool audit_each_call_;
  bool zero_on_alloc_;
  bool on_device_ = false;
  std::uint32_t made_in_;  // fork generation
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> instance_{0};

  std::mutex observer_mutex_;         // taken before every other lock; held while the observer hears of the closing
  PoolObserver* observer_ = nullptr;  // set under both observer_mutex_ and mutex_

  std::unique_ptr<SwapThreads> swap_threads_;
  std::mutex swap_in_mutex_;
  std::mutex reclaim_;
  std::mutex mutex_;
  std::condition_variable swap_in_ended_;  // with mutex_: a swap in copies no more
  std::uint64_t swaps_in_begun_ = 0;       // copies of swaps in; at most one is under way
  std::uint64_t swaps_in_over_ = 0;
  BlockSpace space_;
  MediumMap<std::shared_ptr<Arena>> arenas_;
  CopyTeam team_;
  bool two_tiers_ = false;
  // HBM to DRAM and back, in ordinary memory, or between a GPU and the host.
  std::optional<BlockCopier> out_copier_;
  std::optional<BlockCopier> in_copier_;
  std::shared_ptr<DeviceMover> device_mover_;
  std::unique_ptr<PromptIndex> index_;
  std::vector<Limbo> limbo_;
  PoolCounters counters_;
  std::uint64_t dropped_blocks_ = 0;  // by the index, for whatever reason
  std::uint32_t move_stamp_ = 0;      // marks cached blocks, likewise
};

}  // namespace kvpool
