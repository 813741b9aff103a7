#include "kvpool/base/copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "kvpool/base/copy_kernel.h"
#include "kvpool/base/fork_guard.h"

namespace kvpool {
namespace {

// From this size on a batch goes past the caches. Measured with cold destinations, as swapped blocks have: streaming
// copies 1.6 times as fast from 256 KiB on, and even when the caller reads everything back at once it does not lose.
constexpr std::size_t kStreamBytes = std::size_t{256} << 10;

// What a thread takes at a time: enough that the lock does not matter, little enough towards the end that nobody
// waits long for the last one.
constexpr std::size_t kGrainTiles = 128;
constexpr std::size_t kGrainBytesMax = std::size_t{512} << 10;
constexpr std::size_t kGrainBytesMin = std::size_t{64} << 10;

// A batch that is being copied, or work in parts, on its caller's stack.
struct Job {
  std::span<const CopyPiece> pieces;  // the first of them from `offset` on; those before are taken
  std::size_t offset = 0;
  std::size_t left = 0;           // bytes, or parts, not taken
  CopyTeam::Part part = nullptr;  // null for a batch of pieces
  void* context = nullptr;
  std::size_t parts = 0;
  std::atomic<int> workers{0};  // threads other than the caller that may still be at it; changed under the lock
  Job* next = nullptr;
};

// The length of the tile to cut from `left` bytes that go to `dst`: no longer than `longest`, ending on a cache line
// of the destination, and without a short remainder.
std::size_t tile_length(const std::byte* dst, std::size_t left, std::size_t longest) noexcept {
  if (left <= longest) {
    return left;
  }
  const std::size_t length = left >= 2 * longest ? longest : (left + 1) / 2;
  return length - (reinterpret_cast<std::uintptr_t>(dst) + length) % kCacheLineBytes;
}

// Takes the next tiles of a job: about `bytes` of them. Returns how many; none when the job is used up.
std::size_t take_tiles(Job& job, std::size_t longest, std::size_t bytes,
                       std::array<CopyPiece, kGrainTiles>& tiles) noexcept {
  std::size_t count = 0;
  std::size_t taken = 0;
  while (count < tiles.size() && taken < bytes && !job.pieces.empty()) {
    const CopyPiece& piece = job.pieces.front();
    std::byte* dst = piece.dst + job.offset;
    const std::size_t length = tile_length(dst, piece.bytes - job.offset, longest);
    if (length > 0) {
      tiles[count++] = CopyPiece{dst, piece.src + job.offset, length};
      taken += length;
      job.offset += length;
    }
    if (job.offset == piece.bytes) {
      job.pieces = job.pieces.subspan(1);
      job.offset = 0;
    }
  }
  job.left -= taken;
  return count;
}

void copy_streaming(std::span<const CopyPiece> pieces) noexcept {
  const CopyKernel& kernel = streaming_kernel();
  Job job{.pieces = pieces};
  std::array<CopyPiece, kGrainTiles> tiles;
  while (const std::size_t count = take_tiles(job, kernel.tile_bytes, kGrainBytesMax, tiles)) {
    kernel.copy(std::span(tiles).first(count));
  }
}

// What the others still have takes no longer than a grain or a part, and to sleep and be woken takes as long.
constexpr std::chrono::microseconds kSpin{50};

// How long a borrowed thread looks for another batch.
constexpr std::chrono::microseconds kStay{10};

// Returns whether `over` came true.
template <class Over>
bool spin_until(const Over& over, std::chrono::microseconds longest) noexcept {
  const auto end = std::chrono::steady_clock::now() + longest;
  while (!over()) {
    if (std::chrono::steady_clock::now() >= end) return false;
  }
  return true;
}

}  // namespace

// Invariants, under `mutex`
//   C1  `jobs` holds exactly the batches that still have bytes, or parts, which no thread has taken.
//   C2  A borrowed thread that has taken tiles or a part of a job is counted in its `workers` until they are done; the
//       caller leaves, and the job's memory goes, only at zero.
//   C3  A thread that was asked for is counted in `borrowed` until it looks at this no more; there are at most
//       `workers_max`.
struct CopyTeam::Impl {
  Impl(int thread_count, LendThread lender) : workers_max(thread_count - 1), lend(std::move(lender)) {}

  // Carries the job out with `helpers` borrowed threads at most besides the caller.
  void run(Job& job, std::size_t helpers) noexcept;
  bool has_workers() const noexcept { return workers_max > 0 && generation == fork_generation(); }
  void give_back(std::size_t count) noexcept;
  void work() noexcept;
  // One grain or part of the job. Called and returns with the lock held; works without it. False when there was none.
  bool do_some(Job& job, std::unique_lock<std::mutex>& lock) noexcept;
  bool copy_grain(Job& job, std::unique_lock<std::mutex>& lock) noexcept;
  void remove(Job& job) noexcept;
  void stop() noexcept;

