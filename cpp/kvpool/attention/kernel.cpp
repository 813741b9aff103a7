#include "kvpool/attention/kernel.h"

#include <array>

#include "kvpool/attention/kernel_list.h"

namespace kvpool {
namespace {

struct KernelList {
  std::array<const AttentionKernel*, 4> kernels{};
  std::size_t count = 0;

  KernelList() noexcept {
    for (const AttentionKernel* kernel : {avx512bf16_kernel(), avx512_kernel(), avx2_kernel(), portable_kernel()}) {
      if (kernel != nullptr && kernel->runs_here()) kernels[count++] = kernel;
    }
  }
};

}  // namespace

int kv_type_index(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return 0;
    case DType::kFloat16:
      return 1;
    case DType::kBfloat16:
      return 2;
    case DType::kFloat8E4M3:
      return 3;
    default:
      return -1;
  }
}

std::span<const AttentionKernel* const> attention_kernels() noexcept {
  static const KernelList list;
  return std::span(list.kernels).first(list.count);
}

}  // namespace kvpool
