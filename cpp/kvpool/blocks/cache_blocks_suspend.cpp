// HBM that the engine takes back for a while.
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"

namespace kvpool {

void CacheBlocks::close_hbm() {
  if (shared_) throw Error(ErrorCode::kUnsupported, "HBM that several caches share cannot be suspended");
  if (store(Medium::kHbm).capacity() == 0) {
    throw Error(ErrorCode::kState, "this pool has no HBM blocks to suspend");
  }
  check_open(Medium::kHbm);
  hbm_closed_ = true;
}

void CacheBlocks::open_hbm() noexcept {
  KVPOOL_DCHECK(!hbm_suspended_);
  hbm_closed_ = false;
}

void CacheBlocks::check_open(MediumChoice choice) const {
  if (!hbm_closed_ || choice.is_mixed() || !choice.includes(Medium::kHbm)) return;
  throw Error(ErrorCode::kSuspended, hbm_suspended_ ? "HBM of this pool is suspended until resume()"
                                                    : "HBM of this pool is being suspended, and gives no more blocks");
}

HbmUse CacheBlocks::hbm_use(std::size_t evictable) const noexcept {
  const BlockStore& hbm = store(Medium::kHbm);
  HbmUse use;
  use.active = hbm.count(BlockState::kActive);
  use.reserved = hbm.count(BlockState::kReserved);
  use.lent = hbm.count(BlockState::kLent);
  use.quarantined = hbm.count(BlockState::kQuarantined);
  use.pinned = hbm.count(BlockState::kHistorical) - static_cast<std::uint32_t>(evictable);
  const ReaderCounts& readers = readers_[Medium::kHbm];
  for (std::uint32_t block = 0; block < readers.size(); ++block) use.read += readers[block] > 0 ? 1 : 0;
  return use;
}

void CacheBlocks::suspend_hbm() noexcept {
  KVPOOL_DCHECK(hbm_closed_ && !hbm_suspended_);
  stores_[Medium::kHbm].suspend();
  hbm_suspended_ = true;
}

void CacheBlocks::resume_hbm() noexcept {
  KVPOOL_DCHECK(hbm_suspended_);
  stores_[Medium::kHbm].resume();
  hbm_suspended_ = hbm_closed_ = false;
}

}  // namespace kvpool
