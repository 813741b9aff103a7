// Turns a job into launches: checks it, chooses the width of its accesses, and writes the tables that kernels read
// (table.h). Knows no CUDA: the same plan is launched on the GPU (gpu_kernels) and run lane by lane in the tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/table.h"

namespace kvpool::cuda {

struct TableLaunch {
  // Bytes of a unit in this launch: 16, 4 or 1, the widest to which every address of the job, on both sides, is
  // aligned.
  std::uint32_t width;
  const TableHeader* header;
  const std::byte* data;   // strips and pairs; right behind the header, as in InlineTable, when `device_data` is null
  std::size_t data_bytes;  // at most kInlineTableBytes when `device_data` is null
  std::byte* device_data;  // where the kernel reads them instead: the launch copies them there, unless it is `data`
};

// Launches; returns a CUresult. The table is read before it returns, except one in a TableSpace.
using LaunchFunction = int (*)(void* context, const TableLaunch& launch);

// Cuts the job into as few launches as possible and passes each to `launch`, until one does not return 0; returns that
// result. Throws kArgument before the first. Allocates for error messages, and, where a strip is longer than its
// stride, for the sorted numbers of the blocks.
int launch_job(const CopyJob& job, const TableSpace& space, LaunchFunction launch, void* context);

// Only the checks of launch_job, for the reference. Throws kArgument.
void check_job(const CopyJob& job);

// Whether a byte that the job writes is also read or written by another piece of it. Costs O(n log n) and memory for
// every piece: for tests and debug builds.
bool overlaps(const CopyJob& job);

}  // namespace kvpool::cuda
