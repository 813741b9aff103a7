// The functions that cuda/kernels.cu defines, in builds with a CUDA compiler.
#pragma once

#include "kvpool/cuda/kernel_plan.h"

namespace kvpool::cuda {

// Launches the kernel that the table is for. Returns a cudaError_t. Thread-safe. REQUIRES: as KernelSet.
int launch_on_gpu(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept;

// Loads every kernel that launch_on_gpu may launch into the current context. Returns a cudaError_t. Thread-safe.
int load_on_gpu() noexcept;

const char* gpu_result_name(int result);

// These functions, as a library other than the machine's driver may provide them.
struct Launcher {
  int (*launch)(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept;
  int (*load)() noexcept;
  const char* (*result_name)(int result);
};

// The kernels of this launcher; null without a launcher. There is one set, which uses the launcher named last, so a
// process can have only one such library.
const KernelSet* kernels_of(const Launcher* launcher) noexcept;

}  // namespace kvpool::cuda
