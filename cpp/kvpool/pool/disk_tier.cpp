// Opening, writing, and the end. disk_reads.cpp brings pages back.
#include "kvpool/pool/disk_tier.h"

#include <algorithm>
#include <chrono>
#include <cstring>
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
constexpr std::int64_t kLookNs = 20'000'000;       // how often what waits looks whether it is to end
constexpr std::int64_t kWriteNs = 60'000'000'000;  // the store switches itself off before

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
  writer_ = std::thread([this] { run(); });
}

DiskTier::~DiskTier() { close(); }

void DiskTier::close() noexcept {
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
      copies_.work().wait_for(lock, std::chrono::nanoseconds(std::min(wait, kLookNs)), [this] { return stopping_; });
    } catch (const std::exception&) {
      // Out of memory, or the store is off, which its state tells: the prompt is looked at when it is used again.
    }
  }
  // What was dropped is not to come back.
  try {
    const std::lock_guard alone(write_mutex_);
    erase(next_erased());
  } catch (const std::exception&) {
    // It is found again at the next start, and evicted in its turn.
  }
}

// What is to be erased, and, if the budget allows it, some prompts. Returns how long to wait for the budget.
std::int64_t DiskTier::write_next() {
  const std::lock_guard alone(write_mutex_);  // so that flush() waits for what this takes
  erase(next_erased());
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
  write_prompts(std::move(lasts), /*everything=*/false, nullptr);
  return 0;
}

std::vector<DiskErase> DiskTier::next_erased() {
  const SpaceLock lock = blocks_.lock();
  return copies_.take_erased();
}

// REQUIRES: write_mutex_ is held, so that no slot of these is written before.
void DiskTier::erase(std::vector<DiskErase> erased) {
  if (erased.empty() || off_.load()) return;
  const std::shared_ptr<DiskStore> store = this->store();
  const DiskTicket ticket = store->erase(std::move(erased), monotonic_ns() + kWriteNs);
  ticket->completion().sleep_until(monotonic_ns() + kWriteNs);
  if (!store->state().on) switch_off();
}

// Whether the next write may begin. The writer of the pool does not wait for the budget with write_mutex_; a caller of
// flush() does, and throws kDeadline, kCancelled, kClosed.
bool DiskTier::within_budget(const Waiting* waiting) {
  for (;;) {
    const std::int64_t now = monotonic_ns();
    const std::int64_t wait = budget_.wait_ns(now);
    if (wait == 0 || waiting == nullptr) return wait == 0;
    check_waiting(*waiting);
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min({wait, kLookNs, waiting->until_ns - now})));
  }
}

void DiskTier::check_waiting(const Waiting& waiting) {
  guard_.check();
  waiting.check();
  if (monotonic_ns() < waiting.until_ns) return;
  throw Error(ErrorCode::kDeadline, "not all blocks were written to disk in time: what was written stays");
}

