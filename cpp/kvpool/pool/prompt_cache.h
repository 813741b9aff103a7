// The cached prompts of one pool: the index over its blocks, pins, the eviction order, and the steps that move cached
// blocks.
//
// Each step here takes microseconds, under the lock of the space. TierMoves does what takes longer (copies, waiting for
// a GPU) between two such steps.
//
// Invariants
//   A1  Every local address in the index names a historical block whose tag is that node.
//   A2  Every other historical block is in limbo, has the limbo tag, and its node still has the pins that hold it;
//       or it was forgotten while it was pinned, and its tag is its node, as in A1.
//   A3  The pages of a swap in are pinned from its checks to its end. Each page lies where it lay then, in a node that
//       may have been cut; or another swap in has brought it: then the old block is in limbo, and its mark names the
//       page's new block.
//   A17  A block that is being filled is historical, its mark names the insertion that brought it, and a pin of that
//        insertion covers it until filled() has been called for all of its blocks. So it is not evicted, moved or given
//        away meanwhile; and no reader and no peer gets it. If it was forgotten before filled(), nobody knows whether
//        its content ever came: it stays unreadable, with the mark kNeverFilled, until its last pin goes.
//   A18 to A20, of a pool with a disk, are in disk_copies.h.
//
// Thread-safety: none; callers hold the lock of the space. Every method that throws has changed nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/blocks/cached_blocks.h"
#include "kvpool/index/prompt_index.h"
#include "kvpool/pool/cache_results.h"
#include "kvpool/pool/disk_copies.h"
#include "kvpool/pool/pending_swap_in.h"
#include "kvpool/pool/pool_stats.h"

namespace kvpool {

// Which pages of a prompt to write to disk.
struct DiskChoice {
  std::size_t most = 0;     // pages
  bool everything = false;  // also what the admission policy does not admit
  bool from_hbm = true;     // the CPU can read HBM
};

// An insertion of blocks whose content is still to come.
struct Fill {
  IndexPin pin;                 // on its last page
  std::uint32_t remaining = 0;  // how many blocks are not filled yet
};

class PromptCache final : private IndexObserver, private CachedBlocks {
 public:
  // `blocks` outlives this. `audits`: whether audit_if_asked() audits. Throws kArgument, std::bad_alloc.
  PromptCache(CacheBlocks& blocks, std::uint32_t block_tokens, EvictionPolicy policy, bool audits);
  ~PromptCache() override;
  PromptCache(const PromptCache&) = delete;
  PromptCache& operator=(const PromptCache&) = delete;

  // --- prompts (prompt_cache.cpp) ---

