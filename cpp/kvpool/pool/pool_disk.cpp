// The pool's verbs on blocks on DISK.
#include <algorithm>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

DiskTier& Pool::disk() const {
  if (disk_ != nullptr) return *disk_;
  throw Error(ErrorCode::kUnsupported, "this pool has no blocks on DISK: give it disk_blocks and disk_path");
}

void Pool::check_has(MediumChoice medium) const {
  if (medium == Medium::kDisk) disk();
}

bool Pool::reaches_disk(std::span<const Address> addresses) const noexcept {
  return disk_ != nullptr &&
         std::ranges::find(addresses, static_cast<std::uint32_t>(Medium::kDisk), medium_bits_of) != addresses.end();
}

std::vector<IndexPin> Pool::bring(std::span<const Address> addresses, Address* out, const GivenUp& given_up) {
  guard();
  DiskTier::Brought brought = disk().bring(disk().begin_bring(addresses), nullptr, given_up);
  std::ranges::copy(brought.addresses, out);
  return std::move(brought.pins);
}

// First to DRAM, then to HBM. What has come to DRAM stays there if HBM has no room.
std::vector<IndexPin> Pool::swap_in_from_disk(std::span<const Address> addresses, std::span<const Address> into,
                                              Address* out, const CallerStream& after) {
  if (capacity(Medium::kHbm) == 0) throw Error(ErrorCode::kState, "this pool has no HBM blocks: bring blocks to DRAM");
  if (!into.empty()) return moves_->swap_in(addresses, into, out, after);  // which refuses pages on DISK
  DiskTier::Brought brought = disk().bring(disk().begin_bring(addresses), nullptr);
  const Pins held(shared_from_this(), std::move(brought.pins));
  return moves_->swap_in(brought.addresses, into, out, after);
}

std::shared_ptr<Swap> Pool::begin_bring(std::span<const Address> addresses) {
  guard();
  disk();
  return begin_from_disk(addresses, {}, /*to_hbm=*/false);
}

std::shared_ptr<Swap> Pool::begin_from_disk(std::span<const Address> addresses, const CallerStream& after,
                                            bool to_hbm) {
  if (to_hbm && capacity(Medium::kHbm) == 0) {
    throw Error(ErrorCode::kState, "this pool has no HBM blocks: bring blocks to DRAM");
  }
  const auto pending = std::make_shared<PendingSwapIn>(disk_->begin_bring(addresses));
  try {
    return moves_->begin_from_disk(
        after, to_hbm,
        [this, pending](Swap& swap) -> TierMoves::Brought {
          DiskTier::Brought brought = disk_->bring(std::move(*pending), &swap);
          return {std::move(brought.addresses), std::move(brought.pins)};
        },
        [this, pending] { disk_->abandon(*pending); });
  } catch (...) {
    disk_->abandon(*pending);
    throw;
  }
}

std::size_t Pool::flush_disk(bool everything, const Waiting& waiting) {
  guard();
  return disk().flush(everything, waiting);
}

DiskTierStats Pool::disk_stats() {
  guard_open();
  return disk().stats();
}

}  // namespace kvpool