std::unique_lock<std::mutex> DiskTier::lock_to_write(const Waiting& waiting) {
  std::unique_lock alone(write_mutex_, std::defer_lock);
  while (!alone.try_lock()) {
    check_waiting(waiting);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return alone;
}

// Writes what the prompts that end with these pages lack on disk, and returns how many pages have copies now. What the
// budget leaves undone waits for its turn again. REQUIRES: write_mutex_ is held.
std::size_t DiskTier::write_prompts(std::deque<Address> lasts, bool everything, const Waiting* waiting) {
  std::size_t kept = 0;
  while (!lasts.empty() && !off_.load()) {
    if (waiting != nullptr) check_waiting(*waiting);
    if (!within_budget(waiting)) {
      const SpaceLock lock = blocks_.lock();
      for (const Address last : lasts) copies_.want(last);
      return kept;
    }
    kept += write_batch(lasts, everything);
  }
  return kept;
}

// As many pages as are written together. Leaves in `lasts` the prompts that need more.
std::size_t DiskTier::write_batch(std::deque<Address>& lasts, bool everything) {
  Batch batch;
  std::vector<DiskErase> erased;
  PoolMemory::Kept memory;
  {
    const SpaceLock lock = blocks_.lock();
    guard_.check();
    if (!cache_.has_disk()) {
      lasts.clear();
      return 0;
    }
    choose_batch(lasts, everything, batch);
    erased = copies_.take_erased();
    memory = memory_.keep();
  }
  for (std::size_t i = 0; i < batch.from.size(); ++i) {
    const Address from = batch.from[i];
    gather_block(*memory.arenas[medium_of(from)], block_of(from), staging_.data() + i * block_bytes_);
  }
  {
    const SpaceLock lock = blocks_.lock();
    blocks_.release_reading(batch.from.data(), batch.from.size());
  }
  std::vector<bool> written(batch.from.size(), false);
  try {
    erase(std::move(erased));
    if (!batch.from.empty()) written = write(batch);
  } catch (...) {
    finish_batch(batch, written);
    throw;
  }
  const std::size_t kept = finish_batch(batch, written);
  if (!store()->state().on) switch_off();
  return kept;
}

// Holds the pages for reading. REQUIRES: the space's lock is held.
void DiskTier::choose_batch(std::deque<Address>& lasts, bool everything, Batch& batch) {
  std::deque<Address> later;
  batch.from.reserve(batch_blocks_);
  try {
    while (!lasts.empty() && batch.from.size() < batch_blocks_) {
      const Address last = lasts.front();
      const std::size_t most = batch_blocks_ - batch.from.size();
      DiskPages pages = cache_.begin_disk_write(last, {most, everything, from_hbm_});
      lasts.pop_front();
      if (pages.pages.empty()) continue;
      // Prompts that have pages in common lack the same first one: the second waits until the first is written.
      const bool again = std::ranges::find(batch.from, pages.pages.front().from) != batch.from.end();
      const bool too_long = record_bytes(page_tokens_) + pages.name_space.size() > kDiskMetaBytesMax;
      if (again || (pages.pages.size() == most && !too_long)) later.push_back(last);
      if (again || too_long) {
        cache_.finish_disk_write(pages, std::vector<bool>(pages.pages.size(), false));
        continue;
      }
      for (const DiskPage& page : pages.pages) batch.from.push_back(page.from);
      batch.prompts.push_back(std::move(pages));
    }
    lasts.insert(lasts.begin(), later.begin(), later.end());
    blocks_.hold_for_reading(batch.from.data(), batch.from.size(), /*for_incarnation=*/0);
  } catch (...) {
    for (const DiskPages& pages : batch.prompts) {
      cache_.finish_disk_write(pages, std::vector<bool>(pages.pages.size(), false));
    }
    throw;
  }
}

std::size_t DiskTier::finish_batch(const Batch& batch, const std::vector<bool>& written) {
  const SpaceLock lock = blocks_.lock();
  std::size_t kept = 0;
  auto next = written.begin();
  for (const DiskPages& pages : batch.prompts) {
    const auto end = next + static_cast<std::ptrdiff_t>(pages.pages.size());
    kept += cache_.finish_disk_write(pages, std::vector<bool>(next, end));
    next = end;
  }
  cache_.audit_if_asked();
  return kept;
}

// REQUIRES: write_mutex_ is held; the blocks are in staging_. Every write goes through here, and is charged.
std::vector<bool> DiskTier::write(const Batch& batch) {
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
  const DiskTicket ticket = store->write(std::move(writes), now + kWriteNs);
  while (!ticket->completion().done()) ticket->completion().sleep_until(monotonic_ns() + kWriteNs);
  std::vector<bool> written(n);
  for (std::size_t i = 0; i < n; ++i) written[i] = ticket->status(i) == DiskStatus::kOk;
  return written;
}

std::size_t DiskTier::flush(bool everything, const Waiting& waiting) {
  guard_.check();
  if (off_.load()) throw_off();
  std::deque<Address> lasts;
  {
    const SpaceLock lock = blocks_.lock();
    if (!cache_.has_disk()) throw_off();
    if (everything) {
      const std::vector<Address> ends = cache_.ends_without_copies();
      lasts.assign(ends.begin(), ends.end());
    } else {
      while (const Address last = copies_.next_wanted()) lasts.push_back(last);
    }
  }
  std::size_t written = 0;
  {
    const auto alone = lock_to_write(waiting);
    written = write_prompts(std::move(lasts), everything, &waiting);
  }
  if (off_.load()) throw_off();
  // Also what the writer has taken before this was called.
  const auto alone = lock_to_write(waiting);
  erase(next_erased());
  return written;
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
