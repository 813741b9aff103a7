// The pool's verbs on blocks.
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/pool_allocator.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {
namespace {

constexpr BlockOwner kApplication{BlockState::kActive, 0, 0};

}  // namespace

bool Pool::zeroes_on_alloc() const noexcept { return allocator_->zeroes(); }

void Pool::check_kept(MediumChoice medium) { PoolAllocator::check_kept(medium); }

std::size_t Pool::capacity(MediumChoice medium) const noexcept { return blocks_->capacity(medium); }

bool Pool::try_alloc(std::size_t n, MediumChoice medium, Address* out) {
  return allocator_->try_take(n, medium, kApplication, out);
}

void Pool::alloc_evicting(std::size_t n, MediumChoice medium, Address* out, const CallerStream& after) {
  allocator_->take_evicting(n, medium, kApplication, out, after);
}

void Pool::throw_out_of_blocks(std::size_t n, MediumChoice medium) {
  allocator_->check(medium);
  const SpaceLock lock = blocks_->lock();
  cache_->throw_out_of_blocks(n, medium);
}

void Pool::note_failed_alloc() noexcept {
  const SpaceLock lock = blocks_->lock();
  ++cache_->counters().failed_allocations;
}

std::vector<Address> Pool::check_free(const Address* addresses, std::size_t n) {
  guard();
  std::vector<Address> own;
  const SpaceLock lock = blocks_->lock();
  for (std::size_t i = 0; i < n; ++i) {
    if (!blocks_->is_local(addresses[i])) continue;
    blocks_->check(addresses[i], i, BlockState::kActive);
    own.push_back(addresses[i]);
  }
  blocks_->check_distinct(addresses, n,
                          blocks_->new_stamp());  // of the whole list, so that errors name positions in it
  blocks_->check_freeable(addresses, n);
  return own;
}

void Pool::check_active(std::span<const Address> addresses) {
  guard();
  const SpaceLock lock = blocks_->lock();
  blocks_->check_active_and_distinct(addresses.data(), addresses.size(), /*skip_cached=*/false);
}

void Pool::free(const Address* addresses, std::size_t n) {
  guard();
  const SpaceLock lock = blocks_->lock();
  blocks_->check_active_and_distinct(addresses, n, /*skip_cached=*/false);
  blocks_->check_freeable(addresses, n);
  blocks_->release(addresses, n);
  cache_->counters().freed_blocks += n;
  cache_->audit_if_asked();
}

void Pool::check_whole(const char* what) const {
  if (pieces() == 1) return;
  throw Error(ErrorCode::kUnsupported,
              std::string(what) +
                  " needs blocks in one piece, and those of this pool may lie in several: load "
                  "the model with pieces=\"whole\"");
}

void Pool::check_unshared(const char* what) const {
  if (!blocks_->space().shared()) return;
  throw Error(
      ErrorCode::kUnsupported,
      std::string(what) +
          " needs a pool whose blocks are numbered one after another, and this one shares the units of a space");
}

std::uint32_t Pool::pieces() const noexcept { return blocks_->pieces_count(); }

MediumMap<std::shared_ptr<const BlockPlaces>> Pool::places() const noexcept {
  MediumMap<std::shared_ptr<const BlockPlaces>> places{};
  for (const Medium medium : kMedia) places[medium] = blocks_->places(medium);
  return places;
}

void Pool::block_table(const Address* addresses, std::size_t n, std::int32_t* out) const {
  guard();
  const SpaceLock lock = blocks_->lock();
  for (std::size_t i = 0; i < n; ++i) {
    blocks_->check(addresses[i], i, std::nullopt);
    const BlockPieces& of = blocks_->pieces(medium_of(addresses[i]));
    for (std::uint32_t piece = 0; piece < of.pieces(); ++piece) {
      out[piece * n + i] = static_cast<std::int32_t>(of.unit_of(block_of(addresses[i]), piece));
    }
  }
}

void Pool::adopt(const std::uint32_t* blocks, std::size_t n, Address* out) {
  guard();
  if (!blocks_->engine_allocates()) {
    throw Error(ErrorCode::kState, "adopt() is for pools made with engine_allocates; use alloc()");
  }
  const SpaceLock lock = blocks_->lock();
  blocks_->check_open(Medium::kHbm);
  const BlockStore& hbm = blocks_->store(Medium::kHbm);
  for (std::size_t i = 0; i < n; ++i) {
    if (blocks_->take_block(Medium::kHbm, blocks[i], BlockState::kActive, out + i)) continue;
    const std::string what = blocks[i] >= hbm.capacity()
                                 ? "there are " + std::to_string(hbm.capacity()) + " blocks"
                                 : std::string("it is ") + block_state_name(hbm.state(blocks[i])) + ", not free";
    const Error error(blocks[i] >= hbm.capacity() ? ErrorCode::kArgument : ErrorCode::kState,
                      "block " + std::to_string(blocks[i]) + " (position " + std::to_string(i) + "): " + what,
                      {{"block", blocks[i]}, {"position", static_cast<std::int64_t>(i)}});
    blocks_->release(out, i);
    throw error;
  }
  cache_->counters().allocated_blocks += n;
  cache_->audit_if_asked();
}

}  // namespace kvpool
