// DISK as a medium of a pool: writes cached pages to a store on disk before they are evicted, and brings them back.
//
// A page is written while it lies in HBM or DRAM, behind the back of everybody: after it was used for the second time
// (disk_admission.h), with the pages before it. When it is evicted later, its address becomes that of its slot, without
// I/O; so no allocation waits for the disk. A page that is not written by then is dropped, as without a disk.
//
// A page that is brought back keeps its slot as a copy, so it is not written again.
//
//   writer    one thread: chooses pages under the space's lock, copies their bytes, writes, and commits under the lock
//   readers   the threads of the callers, or those that run swaps
//
// When the store switches itself off (an error of the drive, a full disk, a drive that hangs), everything on DISK
// leaves the index, and the pool goes on without.
//
// What is dropped is erased by the writer soon afterwards, whatever the budget; flush() returns when that is durable. A
// kill before may bring it back.
//
// Locks: close_mutex_ before all others; then write_mutex_; then those of TierMoves, then the space's.
//
// Thread-safety: all of it, but the constructor and the destructor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/wait.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/index/pins.h"
#include "kvpool/pool/disk_admission.h"
#include "kvpool/pool/disk_copies.h"
#include "kvpool/pool/pending_swap_in.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_memory.h"
#include "kvpool/pool/pool_options.h"

namespace kvpool {

class PromptCache;
class Swap;
class TierMoves;

struct DiskTierStats {
  std::string path;
  std::string engine;  // "io_uring" or "threads"
  bool direct = false;
  DiskHealth health;
  DiskCounters store;
  std::uint32_t recovered = 0;  // pages, when it was opened
  std::uint64_t bytes_today = 0;
};

class DiskTier {
 public:
  // Opens the store and puts what is there into the index. All of them outlive this. Throws as DiskStore::open(),
  // kOutOfMemory when the kernel gives no thread, and std::bad_alloc.
  DiskTier(const PoolOptions& options, CacheBlocks& blocks, PromptCache& cache, PoolMemory& memory, TierMoves& moves,
           PoolGuard& guard, PinOwner& pins);
  ~DiskTier();
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // The pages of these addresses, of which those on DISK come to DRAM, making room.
  struct Brought {
    std::vector<Address> addresses;
    std::vector<IndexPin> pins;
  };
  // Checks the addresses and pins the pages; bring() does the rest, and gives back what this took if it throws.
  PendingSwapIn begin_bring(std::span<const Address> given);
  // `swap`: whose reads these are; null: the caller waits, and may give up. Throws kStaleAddress (kLostOnDisk) when a
  // page is damaged: it and what continues it are not cached any more; kStoreFailed (kLostOnDisk) when the disk has
  // failed, and nothing on it is cached any more; kDeadline, kCancelled, kClosed, kOutOfBlocks.
  Brought bring(PendingSwapIn pending, Swap* swap, const GivenUp& given_up = {});
  // Gives back what begin_bring() took.
  void abandon(PendingSwapIn& pending) noexcept;

  // Writes what is waiting to be written; with `everything` also what the admission policy does not admit. Returns how
  // many blocks it wrote. Throws kDeadline, kCancelled, kStoreFailed, kClosed; then what it has not written waits for
  // the writer.
  std::size_t flush(bool everything, const Waiting& waiting);

  DiskTierStats stats();
  // Ends the writer, and closes the store when the last call that uses it has ended. Idempotent.
  void close() noexcept;

 private:
  static constexpr std::int64_t kLookNs = 20'000'000;   // how often what waits looks whether it is to end
  static constexpr std::int64_t kNoTimeNs = INT64_MAX;  // the store switches itself off when the drive hangs
  // Pages that are written together.
  struct Batch {
    std::vector<DiskPages> prompts;
    std::vector<Address> from;  // of all of their pages, in this order
    std::deque<Address> lasts;  // the ends of the prompts that were looked at for it
  };

  std::shared_ptr<DiskStore> store() const;
  void run() noexcept;
  std::int64_t write_next();
  std::vector<DiskErase> next_erased();
  // `waiting`: of the caller of flush(); null: the writer.
  void erase(std::vector<DiskErase> erased, const Waiting* waiting);
  void give_erases(DiskStore& store, std::vector<DiskErase>& erased);
  std::size_t write_all(std::deque<Address>& lasts, bool everything, const Waiting& waiting);
  void give_back(const std::deque<Address>& lasts);
  std::size_t write_batch(std::deque<Address>& lasts, bool everything, const Waiting* waiting);
  void choose_batch(std::deque<Address>& lasts, bool everything, Batch& batch);
  std::size_t finish_batch(const Batch& batch, const std::vector<bool>& written);
  void await(DiskBatch& batch, const Waiting* waiting);
  void check_not_stopping() const;
  void check_waiting(const Waiting& waiting) const;
  std::unique_lock<std::mutex> lock_to_write(const Waiting& waiting);
  std::unique_lock<std::mutex> lock_until_stop(std::int64_t grace_ns);
  void write(const Batch& batch, const Waiting* waiting, std::vector<bool>& written);
  void read(PendingSwapIn& pending, Swap* swap, const GivenUp& given_up);
  void check_read(const PendingSwapIn& pending, std::size_t first, DiskBatch& batch);
  [[noreturn]] void lose(const PendingSwapIn& pending, Address slot, DiskStatus why);
  void switch_off() noexcept;
  [[noreturn]] void throw_off() const;
  std::vector<std::span<std::byte>> spans_of(const PoolMemory::Kept& kept, Address address) const;

  CacheBlocks& blocks_;
  PromptCache& cache_;
  PoolMemory& memory_;
  TierMoves& moves_;
  PoolGuard& guard_;
  PinOwner& pins_;
  const std::string path_;
  const std::uint32_t page_tokens_;
  const std::size_t block_bytes_;
  const std::size_t batch_blocks_;
  const bool from_hbm_;
  const std::int64_t timeout_ns_;
  DiskCopies copies_;
  mutable std::mutex store_mutex_;    // for the reference alone; taken inside every other lock
  std::shared_ptr<DiskStore> store_;  // null once closed
  std::uint32_t recovered_ = 0;
  std::mutex write_mutex_;  // one thread at a time chooses pages and writes them
  ByteBudget budget_;       // under write_mutex_
  std::atomic<std::uint64_t> bytes_today_{0};
  std::vector<std::byte> staging_;      // under write_mutex_
  std::shared_ptr<DiskBatch> erasing_;  // the erases that were given last, until they have ended; under write_mutex_
  std::mutex close_mutex_;
  std::atomic<bool> stopping_{false};  // set under the space's lock
  std::atomic<bool> off_{false};
  std::thread writer_;
};

}  // namespace kvpool
