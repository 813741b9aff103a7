// What the kernels do, as plainly as it can be said.
#include <cstring>

#include "kvpool/cuda/kernel_plan.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {
namespace {

int copy(const CopyJob& job, Stream, const LaunchOptions&) {
  check_job(job);
  for (const BlockPair& pair : job.pairs) {
    for (const PlannedStrip& strip : job.strips) {
      std::memcpy(strip.to + pair.to * strip.to_stride, strip.from + pair.from * strip.from_stride, strip.bytes);
    }
  }
  return 0;
}

const char* result_name(int result) { return result == 0 ? "success" : "unknown"; }

}  // namespace

const KernelSet& reference_kernels() noexcept {
  static constexpr KernelSet kSet{"reference", copy, result_name, [] { return 0; }};
  return kSet;
}

}  // namespace kvpool::cuda
