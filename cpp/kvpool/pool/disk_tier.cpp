// Opening, the writer, and the end. disk_flush.cpp has what callers wait for; disk_reads.cpp brings pages back.
#include "kvpool/pool/disk_tier.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/signals_blocked.h"
#include "kvpool/exec/completion.h"
#include "kvpool/pool/disk_record.h"
#include "kvpool/pool/disk_recovery.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {
namespace {

constexpr std::size_t kBatchBytes = 8 << 20;  // written together
constexpr std::size_t kBatchBlocksMax = 256;
constexpr std::size_t kLookedMax = 1 << 14;      // pages, in one hold of the space's lock
constexpr std::int64_t kLastNs = 1'000'000'000;  // how long a close waits for its turn to erase

DiskOptions store_options(const PoolOptions& options) {
  const DiskTierOptions& disk = *options.disk;
  DiskOptions store;
  store.path = disk.path;
  store.slots = disk.blocks;
  store.block_bytes = options.layout.block_bytes();
  store.format = disk.format;
  store.format.emplace_back("block_tokens", std::to_string(options.layout.block_tokens));
  store.hang_ns = disk.hang_ns;
  return store;
}

std::unique_ptr<DiskStore> open_store(const PoolOptions& options) {
  if (options.disk->directory == nullptr) return DiskStore::open(store_options(options));
  return DiskStore::open(store_options(options), options.disk->directory);
}

std::size_t batch_blocks(std::size_t block_bytes) noexcept {
  return std::clamp<std::size_t>(kBatchBytes / block_bytes, 1, kBatchBlocksMax);
}

// The content of a block, from its pieces.
void gather_block(const Arena& arena, std::uint32_t block, std::byte* out) noexcept {
  for (const Segment& segment : arena.segments()) {
    std::memcpy(out, segment.base + block * segment.stride, segment.bytes);
    out += segment.bytes;
  }
}

}  // namespace

DiskTier::DiskTier(const PoolOptions& options, CacheBlocks& blocks, PromptCache& cache, PoolMemory& memory,
                   TierMoves& moves, PoolGuard& guard, PinOwner& pins)
    : blocks_(blocks),
      cache_(cache),
      memory_(memory),
      moves_(moves),
      guard_(guard),
      pins_(pins),
      path_(options.disk->path),
      page_tokens_(options.layout.block_tokens),
      block_bytes_(options.layout.block_bytes()),
      batch_blocks_(batch_blocks(block_bytes_)),
      from_hbm_(options.hbm_device() < 0),
      timeout_ns_(options.disk->timeout_ns),
      copies_({options.hbm_blocks, options.dram_blocks, options.disk->blocks}, options.disk->admission),
      store_(open_store(options)),
      budget_(options.disk->bytes_s, options.disk->bytes_day),
      staging_(batch_blocks_ * block_bytes_) {
  {
    const SpaceLock lock = blocks_.lock();
    cache_.use_disk(copies_);
    recovered_ = recover_pages(store_->recovered(), page_tokens_, blocks_, cache_, copies_);
    cache_.audit_if_asked();
  }
  store_->forget_recovered();
  const SignalsBlocked blocked;
  try {
    writer_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    throw Error(ErrorCode::kOutOfMemory, "the kernel gives no thread for the writer of blocks on disk");
  }
}

DiskTier::~DiskTier() { close(); }

void DiskTier::close() noexcept {
  const std::lock_guard once(close_mutex_);
  {
    const SpaceLock lock = blocks_.lock();
    stopping_ = true;
    copies_.work().notify_all();
  }
  if (writer_.joinable()) writer_.join();
  std::shared_ptr<DiskStore> last;  // goes without the lock: it waits for I/O
  const std::lock_guard lock(store_mutex_);
  last.swap(store_);
}

// Throws kClosed.
std::shared_ptr<DiskStore> DiskTier::store() const {
  const std::lock_guard lock(store_mutex_);
  if (store_ == nullptr) throw Error(ErrorCode::kClosed, "the pool was closed");
  return store_;
}

DiskTierStats DiskTier::stats() {
  const std::shared_ptr<DiskStore> store = this->store();
  DiskTierStats stats;
  stats.path = path_;
  stats.engine = store->engine_name();
  stats.direct = store->direct();
  stats.health = store->state();
  stats.store = store->counters();
  stats.recovered = recovered_;
  stats.bytes_today = bytes_today_.load(std::memory_order_relaxed);
  return stats;
}