  // `out` has room for n_tokens / block_tokens addresses. In a space with quotas it finds, and pins, no more than
  // leaves all reserves intact.
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // As match(), but does not count in the statistics, and finds only blocks of this pool whose content is there.
  IndexHit match_for_peer(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // All or nothing for the whole batch. Throws kOutOfBlocks (kQuota) when pins on pages that are there would break the
  // quotas.
  // A page that lies on DISK moves to the block that is given for it, if that has its content.
  std::vector<InsertOutcome> insert(std::string_view name_space, std::span<const InsertItem> items,
                                    bool free_duplicates, bool has_content = true);
  // As insert() of one prompt. The content of the blocks that it stores is still to come (A17).
  InsertOutcome insert_unfilled(std::string_view name_space, const InsertItem& item, bool free_duplicates);
  // Before an insertion of content that has come from elsewhere, behind a prefix that was cached when it was asked for.
  // Throws kBusy, which passes: when a page that is cached is still being filled, because the insertion would keep that
  // and drop the content that is there; and when the prefix was forgotten meanwhile.
  void check_arrival(std::string_view name_space, const InsertItem& item) const;
  // The content of these blocks is there, or nothing will write to them any more. Those that were forgotten meanwhile
  // stay unreadable. Throws kState for a block that is not being filled.
  void filled(std::span<const Address> addresses);
  // Drops cached blocks and everything below them: those that are pinned are found no more, and become free with their
  // last pin. Skips what is gone already. Returns how many. REQUIRES: nothing is being moved to DRAM. Throws kArgument,
  // kNotOwner, kState for a block that is not cached, std::bad_alloc.
  std::size_t forget(std::span<const Address> addresses);
  // Throws kStaleAddress for a block that was forgotten. REQUIRES: they are here and owned.
  void check_found(std::span<const Address> addresses) const;
  // Throws kState when some of it is pinned.
  std::size_t erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants);
  // Drops up to n blocks of this medium, the coldest first, and everything below them, in any medium. Returns how many
  // blocks of this medium it dropped; those that a transfer reads become free later.
  std::size_t evict(Medium medium, std::size_t n) noexcept;
  // Whether a historical block is neither pinned, moved nor read. Cheap, and no promise of droppable().
  bool unused(Medium medium, std::uint32_t block) const noexcept;
  // Of a historical block that nothing holds: how many blocks of its medium drop() would drop, if it is at most `most`.
  std::optional<std::uint32_t> droppable(Medium medium, std::uint32_t block, std::uint32_t most) const noexcept;
  // Drops this block and everything that continues it. REQUIRES: droppable(), nothing is being moved to DRAM. Throws
  // std::bad_alloc.
  void drop(Medium medium, std::uint32_t block);
  // REQUIRES: `explanation.addresses` has room for all pages.
  void explain(std::string_view name_space, const Token* tokens, std::size_t n_tokens, MatchExplanation& explanation);
  void unpin(const IndexPin* pins, std::size_t n) noexcept;
  // Drops everything: what is pinned, with its last pin. REQUIRES: no match, insertion or move begins after it.
  void end() noexcept;
  EventLog& events() noexcept { return index_.events(); }
  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens, bool include_cached) {
    return index_.subscribe(capacity_tokens, include_cached);
  }
  // Addresses with this id are the pool's own; 0: no longer.
  void accept_instance(std::uint32_t instance) noexcept;
  // Also puts the id into the addresses of cached blocks, so that other instances can use the addresses of matches.
  void set_instance(std::uint32_t instance) noexcept;

  // --- room ---

  // Blocks that evict() can drop: neither pinned nor being moved.
  std::size_t evictable(Medium medium) const noexcept { return index_.evictable(value_class_of(medium)); }
  // Blocks that are free or can be dropped.
  std::size_t possible(MediumChoice medium) const noexcept;
  bool can_make_room(std::size_t n, MediumChoice medium) const noexcept { return n <= possible(medium); }
  [[noreturn]] void throw_out_of_blocks(std::size_t n, MediumChoice medium) const;

  // --- moves to DRAM (cache_moves.cpp) ---

  // Cached HBM blocks whose bytes are being copied to DRAM: whole nodes, which are not evicted, deleted or moved
  // meanwhile. A match or an insertion may cut them, so each block's node is looked up again by its tag.
  struct MoveOut {
    std::vector<Address> from;
    std::vector<Address> to;  // reserved as their destinations
  };
  // Chooses up to n of the coldest. REQUIRES: n DRAM blocks are free. Throws std::bad_alloc.
  MoveOut begin_move_out(std::size_t n);
  // The bytes have arrived: points the index at the copies, except for blocks that were pinned meanwhile, which stay.
  // Returns how many moved and adds their addresses to `moved`, which has room for them, unless it is null.
  std::size_t finish_move_out(MoveOut& move, std::vector<Address>* moved) noexcept;
  void cancel_move_out(MoveOut& move) noexcept;

  // --- moves to HBM (cache_moves.cpp) ---

