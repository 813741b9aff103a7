#include "kvpool/blocks/cache_blocks.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

namespace {

std::uint32_t checked_units(std::uint32_t block_units) {
  if (block_units >= 1) return block_units;
  throw Error(ErrorCode::kArgument, "a block has at least one unit");
}

// visit(medium, first, n) for every run of blocks whose addresses ascend in the list.
template <class Visit>
void for_each_run(const Address* addresses, std::size_t n, Visit&& visit) {
  for (std::size_t i = 0; i < n;) {
    const std::uint32_t first = block_of(addresses[i]);
    const std::uint32_t bits = medium_bits_of(addresses[i]);
    std::uint32_t run = 1;
    while (i + run < n && block_of(addresses[i + run]) == first + run && medium_bits_of(addresses[i + run]) == bits) {
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
      engine_allocates_(shape.engine_allocates),
      shared_(space.shared()),
      stores_{make_store(Medium::kHbm, shape), make_store(Medium::kDram, shape), make_store(Medium::kDisk, shape)} {
  static_assert(kMedia.size() == 3, "each has its store");
  space_.enter(*this);
}

CacheBlocks::~CacheBlocks() { space_.leave(*this); }

BlockStore CacheBlocks::make_store(Medium medium, const CacheShape& shape) const {
  const auto range = space_.generations_of(number(), medium, shape.first_generations[medium]);
  return BlockStore(medium, space_.capacity(medium) / block_units_, range.first, range.last);
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
  const std::size_t in_hbm =
      gives(choice, Medium::kHbm) ? std::min<std::size_t>(n, store(Medium::kHbm).free_count()) : 0;
  if (n - in_hbm > store(Medium::kDram).free_count()) return false;
  return take_from(Medium::kHbm, in_hbm, to, out) && take_from(Medium::kDram, n - in_hbm, to, out + in_hbm);
}

std::size_t CacheBlocks::takeable(std::size_t n, Medium medium) const noexcept {
  n = std::min<std::size_t>(n, store(medium).free_count());
  return space_.has_quotas() ? std::min(n, space_.may_take(*this, medium)) : n;
}

std::size_t CacheBlocks::cacheable(Medium medium) const noexcept {
  const std::size_t free = store(medium).free_count();
  return space_.has_quotas() ? std::min(free, space_.may_cache(*this, medium)) : free;
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
  if (n > blocks.free_count() || !blocks.take(static_cast<std::uint32_t>(n), to, out)) return false;
  if (shared_) [[unlikely]] {
    for_each_run(out, n, [&](Medium, std::uint32_t first, std::uint32_t run) {
      space_.occupy(*this, medium, first * block_units_, run * block_units_);
    });
  }
  return true;
}

bool CacheBlocks::take_block(Medium medium, std::uint32_t block, BlockState to, Address* out) noexcept {
  if (hbm_closed_ && medium == Medium::kHbm) return false;
  if (!stores_[medium].take_block(block, to, out)) return false;
  if (shared_) [[unlikely]] {
    space_.occupy(*this, medium, block * block_units_, block_units_);
  }
  return true;
}

void CacheBlocks::release(const Address* addresses, std::size_t n) noexcept {
  for_each_run(addresses, n,
               [&](Medium medium, std::uint32_t first, std::uint32_t run) { release_run(medium, first, run); });
}

void CacheBlocks::release_run(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  const auto& readers = readers_[medium];
  const std::uint32_t end = first + n;
  std::uint32_t unread = first;  // [unread, block) can go
  for (std::uint32_t block = first; !readers.empty() && block < end; ++block) {
    if (readers[block] == 0) continue;
    stores_[medium].set_state(block, BlockState::kReserved);
    stores_[medium].set_tag(block, kUnreadTag);
    ++unread_[medium];
    release_unread(medium, unread, block - unread);
    unread = block + 1;
  }
  release_unread(medium, unread, end - unread);
}

// Of blocks that nobody reads.
void CacheBlocks::release_unread(Medium medium, std::uint32_t first, std::uint32_t n) noexcept {
  if (n == 0) return;
  BlockStore& blocks = stores_[medium];
  const std::uint32_t retired = blocks.count(BlockState::kRetired);
  blocks.release(first, n);
  if (!shared_) [[likely]] {
    return;
  }
  if (blocks.count(BlockState::kRetired) == retired) [[likely]] {
    return space_.vacate(*this, medium, first * block_units_, n * block_units_);
  }
  const std::uint32_t end = first + n;
  for (std::uint32_t block = first; block < end; ++block) {
    const std::uint32_t run = block;
    while (block < end && blocks.state(block) == BlockState::kFree) ++block;
    // What is retired keeps its units.
    if (block > run) space_.vacate(*this, medium, run * block_units_, (block - run) * block_units_);
  }
}

// --- blocks of other caches ---

void CacheBlocks::overlap(Medium medium, std::uint32_t first_unit, std::uint32_t units) noexcept {
  BlockStore& blocks = stores_[medium];
  const std::uint32_t first = first_unit / block_units_;
  const std::uint32_t end = std::min((first_unit + units - 1) / block_units_ + 1, blocks.capacity());
  if (first < end) blocks.overlap(first, end - first);
}

void CacheBlocks::overlap_taken(Medium medium, const UnitMap& taken) noexcept {
  for (std::uint32_t block = 0; block < store(medium).capacity(); ++block) {
    if (taken.any(block * block_units_, block_units_)) stores_[medium].overlap(block, 1);
  }
}

void CacheBlocks::end_overlap(Medium medium, std::uint32_t first_unit, std::uint32_t units,
                              const UnitMap& taken) noexcept {
  BlockStore& blocks = stores_[medium];
  std::uint32_t first = first_unit / block_units_;
  std::uint32_t end = std::min((first_unit + units - 1) / block_units_ + 1, blocks.capacity());
  // Only at the ends can a block have units besides these.
  if (first < end && taken.any(first * block_units_, block_units_)) ++first;
  if (first < end && taken.any((end - 1) * block_units_, block_units_)) --end;
  if (first < end) blocks.end_overlap(first, end - first);
}

std::uint32_t CacheBlocks::generation_after(Medium medium) const noexcept {
  const BlockStore& blocks = store(medium);
  std::uint32_t after = 0;
  for (std::uint32_t block = 0; block < blocks.capacity(); ++block) {
    // The generation of a block that is free has not been given out yet.
    const std::uint32_t next = blocks.generation(block) + (is_owned(blocks.state(block)) ? 1 : 0);
    after = std::max(after, next);
  }
  return after;
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
                                     std::to_string(blocks.capacity()) + " blocks, and this is block " +
                                     std::to_string(block));
      break;
    default:
      fail(ErrorCode::kStaleAddress, std::string(medium_name(blocks.medium())) + " block " + std::to_string(block) +
                                         " is at generation " + std::to_string(blocks.generation(block)) +
                                         ", the address at " + std::to_string(generation_of(address)) +
                                         ": the block was freed or moved, or the address is another pool's");
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
    const bool fine = plain && store_of(address).find(address) == AddressFault::kNone &&
                      store_of(address).state(block_of(address)) == BlockState::kActive;
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

void CacheBlocks::check_not_read(Address address, std::size_t position) const {
  const auto& readers = readers_[medium_of(address)];
  if (readers.empty() || readers[block_of(address)] == 0) return;
  throw Error(ErrorCode::kState,
              "address " + std::to_string(address) + " (position " + std::to_string(position) +
                  "): a transfer, a save or a sequence reads the block; wait for it, or close the sequence",
              {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
}

void CacheBlocks::check_unread(const Address* addresses, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) {
    if (is_local(addresses[i])) check_not_read(addresses[i], i);
  }
}

void CacheBlocks::check_freeable(const Address* addresses, std::size_t n) const {
  if (!engine_allocates_) return;
  for (std::size_t i = 0; i < n; ++i) {
    if (is_local(addresses[i]) && medium_of(addresses[i]) == Medium::kHbm) check_not_read(addresses[i], i);
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

void CacheBlocks::check_filled(Address address, std::size_t position) const {
  if (!filling(address)) return;
  const bool never = never_filled(address);
  throw Error(
      never ? ErrorCode::kState : ErrorCode::kBusy,
      "address " + std::to_string(address) + " (position " + std::to_string(position) + "): " +
          (never ? "the block was forgotten before it was filled" : "the content of the block is still to come"),
      {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
}

void CacheBlocks::hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation) {
  for (const Medium medium : kMedia) {
    if (readers_[medium].empty()) readers_[medium].resize(store(medium).capacity());
  }
  for (std::size_t i = 0; i < n; ++i) {
    try {
      check(addresses[i], i, std::nullopt);
      const BlockStore& blocks = store_of(addresses[i]);
      const BlockState state = blocks.state(block_of(addresses[i]));
      if (state != BlockState::kQuarantined) check_filled(addresses[i], i);
      if (state == BlockState::kLent && for_incarnation != 0 && blocks.tag(block_of(addresses[i])) != for_incarnation) {
        throw Error(ErrorCode::kNotOwner,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        "): the block is lent to another peer",
                    {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
      }
      if (state == BlockState::kQuarantined && for_incarnation != 0) {  // a peer may not have heard of it yet
        throw Error(ErrorCode::kStaleAddress,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        "): the block was recalled, or what was to be written there failed",
                    {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
      }
      std::uint16_t& readers = readers_[medium_of(addresses[i])][block_of(addresses[i])];
      const bool readable =
          state == BlockState::kActive || state == BlockState::kHistorical || state == BlockState::kLent;
      if (readable && readers < UINT16_MAX) {
        ++readers;
        continue;
      }
      const std::string why = readable ? "too many transfers and sequences read it" : block_state_name(state);
      throw Error(ErrorCode::kState,
                  "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                      "): the block cannot be sent or read: " + why,
                  {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    } catch (...) {
      for (std::size_t j = 0; j < i; ++j) --readers_[medium_of(addresses[j])][block_of(addresses[j])];
      throw;
    }
  }
}

void CacheBlocks::release_reading(const Address* addresses, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const Medium medium = medium_of(addresses[i]);
    const std::uint32_t block = block_of(addresses[i]);
    if (--readers_[medium][block] > 0 || !is_unread(addresses[i])) continue;
    --unread_[medium];
    release_unread(medium, block, 1);
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
    const std::vector<std::uint16_t>& readers = readers_[medium];
    std::uint32_t unread = 0;
    for (std::uint32_t block = 0; block < readers.size(); ++block) {
      if (readers[block] > 0 && blocks.state(block) == BlockState::kFree) fail("a free block is read (L2)");
      if (is_unread(blocks.address_of(block))) ++unread;
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
