#include "kvpool/blocks/cache_blocks.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "kvpool/base/error.h"

namespace kvpool {

namespace {

std::uint32_t checked_units(std::uint32_t block_units) {
  if (block_units >= 1) return block_units;
  throw Error(ErrorCode::kArgument, "a block has at least one unit");
}

// An engine names the blocks that it takes by their numbers, each of which another cache's block may overlap.
bool checked_allocates(const BlockSpace& space, bool engine_allocates) {
  if (!engine_allocates || !space.shared()) return engine_allocates;
  throw Error(ErrorCode::kUnsupported, "an engine cannot allocate blocks of a space that several caches share");
}

using One = std::integral_constant<std::uint32_t, 1>;

// visit(medium, first, n) for every run of blocks whose numbers ascend in the list by `step`.
template <class Step, class Visit>
void for_each_run(const Address* addresses, std::size_t n, Step step, Visit&& visit) {
  for (std::size_t i = 0; i < n;) {
    const std::uint32_t first = block_of(addresses[i]);
    const std::uint32_t bits = medium_bits_of(addresses[i]);
    std::uint32_t run = 1;
    while (i + run < n && block_of(addresses[i + run]) == first + run * step &&
           medium_bits_of(addresses[i + run]) == bits) {
      ++run;
    }
    visit(static_cast<Medium>(bits), first, run);
    i += run;
  }
}

}  // namespace

CacheBlocks::CacheBlocks(BlockSpace& space, const CacheShape& shape)
    : space_(space),
      seat_(space),
      block_units_(checked_units(shape.block_units)),
      engine_allocates_(checked_allocates(space, shape.engine_allocates)),
      shared_(space.shared()),
      stores_{make_store(Medium::kHbm, shape), make_store(Medium::kDram, shape), make_store(Medium::kDisk, shape)},
      pieces_{make_pieces(Medium::kHbm, shape), make_pieces(Medium::kDram, shape), make_pieces(Medium::kDisk, shape)},
      piece_units_(shape.pieces) {
  static_assert(kMedia.size() == 3, "each has its store");
  space_.enter(*this);
}

CacheBlocks::~CacheBlocks() { space_.leave(*this); }

BlockStore CacheBlocks::make_store(Medium medium, const CacheShape& shape) const {
  const auto range = space_.generations_of(number(), medium, shape.first_generations[medium]);
  const std::uint32_t blocks = space_.blocks(medium, block_units_);
  if (!shared_) return BlockStore(medium, blocks, range.first, range.last);
  const std::uint32_t apart = shape.pieces == 0 ? 1 : std::max(block_units_ / shape.pieces, 1U);  // checked later
  return BlockStore(medium, blocks, BlockStore::Placed{space_.numbers(medium, block_units_), apart}, range.first,
                    range.last);
}

std::shared_ptr<BlockPieces> CacheBlocks::make_pieces(Medium medium, const CacheShape& shape) const {
  if (shape.pieces == 0 || block_units_ % shape.pieces != 0 || (shape.pieces > 1 && !shared_)) {
    throw Error(ErrorCode::kArgument,
                std::to_string(shape.pieces) + " pieces of a block of " + std::to_string(block_units_) +
                    " units: each must have as many whole units, of a space for several caches",
                {{"pieces", shape.pieces}, {"units", block_units_}});
  }
  return std::make_shared<BlockPieces>(stores_[medium].numbers(), stores_[medium].capacity(), shape.pieces,
                                       block_units_ / shape.pieces);
}

void CacheBlocks::check_instance(std::uint32_t instance) const {
  for (const BlockSpace::Seat& seat : space_.seats_) {
    if (seat.cache == nullptr || seat.cache == this || seat.cache->instance() != instance) continue;
    throw Error(ErrorCode::kState, "another cache of the space is instance " + std::to_string(instance) + " already",
                {{"instance", instance}});
  }
}

void CacheBlocks::accept_instance(std::uint32_t instance) {
  if (instance != 0) check_instance(instance);
  for (BlockStore& blocks : stores_) blocks.accept_instance(instance);
}

void CacheBlocks::set_instance(std::uint32_t instance) {
  check_instance(instance);
  for (BlockStore& blocks : stores_) blocks.set_instance(instance);
}

std::size_t CacheBlocks::capacity(MediumChoice choice) const noexcept {
  std::size_t capacity = 0;
  for (const Medium medium : kMedia) {
    if (choice == medium || gives(choice, medium)) capacity += store(medium).capacity();
  }
  return capacity;
}

// --- taken and given back ---

bool CacheBlocks::take(std::size_t n, MediumChoice choice, BlockState to, Address* out) noexcept {
  if (!choice.is_mixed()) return take_from(static_cast<Medium>(choice.code()), n, to, out);
  const std::size_t in_hbm = gives(choice, Medium::kHbm) ? free_blocks(Medium::kHbm, n) : 0;
  if (free_blocks(Medium::kDram, n - in_hbm) < n - in_hbm) return false;
  return take_from(Medium::kHbm, in_hbm, to, out) && take_from(Medium::kDram, n - in_hbm, to, out + in_hbm);
}

std::size_t CacheBlocks::takeable(std::size_t n, Medium medium) const noexcept {
  n = free_blocks(medium, n);
  return space_.has_quotas() ? std::min(n, space_.may_take(*this, medium)) : n;
}

std::size_t CacheBlocks::cacheable(Medium medium, std::size_t most) const noexcept {
  if (space_.has_quotas()) most = std::min(most, space_.may_cache(*this, medium));
  return free_blocks(medium, most);
}

bool CacheBlocks::take_within(std::size_t n, MediumChoice choice, BlockState to, Address* out) noexcept {
  if (!space_.has_quotas()) [[likely]] {
    return take(n, choice, to, out);
  }
  if (!choice.is_mixed()) {
    const auto medium = static_cast<Medium>(choice.code());
    return takeable(n, medium) == n && take_from(medium, n, to, out);
  }
  const std::size_t in_hbm = takeable(n, Medium::kHbm);
  if (takeable(n - in_hbm, Medium::kDram) < n - in_hbm) return false;
  return take_from(Medium::kHbm, in_hbm, to, out) && take_from(Medium::kDram, n - in_hbm, to, out + in_hbm);
}

bool CacheBlocks::take_from(Medium medium, std::size_t n, BlockState to, Address* out) noexcept {
  BlockStore& blocks = stores_[medium];
  if (hbm_closed_ && medium == Medium::kHbm && n > 0) return false;
  if (shared_) [[unlikely]] {
    return take_units(medium, n, to, out);
  }
  return n <= blocks.free_count() && blocks.take(static_cast<std::uint32_t>(n), to, out);
}

// A block that is taken whole leaves room for as many pieces fewer as it has: its units are as many times those of a
// piece, from the front of one run. So if the pieces of all fit before, they fit when some are taken whole.
bool CacheBlocks::take_units(Medium medium, std::size_t n, BlockState to, Address* out) noexcept {
  if (free_blocks(medium, n) < n) return false;
  UnitSet& units = space_.mutable_units(medium);
  const std::size_t whole = pieces_count() == 1 ? n : units.fits(block_units_, n);
  units.take(block_units_, whole, number(), [&](std::uint32_t first, std::uint32_t count) {
    stores_[medium].place(first, block_units_, count, to, out);
    out += count;
  });
  for (std::size_t i = whole; i < n; ++i) take_scattered(medium, to, out++);
  return true;
}

void CacheBlocks::take_scattered(Medium medium, BlockState to, Address* out) noexcept {
  space_.mutable_units(medium).take_pieces(run_units(), piece_units_, number());
  pieces_[medium]->scatter(piece_units_.front(), piece_units_);
  stores_[medium].place(piece_units_.front(), block_units_, 1, to, out);
}

bool CacheBlocks::take_block(Medium medium, std::uint32_t block, BlockState to, Address* out) noexcept {
  KVPOOL_DCHECK(!shared_);
  if (hbm_closed_ && medium == Medium::kHbm) return false;
  return stores_[medium].take_block(block, to, out);
}

FreeRuns CacheBlocks::free_runs(Medium medium) const noexcept {
  if (!shared_) return store(medium).free_runs();
  const UnitSet& units = space_.unit_set(medium);
  return {units.free_runs(), units.longest_free() / block_units_};
}

void CacheBlocks::release(const Address* addresses, std::size_t n) noexcept {
  if (shared_) [[unlikely]] {
    return for_each_run(addresses, n, block_units_, [&](Medium medium, std::uint32_t first, std::uint32_t run) {
      release_units(medium, first, run);
    });
  }
  for_each_run(addresses, n, One{},
               [&](Medium medium, std::uint32_t first, std::uint32_t run) { release_run(medium, first, run); });
}

void CacheBlocks::release_run(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  const auto& readers = readers_[medium];
  const std::uint32_t end = first + n;
  std::uint32_t unread = first;  // [unread, block) can go
  for (std::uint32_t block = first; !readers.empty() && block < end; ++block) {
    if (readers[block] == 0) continue;
    wait_for_readers(medium, block);
    if (block > unread) stores_[medium].release(unread, block - unread);
    unread = block + 1;
  }
  if (end > unread) stores_[medium].release(unread, end - unread);
}

// Blocks that lie one after another in the units of a space.
void CacheBlocks::release_units(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  const std::uint32_t end = first + n * block_units_;
  const bool all = readers_[medium].empty() && pieces_[medium]->scattered() == 0;
  for (std::uint32_t block = first; block < end;) {
    std::uint32_t after = all ? end : block;  // the blocks up to this one are whole, and nobody reads them
    while (after < end && !is_read(medium, after) && pieces_[medium]->whole(after)) after += block_units_;
    if (after > block) {
      give_back_whole(medium, block, (after - block) / block_units_);
      block = after;
      continue;
    }
    if (is_read(medium, block)) {
      wait_for_readers(medium, block);
    } else if (stores_[medium].unplace(block, block_units_, 1) == 1) {
      space_.mutable_units(medium).give_back_pieces(run_units(), pieces_[medium]->units_of(block));
      pieces_[medium]->forget(block);
    }
    block += block_units_;
  }
}

// A block that is retired keeps its units.
void CacheBlocks::give_back_whole(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  while (n > 0) {
    const std::uint32_t gone = stores_[medium].unplace(first, block_units_, n);
    if (gone > 0) space_.mutable_units(medium).give_back(first, block_units_, gone);
    const std::uint32_t done = std::min(gone + 1, n);
    first += done * block_units_;
    n -= done;
  }
}

// --- addresses that callers name ---

void CacheBlocks::check(Address address, std::size_t position, std::optional<BlockState> wanted) const {
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, "address " + std::to_string(address) + " (position " + std::to_string(position) + "): " + what,
                {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
  };
  const std::uint32_t bits = medium_bits_of(address);
  if (!is_medium(bits)) {
    fail(ErrorCode::kArgument, "names no medium; it is no address of a pool");
  }
  if (!is_local(address)) {
    throw Error(ErrorCode::kNotOwner,
                "address " + std::to_string(address) + " (position " + std::to_string(position) +
                    ") belongs to instance " + std::to_string(instance_of(address)),
                {{"address", static_cast<std::int64_t>(address)},
                 {"position", static_cast<std::int64_t>(position)},
                 {"instance", instance_of(address)}});
  }
  const BlockStore& blocks = store_of(address);
  const std::uint32_t block = block_of(address);
  const AddressFault fault = blocks.find(address);
  if (fault != AddressFault::kNone && space_.is_of_another(number(), address)) {
    fail(ErrorCode::kNotOwner, "belongs to another cache of the space");
  }
  switch (fault) {
    case AddressFault::kNone:
      break;
    case AddressFault::kOutOfRange:
      fail(ErrorCode::kArgument, std::string(medium_name(blocks.medium())) + " has " +
                                     std::to_string(blocks.numbers()) + " blocks, and this is block " +
                                     std::to_string(block));
      break;
    default: {
      // What a slot counts is the generation of the block that has it, or had it last.
      const bool begins_here = blocks.block_in(blocks.slot_of(block)) == block;
      fail(ErrorCode::kStaleAddress,
           std::string(medium_name(blocks.medium())) +
               (begins_here ? " block " + std::to_string(block) + " is at generation " +
                                  std::to_string(blocks.generation(block)) + ", the address at " +
                                  std::to_string(generation_of(address))
                            : " has no block that begins at unit " + std::to_string(block) + " now") +
               ": the block was freed or moved, or the address is another pool's");
    }
  }
  const BlockState state = blocks.state(block);
  if (!is_owned(state)) fail(ErrorCode::kStaleAddress, "the block is not allocated");
  if (wanted && state != *wanted) {
    std::string what = std::string("the block is ") + block_state_name(state) + ", not " + block_state_name(*wanted);
    if (state == BlockState::kHistorical) what += " (it belongs to the index: see delete and evict)";
    fail(ErrorCode::kState, what);
  }
}

bool CacheBlocks::check_active_and_distinct(const Address* addresses, std::size_t n, bool skip_cached) {
  bool skipped = false;
  bool ascending = true;
  Address before = 0;
  // Without the instance: one block has two addresses when one of them is older than the pool's id.
  constexpr Address kPlaceMask =
      (Address{1} << kInstanceShift) - 1 - (static_cast<Address>(kGenerationMax) << kGenerationShift);
  for (std::size_t i = 0; i < n; ++i) {
    const Address address = addresses[i];
    const std::uint32_t bits = medium_bits_of(address);
    const bool plain = is_medium(bits);
    const bool fine = plain && store_of(address).names(address, BlockState::kActive);
    if (!fine) [[unlikely]] {
      if (!skip_cached || !plain ||
          (is_local(address) && (store_of(address).find(address) != AddressFault::kNone ||
                                 store_of(address).state(block_of(address)) != BlockState::kHistorical))) {
        check(address, i, BlockState::kActive);
      }
      skipped = true;
      continue;
    }
    const Address place = address & kPlaceMask;
    ascending = ascending && place > before;
    before = place;
  }
  if (!ascending) check_distinct(addresses, n, new_stamp());  // strictly ascending: none stands twice
  return skipped;
}

void CacheBlocks::check_distinct(const Address* addresses, std::size_t n, std::uint64_t stamp) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_local(addresses[i]) || store_of(addresses[i]).state(block_of(addresses[i])) != BlockState::kActive)
      continue;
    BlockStore& blocks = own(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    if (blocks.tag(block) == stamp) {
      throw Error(
          ErrorCode::kArgument,
          "address " + std::to_string(addresses[i]) + " stands twice in the list (position " + std::to_string(i) + ")",
          {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    }
    blocks.set_tag(block, stamp);
  }
}

void CacheBlocks::check_reserved(const Address* addresses, std::size_t n, std::uint64_t incarnation,
                                 std::uint32_t mark) const {
  for (std::size_t i = 0; i < n; ++i) {
    check(addresses[i], i, std::nullopt);
    const BlockStore& blocks = store_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    const bool reserved = blocks.state(block) == BlockState::kReserved && blocks.tag(block) == incarnation &&
                          blocks.mark(block) == mark &&
                          incarnation != kUnreadTag;  // no peer of ours has this incarnation
    if (reserved) continue;
    throw Error(ErrorCode::kNotOwner,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                    "): the block is not reserved for this transfer",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

// --- owners ---

BlockOwner CacheBlocks::owner_of(Address address) const noexcept {
  const BlockStore& blocks = store_of(address);
  const std::uint32_t block = block_of(address);
  return {blocks.state(block), blocks.tag(block), blocks.mark(block)};
}

void CacheBlocks::give(std::span<const Address> addresses, const BlockOwner& to) noexcept {
  for (const Address address : addresses) {
    BlockStore& blocks = own(address);
    const std::uint32_t block = block_of(address);
    blocks.set_state(block, to.state);
    blocks.set_tag(block, to.incarnation);
    blocks.set_mark(block, to.mark);
  }
}

void CacheBlocks::audit() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "blocks: " + what); };
  for (const BlockStore& blocks : stores_) blocks.audit();
  for (const Medium medium : kMedia) {
    const BlockStore& blocks = store(medium);
    const ReaderCounts& readers = readers_[medium];
    std::uint32_t unread = 0;
    for (std::uint32_t slot = 0; slot < readers.size(); ++slot) {
      if (!blocks.slot_taken(slot)) {
        if (readers[slot] > 0) fail("a free block is read (L2)");
      } else if (is_unread(blocks.address_of(blocks.block_in(slot)))) {
        ++unread;
      }
    }
    if (unread != unread_[medium]) fail("a wrong count of freed blocks that are read (L2)");
  }
  const BlockStore& hbm = store(Medium::kHbm);
  if (engine_allocates_ && hbm.count(BlockState::kHistorical) > 0) {
    fail("a block of the engine is cached (L3)");
  }
  const std::uint32_t away = hbm.count(BlockState::kSuspended);
  if (hbm_suspended_ ? !hbm_closed_ || away + hbm.count(BlockState::kRetired) != hbm.capacity() : away != 0) {
    fail(std::to_string(away) + " of HBM are suspended (L4)");
  }
  space_.audit();
}

}  // namespace kvpool