  // Checks everything, pins the pages, and reserves `into`.
  void begin_move_in(std::span<const Address> given, std::span<const Address> into, PendingSwapIn& pending);
  // Finds where the pages lie now: another swap in may have brought some.
  void find_move_in(PendingSwapIn& pending) noexcept;
  // The bytes have arrived: points the index at the copies and pins the pages for the caller. Blocks that others may
  // still read by their old address stay in limbo until the last earlier pin is released. Throws std::bad_alloc.
  void finish_move_in(PendingSwapIn& pending);
  // Gives back the pins and blocks of a swap in that fails.
  void cancel_move_in(PendingSwapIn& pending) noexcept;
  // Gives back all destinations but the first `keep`: to the caller, if it named them.
  void give_back(PendingSwapIn& pending, std::size_t keep) noexcept;

  // --- copies on disk (cache_disk.cpp) ---

  // From now on pages have copies on disk, which `copies` knows, and what is evicted goes on being found there.
  // REQUIRES: `copies` outlives this, or forget_disk() is called before.
  void use_disk(DiskCopies& copies) noexcept { copies_ = &copies; }
  bool has_disk() const noexcept { return copies_ != nullptr; }
  // Chooses the first pages without a copy of the prompt that ends with this page, and reserves slots for them, making
  // room as make_disk_room() does. Empty without such pages, or if the prompt is gone. REQUIRES: has_disk(). Throws
  // std::bad_alloc.
  DiskPages begin_disk_write(Address last, const DiskChoice& choice);
  // They are not written after all.
  void cancel_disk_write(const DiskPages& write) noexcept;
  // They were written, or not, as written[first] and what follows it says. Returns how many pages have a copy now;
  // pages that are gone need none.
  std::size_t finish_disk_write(const DiskPages& write, const std::vector<bool>& written, std::size_t first) noexcept;
  // The last pages of what begin_disk_write() could choose from.
  std::vector<Address> ends_without_copies() const;
  // Checks everything and pins the pages, of which those on DISK are to come to DRAM.
  void begin_bring(std::span<const Address> given, PendingSwapIn& pending);
  // The bytes have arrived in `to`, one for each of `from`: points the index at them, and pins the pages for the
  // caller. Their slots are copies from now on, so old addresses stay good.
  void finish_bring(PendingSwapIn& pending);
  // Of the entry in this slot, as the store knows it; 0 without a disk.
  std::uint64_t disk_generation(Address slot) const noexcept;
  // The entry of this page is damaged or gone: drops the page and what continues it. REQUIRES: nothing is being moved
  // to DRAM.
  std::size_t lose(Address slot);
  // Stores pages that were found on disk. Pages that are cached keep their addresses, which `canonical` gets.
  void recover(std::string_view name_space, std::span<const Token> tokens, std::span<const Address> slots,
               std::span<Address> canonical);
  // Drops everything that lies on DISK, and all copies: the disk is not used any more. REQUIRES: nothing is being moved
  // to DRAM. Throws std::bad_alloc.
  void forget_disk();

  // --- state (cache_audit.cpp) ---

  // How often HBM blocks have changed owners.
  ReuseCounts reuse_counts() const noexcept;
  PoolCounters& counters() noexcept { return counters_; }
  // All but the sizes of the memory.
  PoolStats stats() const noexcept;
  // Checks the space, the index, A1 and A2. Throws kAudit.
  void audit() const;
  void audit_if_asked() const {
    if (audits_) [[unlikely]] {
      audit();
    }
  }

