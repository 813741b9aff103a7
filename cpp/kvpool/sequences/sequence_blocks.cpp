#include "kvpool/sequences/sequence_blocks.h"

#include <algorithm>
#include <string>

#include "kvpool/attention/kernel.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

struct SequenceBlocks::Reading {
  Reading(std::shared_ptr<SequenceBlocks> of, std::uint64_t at) : blocks(std::move(of)), number(at) {}
  ~Reading() {
    if (blocks != nullptr) blocks->end_reading(number);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::shared_ptr<SequenceBlocks> blocks;
  std::uint64_t number;
};

void SequenceBlocks::check_pool(const Pool& pool) {
  pool.check_whole("attention");
  if (pool.sharding()) {
    throw Error(ErrorCode::kUnsupported,
                "the blocks of a logical instance are in its ranks: attention cannot read them");
  }
  const PageFormat& format = pool.layout().format;
  if (!format.known()) {
    throw Error(ErrorCode::kUnsupported, "raw blocks have no heads: attention needs a pool with a KVLayout");
  }
  if (kv_type_index(format.dtype) < 0) {
    throw Error(ErrorCode::kUnsupported, std::string("attention cannot read blocks of ") + dtype_name(format.dtype));
  }
}

void SequenceBlocks::exchange(const std::vector<BlockRange>& removed, const std::vector<Added>& added) {
  const std::lock_guard lock(mutex_);
  check_open();
  auto runs = std::make_shared<BlockRuns>(*runs_);
  std::vector<Address> old = !removed.empty() ? runs->remove(removed) : std::vector<Address>();
  for (const Added& one : added) runs->add(one.first, one.addresses);
  removed_.reserve(removed_.size() + 1);  // nothing fails from the hold on
  hold(added);
  if (!old.empty()) return replace(std::move(runs), std::move(old));
  runs_ = std::move(runs);
}

std::size_t SequenceBlocks::remove(const BlockRange& range) {
  const std::lock_guard lock(mutex_);
  if (closed_) return 0;
  auto runs = std::make_shared<BlockRuns>(*runs_);
  std::vector<Address> removed = runs->remove(range);
  const std::size_t blocks = removed.size();
  if (blocks > 0) replace(std::move(runs), std::move(removed));
  return blocks;
}

std::size_t SequenceBlocks::drop(const std::unordered_set<Address>& addresses) noexcept {
  const std::size_t before = blocks();
  std::size_t blocks = 0;
  const auto failure = failure_of([&] {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    const std::vector<BlockRange> ranges = runs_->places_of(addresses);
    if (ranges.empty()) return;
    auto runs = std::make_shared<BlockRuns>(*runs_);
    std::vector<Address> removed = runs->remove(ranges);
    blocks = removed.size();
    replace(std::move(runs), std::move(removed));
  });
  if (!failure) return blocks;
  close();
  return before;
}

std::size_t SequenceBlocks::count(const std::unordered_set<Address>& addresses) const noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_) return 0;
  std::size_t blocks = 0;
  const auto failure = failure_of([&] {
    for (const BlockRange& range : runs_->places_of(addresses)) blocks += range.count;
  });
  return failure ? runs_->blocks() : blocks;
}

void SequenceBlocks::close() noexcept {
  if (made_in_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  release_unread();
}

std::size_t SequenceBlocks::blocks() const {
  const std::lock_guard lock(mutex_);
  return closed_ ? 0 : runs_->blocks();
}

ReadableBlocks SequenceBlocks::read() {
  std::shared_ptr<SequenceBlocks> self = shared_from_this();
  const std::lock_guard lock(mutex_);
  check_open();
  const std::uint64_t number = readings_.begin();
  ReadableBlocks blocks{runs_, nullptr, nullptr};
  try {
    blocks.hold = std::make_shared<Reading>(std::move(self), number);
  } catch (...) {
    readings_.end(number);
    throw;
  }
  return blocks;
}

// REQUIRES: mutex_ is held.
void SequenceBlocks::check_open() const {
  pool_.guard();
  if (closed_) throw Error(ErrorCode::kState, "the sequence is closed");
}

void SequenceBlocks::hold(const std::vector<Added>& added) const {
  std::size_t held = 0;
  try {
    for (; held < added.size(); ++held) hold(added[held].addresses);
  } catch (...) {
    while (held > 0) {
      --held;
      pool_.for_peers().release_reading(added[held].addresses.data(), added[held].addresses.size());
    }
    throw;
  }
}

void SequenceBlocks::hold(std::span<const Address> addresses) const {
  PeerClaims& claims = pool_.for_peers();
  claims.hold_for_reading(addresses.data(), addresses.size(), reader_);
  if (with_gpu_ || !pool_.on_device()) return;
  const auto on_gpu = std::ranges::find(addresses, Medium::kHbm, medium_of);
  if (on_gpu == addresses.end()) return;
  claims.release_reading(addresses.data(), addresses.size());
  const auto position = on_gpu - addresses.begin();
  throw Error(ErrorCode::kUnsupported,
              "address " + std::to_string(*on_gpu) + " (position " + std::to_string(position) +
                  "): the block is on a GPU, and this build has no kernels of attention for it",
              {{"address", static_cast<std::int64_t>(*on_gpu)}, {"position", position}});
}

// REQUIRES: mutex_ is held.
void SequenceBlocks::replace(std::shared_ptr<const BlockRuns> runs, std::vector<Address> removed) {
  removed_.push_back({readings_.next(), std::move(removed)});
  runs_ = std::move(runs);
  release_unread();
}

void SequenceBlocks::end_reading(std::uint64_t number) noexcept {
  if (made_in_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  readings_.end(number);
  release_unread();
}

// REQUIRES: mutex_ is held.
void SequenceBlocks::release_unread() noexcept {
  PeerClaims& claims = pool_.for_peers();
  std::erase_if(removed_, [&](const Removed& one) {
    if (readings_.any_before(one.before)) return false;
    claims.release_reading(one.addresses.data(), one.addresses.size());
    return true;
  });
  if (!closed_ || !readings_.none() || runs_ == nullptr) return;
  for (const BlockRuns::Run& run : runs_->runs()) claims.release_reading(run.addresses.data(), run.addresses.size());
  runs_.reset();
}

}  // namespace kvpool
