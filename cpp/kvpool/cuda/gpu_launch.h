// What cuda/kernels.cu defines, where there is a compiler for it.
#pragma once

#include "kvpool/cuda/kernel_plan.h"

namespace kvpool::cuda {

// Launches the kernel that the table is for. Returns a cudaError_t. Thread-safe. REQUIRES: as KernelSet.
int launch_on_gpu(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept;

// Loads every kernel that launch_on_gpu may launch into the current context. Returns a cudaError_t. Thread-safe.
int load_on_gpu() noexcept;

const char* gpu_result_name(int result);

// The three of them, as a library other than the machine's driver may bring them.
struct Launcher {
  int (*launch)(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept;
  int (*load)() noexcept;
  const char* (*result_name)(int result);
};

// The kernels that this launcher launches; null without one. There is one set: the launcher named last is the one that
// it uses, so a process has one such library.
const KernelSet* kernels_of(const Launcher* launcher) noexcept;

}  // namespace kvpool::cuda