 private:
  const BlockStore& store(Medium medium) const noexcept { return blocks_.store(medium); }
  const BlockStore& store_of(Address address) const noexcept { return blocks_.store_of(address); }
  PromptNode* node_of(Address address) const noexcept {
    return reinterpret_cast<PromptNode*>(
        blocks_.store_of(address).tag(block_of(address)));  // NOLINT(performance-no-int-to-ptr)
  }
  void check_not_the_engines(const InsertItem& item) const;
  void check_insertion(std::string_view name_space, const InsertItem& item);
  std::optional<std::size_t> first_misplaced(const InsertItem& item, std::size_t present) const noexcept;
  IndexHit match_within(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);
  // Of an operation that pins: whether it has pinned what nobody had pinned before, beyond the quotas.
  struct Pinnable {
    MediumMap<std::size_t> blocks{};
  };
  Pinnable pinnable() const noexcept;
  bool overdrawn_since(const Pinnable& before, MediumMap<std::uint32_t> freed_soon) const noexcept;
  void check_quotas_since(const Pinnable& before, std::span<const InsertOutcome> freed) const;
  // Cached blocks that a pin would make active.
  std::size_t pinnable(Medium medium) const noexcept { return evictable(medium) + index_.held(value_class_of(medium)); }
  std::uint32_t unpinned_blocks(Medium medium) const noexcept override {
    const std::uint32_t arriving = medium == Medium::kDram ? arriving_ : 0;
    return static_cast<std::uint32_t>(pinnable(medium)) + arriving;
  }
  void drop_if_ended() noexcept;
  void take_back(const InsertItem& item, const IndexInsertion& insertion) noexcept;

  void cut_before(std::span<const Address> pages);
  void check_not_forgotten(std::span<const Address> pages) const;
  void make_room_for_fill();
  void gather(std::span<const Address> given, PendingSwapIn& pending);
  void name_room(std::span<const Address> into, PendingSwapIn& pending);
  void redirect(PendingSwapIn& pending);
  void renew(std::vector<Address>& addresses) const noexcept;
  void pin_all(PendingSwapIn& pending);
  Address page_of(Address address) const noexcept;

  Address slot_address(std::uint32_t slot) const noexcept;
  void want(Address last) noexcept;
  PromptNode* node_if_cached(Address address) const noexcept;
  template <class Visit>
  void for_each_to_write(PromptNode* end, std::size_t most, const DiskChoice& choice, DiskPages& write,
                         Visit&& visit) const;
  void set_being_written(Address page, Address slot) noexcept;
  void page_is_gone(Address page) noexcept;
  Address page_written_to(Address slot) const noexcept;
  void want_what_continues(Address page) noexcept;
  void want_moved(const PromptNode& node) noexcept;
  void make_disk_room(std::size_t n, const PromptNode& end) noexcept;
  std::size_t drop_disk_leaves(std::size_t n) noexcept;
  std::size_t drop_cold_copies(std::size_t n, const PromptNode& end) noexcept;
  PromptNode* cold_copied_node(std::uint64_t before) noexcept;
  std::uint32_t copied_pages(const PromptNode& node) const noexcept;
  bool continued_on_disk(PromptNode* node, std::uint32_t copied) const noexcept;
  void adopt(const InsertItem& item, PromptNode* last);
  void set_copy(Address page, Address slot) noexcept;
  void drop_copy(Address page) noexcept;
  void drop_copies(const PromptNode& node) noexcept;
  void move_copy(Address from, Address to) noexcept;
  std::size_t evict_keeping_copies(Medium medium, std::size_t n) noexcept;
  std::size_t leave_to_copies(PromptNode* node) noexcept;
  void audit_copies() const;

  void placed(PromptNode& node) noexcept override;
  void dropped(const Address* values, std::size_t n) noexcept override;
  void unpinned(PromptNode& node, std::uint64_t stamp) noexcept override;

  CacheBlocks& blocks_;
  const bool audits_;
  PromptIndex index_;
  std::vector<Limbo> limbo_;
  std::vector<Fill> fills_;
  std::vector<std::uint32_t> free_fills_;  // of these, with room for all
  PoolCounters counters_;
  std::uint32_t arriving_ = 0;        // DRAM blocks that moves go to
  std::uint64_t dropped_blocks_ = 0;  // by the index, for whatever reason
  std::uint32_t move_stamp_ = 0;      // marks cached blocks, while a list is checked for duplicates
  bool ended_ = false;                // end() was called
  DiskCopies* copies_ = nullptr;      // null: no disk
  std::uint32_t next_slot_ = 0;       // where the search for a cold copy goes on
};

}  // namespace kvpool
