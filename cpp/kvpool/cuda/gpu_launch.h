// What cuda/kernels.cu defines, where there is a CUDA compiler.
#pragma once

#include "kvpool/cuda/kernel_plan.h"

namespace kvpool::cuda {

// Launches the kernel that the table is for. Returns a cudaError_t. Thread-safe. REQUIRES: as KernelSet.
int launch_on_gpu(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept;

// Loads every kernel that launch_on_gpu may launch into the current context. Returns a cudaError_t. Thread-safe.
int load_on_gpu() noexcept;

const char* gpu_result_name(int result);

}  // namespace kvpool::cuda
