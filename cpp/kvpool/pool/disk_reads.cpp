// Pages that come from DISK to DRAM.
#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/exec/completion.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {
namespace {

constexpr std::size_t kReadBytes = 32 << 20;  // asked for together; a swap can be cancelled in between

}  // namespace

PendingSwapIn DiskTier::begin_bring(std::span<const Address> given) {
  PendingSwapIn pending;
  const SpaceLock lock = blocks_.lock();
  guard_.check();
  cache_.begin_bring(given, pending);
  return pending;
}

void DiskTier::abandon(PendingSwapIn& pending) noexcept {
  const SpaceLock lock = blocks_.lock();
  cache_.cancel_move_in(pending);
}

DiskTier::Brought DiskTier::bring(PendingSwapIn pending, Swap* swap, const GivenUp& given_up) {
  try {
    if (!pending.from.empty()) {
      if (off_.load()) throw_off();
      {
        auto reclaim = moves_.reclaiming();
        SpaceLock lock = blocks_.lock();
        guard_.check();
        std::vector<Address> to(pending.from.size());
        moves_.take_evicting(reclaim, lock, to.size(), Medium::kDram, BlockState::kReserved, to.data(), CallerStream());
        pending.to = std::move(to);
      }
      read(pending, swap, given_up);
    }
    const SpaceLock lock = blocks_.lock();
    guard_.check();
    if (swap != nullptr) swap->check();
    cache_.finish_bring(pending);
    cache_.audit_if_asked();
    return {std::move(pending.addresses), std::move(pending.held)};
  } catch (...) {
    abandon(pending);
    throw;
  }
}

std::vector<std::span<std::byte>> DiskTier::spans_of(const PoolMemory::Kept& kept, Address address) const {
  const Arena& arena = *kept.arenas[medium_of(address)];
  std::vector<std::span<std::byte>> spans;
  spans.reserve(arena.segments().size());
  for (const Segment& segment : arena.segments()) {
    spans.emplace_back(segment.base + block_of(address) * segment.stride, segment.bytes);
  }
  return spans;
}

// Fills `to`. Nobody else has these blocks, and the pages are pinned, so no slot of theirs is written meanwhile.
void DiskTier::read(PendingSwapIn& pending, Swap* swap, const GivenUp& given_up) {
  const std::int64_t until = swap != nullptr ? kNoTimeNs : monotonic_ns() + timeout_ns_;
  const std::size_t step = std::max<std::size_t>(1, kReadBytes / block_bytes_);
  const std::shared_ptr<DiskStore> store = this->store();
  const PoolMemory::Kept kept = memory_.keep();
  if (kept.arenas[Medium::kDram] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  for (std::size_t first = 0; first < pending.from.size(); first += step) {
    const std::size_t n = std::min(step, pending.from.size() - first);
    std::vector<DiskRead> reads;
    reads.reserve(n);
    {
      const SpaceLock lock = blocks_.lock();
      if (!cache_.has_disk()) throw_off();
      for (std::size_t i = first; i < first + n; ++i) {
        reads.push_back({block_of(pending.from[i]), cache_.disk_generation(pending.from[i]), {}, {}});
      }
    }
    for (std::size_t i = 0; i < n; ++i) reads[i].spans = spans_of(kept, pending.to[first + i]);
    const DiskTicket ticket = store->read(std::move(reads), until);
    Completion& ended = ticket->completion();
    try {
      while (!ended.done()) {
        ended.sleep_until(std::min(until, monotonic_ns() + kLookNs));
        if (swap != nullptr) swap->check();
        Waiting(until, given_up).check();
        check_not_stopping();
      }
    } catch (...) {
      ticket->abandon();  // the blocks are given back, so nothing may write to them any more
      while (!ended.done()) ended.sleep_until(monotonic_ns() + kLookNs);
      throw;
    }
    check_read(pending, first, *ticket);
  }
}

void DiskTier::check_read(const PendingSwapIn& pending, std::size_t first, DiskBatch& batch) {
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const DiskStatus status = batch.status(i);
    if (status == DiskStatus::kOk) continue;
    if (!store()->state().on) {
      switch_off();
      throw_off();
    }
    if (status == DiskStatus::kDeadline) {
      throw Error(ErrorCode::kDeadline, "the blocks did not come from disk in time");
    }
    if (status == DiskStatus::kCancelled) throw Error(ErrorCode::kCancelled, "the swap was cancelled");
    lose(pending, pending.from[first + i], status);
  }
}

// What is damaged on disk is not there: it leaves the index with what continues it.
void DiskTier::lose(const PendingSwapIn& pending, Address slot, DiskStatus why) {
  {
    const auto reclaim = moves_.reclaiming();
    const SpaceLock lock = blocks_.lock();
    cache_.lose(slot);
    cache_.audit_if_asked();
  }
  const auto position = std::ranges::find(pending.addresses, slot) - pending.addresses.begin();
  throw Error(ErrorCode::kStaleAddress,
              "address " + std::to_string(slot) + " (position " + std::to_string(position) +
                  "): the block on disk is lost (" + disk_status_name(why) +
                  "), and what continues it with it: match again for what is before it",
              {{"address", static_cast<std::int64_t>(slot)}, {"position", position}})
      .because(ErrorCause::kLostOnDisk);
}

}  // namespace kvpool
