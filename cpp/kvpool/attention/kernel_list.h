// The kernels of this build, for kernel.cpp. Each returns nullptr where the build has no compiler flags for it.
#pragma once

#include "kvpool/attention/kernel.h"

namespace kvpool {

const AttentionKernel* avx512bf16_kernel() noexcept;
const AttentionKernel* avx512_kernel() noexcept;
const AttentionKernel* avx2_kernel() noexcept;
const AttentionKernel* portable_kernel() noexcept;  // never nullptr

}  // namespace kvpool
