#include "kvpool/routes/nccl/nccl_cost.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>

namespace kvpool {
namespace {

constexpr std::size_t kGpusMax = 64;  // of a host; those beyond count with the last

struct Counters {
  std::atomic<std::uint32_t> communicators{0};
  std::atomic<std::uint64_t> library_bytes{0};
  std::atomic<std::uint64_t> staging_bytes{0};

  // Of the measurements under way. A GPU has one count of free memory, so of those that overlap, the one that ends next
  // takes what fell since it began and none has taken.
  std::mutex mutex;
  std::uint32_t measuring = 0;
  std::int64_t fallen = 0;   // bytes, in all; falls when memory is freed
  std::int64_t untaken = 0;  // of what fell since the first of those under way began
  std::uint64_t free = 0;    // at the last look; 0: unknown
};

Counters& counters_of(int gpu) noexcept {
  static std::array<Counters, kGpusMax> all;  // destroying them does nothing: threads may outlive static objects
  return all[std::min(static_cast<std::size_t>(std::max(gpu, 0)), kGpusMax - 1)];
}

// REQUIRES: the lock is held, and the context is current.
void look(const CudaContext& context, Counters& counters) noexcept {
  std::size_t free = 0;
  std::size_t total = 0;
  if (context.driver().mem_get_info(&free, &total) != kCudaSuccess) free = 0;
  if (free != 0 && counters.free != 0) {
    const std::int64_t fell = static_cast<std::int64_t>(counters.free) - static_cast<std::int64_t>(free);
    counters.fallen += fell;
    counters.untaken += fell;
  }
  counters.free = free;
}

}  // namespace

NcclCost nccl_cost(int gpu) noexcept {
  const Counters& counters = counters_of(gpu);
  return {counters.communicators.load(), counters.library_bytes.load(), counters.staging_bytes.load()};
}

void add_nccl_staging(const CudaContext& context, std::uint64_t bytes) noexcept {
  counters_of(context.ordinal()).staging_bytes += bytes;
}

void remove_nccl_staging(const CudaContext& context, std::uint64_t bytes) noexcept {
  counters_of(context.ordinal()).staging_bytes -= bytes;
}

CommunicatorCost::CommunicatorCost(const CudaContext& context) noexcept : context_(context) {
  ++counters_of(context.ordinal()).communicators;
}

CommunicatorCost::~CommunicatorCost() {
  Counters& counters = counters_of(context_.ordinal());
  --counters.communicators;
  counters.library_bytes -= bytes_;
}

void CommunicatorCost::begin() noexcept {
  Counters& counters = counters_of(context_.ordinal());
  const std::lock_guard lock(counters.mutex);
  look(context_, counters);
  if (counters.measuring++ == 0) counters.untaken = 0;
  fallen_before_ = counters.fallen;
}

void CommunicatorCost::end(bool done) noexcept {
  Counters& counters = counters_of(context_.ordinal());
  const std::lock_guard lock(counters.mutex);
  look(context_, counters);
  --counters.measuring;
  if (!done) return;
  const std::int64_t taken = std::max<std::int64_t>(std::min(counters.untaken, counters.fallen - fallen_before_), 0);
  bytes_ += static_cast<std::uint64_t>(taken);
  counters.library_bytes += static_cast<std::uint64_t>(taken);
  counters.untaken = std::max<std::int64_t>(counters.untaken - taken, 0);  // what others free is owed by none
}

}  // namespace kvpool