  const int workers_max;
  const LendThread lend;
  const std::uint32_t generation = fork_generation();
  std::mutex mutex;
  std::condition_variable job_done;
  std::condition_variable given_back;
  Job* jobs = nullptr;
  std::atomic<bool> has_jobs{false};  // as `jobs` says, for a look without the lock
  int borrowed = 0;
};

bool CopyTeam::Impl::do_some(Job& job, std::unique_lock<std::mutex>& lock) noexcept {
  if (job.part == nullptr) {
    return copy_grain(job, lock);
  }
  if (job.left == 0) {
    return false;
  }
  const std::size_t index = job.parts - job.left;
  if (--job.left == 0) {
    remove(job);
  }
  lock.unlock();
  job.part(job.context, index);
  lock.lock();
  return true;
}

bool CopyTeam::Impl::copy_grain(Job& job, std::unique_lock<std::mutex>& lock) noexcept {
  const CopyKernel& kernel = streaming_kernel();
  const std::size_t share = job.left / (2 * (static_cast<std::size_t>(workers_max) + 1));
  std::array<CopyPiece, kGrainTiles> tiles;
  const std::size_t count =
      take_tiles(job, kernel.tile_bytes, std::clamp(share, kGrainBytesMin, kGrainBytesMax), tiles);
  if (count == 0) {
    return false;
  }
  if (job.left == 0) {
    remove(job);
  }
  lock.unlock();
  kernel.copy(std::span(tiles).first(count));
  lock.lock();
  return true;
}

void CopyTeam::Impl::remove(Job& job) noexcept {
  Job** link = &jobs;
  while (*link != nullptr && *link != &job) {
    link = &(*link)->next;
  }
  if (*link != nullptr) {
    *link = job.next;
  }
  has_jobs.store(jobs != nullptr, std::memory_order_release);
}

void CopyTeam::Impl::work() noexcept {
  const auto next = [this] { return has_jobs.load(std::memory_order_acquire); };
  std::unique_lock lock(mutex);
  for (;;) {
    if (jobs == nullptr) {  // who copies one batch after another needs not wake a thread for each
      lock.unlock();
      const bool more = spin_until(next, kStay);
      lock.lock();
      if (jobs == nullptr && more) continue;
      if (jobs == nullptr) break;
    }
    Job& job = *jobs;
    job.workers.fetch_add(1, std::memory_order_relaxed);
    while (do_some(job, lock)) {
    }
    // The last look at the job: its caller may leave as soon as it sees zero.
    if (job.workers.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      job_done.notify_all();
    }
  }
  give_back(1);
}

// REQUIRES: the lock is held.
void CopyTeam::Impl::give_back(std::size_t count) noexcept {
  borrowed -= static_cast<int>(count);
  if (borrowed == 0) given_back.notify_all();
}

void CopyTeam::Impl::run(Job& job, std::size_t helpers) noexcept {
  std::size_t wanted = 0;
  {
    const std::lock_guard lock(mutex);
    Job** last = &jobs;
    while (*last != nullptr) {
      last = &(*last)->next;
    }
    *last = &job;
    has_jobs.store(true, std::memory_order_release);
    wanted = std::min(static_cast<std::size_t>(workers_max - borrowed), helpers);
    borrowed += static_cast<int>(wanted);
  }
  // Without the lock, which those that come want. Those that have helped with another job come by themselves.
  std::size_t lent = 0;
  while (lent < wanted && lend([this] { work(); })) ++lent;
  std::unique_lock lock(mutex);
  if (lent < wanted) give_back(wanted - lent);
  while (do_some(job, lock)) {
  }
  lock.unlock();
  const auto over = [&job] { return job.workers.load(std::memory_order_acquire) == 0; };
  if (spin_until(over, kSpin)) return;
  lock.lock();
  job_done.wait(lock, over);
}

void CopyTeam::Impl::stop() noexcept {
  std::unique_lock lock(mutex);
  given_back.wait(lock, [this] { return borrowed == 0; });
}

void copy_pieces(std::span<const CopyPiece> pieces, CopyWay way) noexcept {
  if (way == CopyWay::kCached) {
    copy_kernels().back().copy(pieces);  // a single memcpy a piece, however long
  } else {
    copy_streaming(pieces);
  }
}

CopyTeam::CopyTeam() : CopyTeam(1, nullptr) {}

CopyTeam::CopyTeam(int threads, LendThread lend)
    : impl_(std::make_unique<Impl>(std::max(threads, 1), std::move(lend))) {}

CopyTeam::~CopyTeam() {
  if (impl_->generation != fork_generation()) {
    // A forked child: the borrowed threads are not here, and one of them may have held the lock. Nothing in there can
    // be destroyed, so it is left.
    static_cast<void>(impl_.release());
    return;
  }
  impl_->stop();
}

void CopyTeam::run(std::span<const CopyPiece> pieces) noexcept {
  std::size_t total = 0;
  for (const CopyPiece& piece : pieces) {
    total += piece.bytes;
  }
  if (total > kInlineBytes && impl_->has_workers()) {
    Job job{.pieces = pieces, .left = total};
    impl_->run(job, total / kGrainBytesMax);
  } else {
    copy_pieces(pieces, total < kStreamBytes ? CopyWay::kCached : CopyWay::kStreaming);
  }
}

void CopyTeam::run_parts(std::size_t parts, Part part, void* context) noexcept {
  if (parts > 1 && impl_->has_workers()) {
    Job job{.pieces = {}, .left = parts, .part = part, .context = context, .parts = parts};
    impl_->run(job, parts - 1);
    return;
  }
  for (std::size_t i = 0; i < parts; ++i) {
    part(context, i);
  }
}

}  // namespace kvpool
