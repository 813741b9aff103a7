// AVX-512 as Skylake's servers have it, and all since.
#include "kvpool/attention/kernel_list.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kvpool/attention/vector_avx512.h"

namespace kvpool {
namespace {

bool runs_here() noexcept { return has_avx512(); }

}  // namespace

const AttentionKernel* avx512_kernel() noexcept {
  static constexpr AttentionKernel kKernel{
      {AttentionIsa::kAvx512, 1},
      {attend_leaf<Avx512, Float32, FloatDot<Avx512, Float32>>, attend_leaf<Avx512, Float16, FloatDot<Avx512, Float16>>,
       attend_leaf<Avx512, Bfloat16, FloatDot<Avx512, Bfloat16>>,
       attend_leaf<Avx512, Float8E4M3, FloatDot<Avx512, Float8E4M3>>},
      runs_here};
  return &kKernel;
}

}  // namespace kvpool
#else
namespace kvpool {
const AttentionKernel* avx512_kernel() noexcept { return nullptr; }
}  // namespace kvpool
#endif