// --- writing ---

void DiskTier::run() noexcept {
  for (;;) {
    try {
      {
        SpaceLock lock = blocks_.lock();
        copies_.work().wait(
            lock, [this] { return stopping_ || (!off_.load() && (copies_.has_wanted() || copies_.has_erased())); });
        if (stopping_) break;
      }
      const std::int64_t wait = write_next();
      if (wait == 0) continue;
      SpaceLock lock = blocks_.lock();
      copies_.work().wait_for(lock, std::chrono::nanoseconds(std::min(wait, kLookNs)),
                              [this] { return stopping_.load(); });
    } catch (const std::exception&) {
      // Out of memory, or the store is off, which its state tells: the prompt is looked at when it is used again, and
      // what could not be erased in a moment.
      SpaceLock lock = blocks_.lock();
      copies_.work().wait_for(lock, std::chrono::nanoseconds(kLookNs), [this] { return stopping_.load(); });
    }
  }
  // What was dropped is not to come back.
  try {
    const auto alone = lock_until_stop(kLastNs);
    if (alone.owns_lock()) erase(next_erased(), nullptr);
  } catch (const std::exception&) {
    // It is found again at the next start, and evicted in its turn.
  }
}

// What is to be erased, and, if the budget allows it, some prompts. Returns how long to wait for the budget.
std::int64_t DiskTier::write_next() {
  const auto alone = lock_until_stop(0);  // so that flush() waits for what this takes
  if (!alone.owns_lock()) return 0;
  erase(next_erased(), nullptr);
  const std::int64_t wait = budget_.wait_ns(monotonic_ns());
  if (wait > 0) return wait;
  std::deque<Address> lasts;
  {
    const SpaceLock lock = blocks_.lock();
    while (lasts.size() < batch_blocks_) {
      const Address last = copies_.next_wanted();
      if (last == 0) break;
      lasts.push_back(last);
    }
  }
  // What the budget, or the end, leaves undone waits for its turn again.
  while (!lasts.empty() && !off_.load() && !stopping_.load() && budget_.wait_ns(monotonic_ns()) == 0) {
    write_batch(lasts, /*everything=*/false, nullptr);
  }
  give_back(lasts);
  return 0;
}

std::vector<DiskErase> DiskTier::next_erased() {
  const SpaceLock lock = blocks_.lock();
  return copies_.take_erased();
}

// As many pages as are written together. Leaves in `lasts` the prompts that need more. REQUIRES: write_mutex_ is held.
std::size_t DiskTier::write_batch(std::deque<Address>& lasts, bool everything, const Waiting* waiting) {
  Batch batch;
  std::vector<bool> written(batch_blocks_, false);  // before the pages are chosen, which are to be finished
  PoolMemory::Kept memory;
  {
    const SpaceLock lock = blocks_.lock();
    guard_.check();
    if (!cache_.has_disk()) {
      lasts.clear();
      return 0;
    }
    memory = memory_.keep();
    choose_batch(lasts, everything, batch);
  }
  for (std::size_t i = 0; i < batch.from.size(); ++i) {
    const Address from = batch.from[i];
    gather_block(*memory.arenas[medium_of(from)], block_of(from), staging_.data() + i * block_bytes_);
  }
  {
    const SpaceLock lock = blocks_.lock();
    blocks_.release_reading(batch.from.data(), batch.from.size());
  }
  try {
    erase(next_erased(), waiting);  // the entries that lay in the chosen slots
    if (!batch.from.empty()) write(batch, waiting, written);
  } catch (...) {
    finish_batch(batch, written);
    if (waiting != nullptr && !everything) give_back(batch.lasts);
    throw;
  }
  const std::size_t kept = finish_batch(batch, written);
  if (!store()->state().on) switch_off();
  return kept;
}

