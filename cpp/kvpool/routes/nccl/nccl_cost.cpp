#include "kvpool/routes/nccl/nccl_cost.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

namespace kvpool {
namespace {

constexpr std::size_t kGpusMax = 64;  // of a host; those beyond count with the last

struct Counters {
  std::atomic<std::uint32_t> communicators{0};
  std::atomic<std::uint64_t> library_bytes{0};
  std::atomic<std::uint64_t> staging_bytes{0};
};

Counters& counters_of(int gpu) noexcept {
  static std::array<Counters, kGpusMax> all;  // destroying them does nothing: threads may outlive static objects
  return all[std::min(static_cast<std::size_t>(std::max(gpu, 0)), kGpusMax - 1)];
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

std::uint64_t CommunicatorCost::free_bytes() const noexcept {
  std::size_t free = 0;
  std::size_t total = 0;
  return context_.driver().mem_get_info(&free, &total) == kCudaSuccess ? free : 0;
}

void CommunicatorCost::add(std::uint64_t before, std::uint64_t after) noexcept {
  if (after == 0 || before <= after) return;
  bytes_ += before - after;
  counters_of(context_.ordinal()).library_bytes += before - after;
}

}  // namespace kvpool