// Holds the pages for reading. Looks at so many pages that others wait only shortly for the lock; what is left stays in
// `lasts`. REQUIRES: the space's lock is held.
void DiskTier::choose_batch(std::deque<Address>& lasts, bool everything, Batch& batch) {
  std::deque<Address> later;
  std::size_t looked = 0;
  batch.from.reserve(batch_blocks_);
  try {
    while (!lasts.empty() && batch.from.size() < batch_blocks_ && looked < kLookedMax) {
      const Address last = lasts.front();
      batch.lasts.push_back(last);
      const std::size_t most = batch_blocks_ - batch.from.size();
      DiskPages& pages = batch.prompts.emplace_back();  // it has its place before it takes slots
      pages = cache_.begin_disk_write(last, {most, everything, from_hbm_});
      lasts.pop_front();
      looked += pages.looked + 1;
      const bool too_long = record_bytes(page_tokens_) + pages.name_space.size() > kDiskMetaBytesMax;
      if (pages.waits || (pages.pages.size() == most && !too_long)) later.push_back(last);
      if (too_long) cache_.cancel_disk_write(pages);
      if (too_long || pages.pages.empty()) {
        batch.prompts.pop_back();
        continue;
      }
      for (const DiskPage& page : pages.pages) batch.from.push_back(page.from);
    }
    lasts.insert(lasts.begin(), later.begin(), later.end());
    blocks_.hold_for_reading(batch.from.data(), batch.from.size(), /*for_incarnation=*/0);
  } catch (...) {
    for (const DiskPages& pages : batch.prompts) cache_.cancel_disk_write(pages);
    for (const Address last : batch.lasts) copies_.want(last);
    throw;
  }
}

std::size_t DiskTier::finish_batch(const Batch& batch, const std::vector<bool>& written) {
  const SpaceLock lock = blocks_.lock();
  std::size_t kept = 0;
  std::size_t next = 0;
  for (const DiskPages& pages : batch.prompts) {
    kept += cache_.finish_disk_write(pages, written, next);
    next += pages.pages.size();
  }
  cache_.audit_if_asked();
  return kept;
}

// REQUIRES: write_mutex_ is held; the blocks are in staging_. Every write goes through here, and is charged.
// `written`: which pages have entries, also if this throws.
void DiskTier::write(const Batch& batch, const Waiting* waiting, std::vector<bool>& written) {
  const std::size_t n = batch.from.size();
  std::vector<std::vector<std::byte>> records;
  std::vector<DiskWrite> writes;
  records.reserve(n);
  writes.reserve(n);
  for (const DiskPages& prompt : batch.prompts) {
    for (std::size_t i = 0; i < prompt.pages.size(); ++i) {
      const DiskPage& page = prompt.pages[i];
      const std::span<const std::byte> block(staging_.data() + writes.size() * block_bytes_, block_bytes_);
      records.push_back(encode_record(page.parent, std::span(prompt.tokens).subspan(i * page_tokens_, page_tokens_),
                                      prompt.name_space));
      writes.push_back({block_of(page.slot), page.generation, records.back(), {block}});
    }
  }
  const std::int64_t now = monotonic_ns();
  const std::shared_ptr<DiskStore> store = this->store();
  budget_.charge(n * store->slot_bytes(), now);
  bytes_today_.store(budget_.today(), std::memory_order_relaxed);
  const DiskTicket ticket = store->write(std::move(writes), kNoTimeNs);
  const auto tell = [&] {
    for (std::size_t i = 0; i < n; ++i) written[i] = ticket->status(i) == DiskStatus::kOk;
  };
  try {
    await(*ticket, waiting);
  } catch (...) {
    ticket->abandon();  // the slots are given back; the store frees those whose records are on the way
    while (!ticket->completion().done()) ticket->completion().sleep_until(monotonic_ns() + kLookNs);
    tell();
    throw;
  }
  tell();
}

// --- the end of the disk ---

void DiskTier::switch_off() noexcept {
  if (off_.exchange(true)) return;
  try {
    const auto reclaim = moves_.reclaiming();
    const SpaceLock lock = blocks_.lock();
    cache_.forget_disk();
    cache_.audit_if_asked();
  } catch (const std::bad_alloc&) {
    off_ = false;  // the next failure tries again
  }
}

void DiskTier::throw_off() const {
  const DiskHealth health = store()->state();
  throw Error(ErrorCode::kStoreFailed, "the disk of this pool is switched off: " + health.reason,
              {{"errno", health.error}})
      .because(ErrorCause::kLostOnDisk);
}

}  // namespace kvpool
