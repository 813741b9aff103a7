// What NCCL takes of a GPU's memory, for all pools of this process: its own buffers, which it names to nobody, and the
// staging memory of kvpool's passes.
//
// Thread-safety: all of it, but one thread at a time uses a CommunicatorCost.
#pragma once

#include <cstdint>
#include <utility>

#include "kvpool/cuda/context.h"

namespace kvpool {

struct NcclCost {
  std::uint32_t communicators = 0;
  // By how much the free memory of the GPU fell while these were made and first used: about what NCCL has taken, since
  // others may allocate or free meanwhile. What fell while several were made at once counts once, with one of them.
  std::uint64_t library_bytes = 0;
  std::uint64_t staging_bytes = 0;  // in use, or kept until it can be freed
};

// `gpu`: its ordinal. All zeros where NCCL was not used.
NcclCost nccl_cost(int gpu) noexcept;

// Counts staging memory that was allocated, or freed.
void add_nccl_staging(const CudaContext& context, std::uint64_t bytes) noexcept;
void remove_nccl_staging(const CudaContext& context, std::uint64_t bytes) noexcept;

// Of one communicator, as long as it lives. REQUIRES: the context is current.
class CommunicatorCost {
 public:
  explicit CommunicatorCost(const CudaContext& context) noexcept;
  ~CommunicatorCost();
  CommunicatorCost(const CommunicatorCost&) = delete;
  CommunicatorCost& operator=(const CommunicatorCost&) = delete;

  // Adds what this takes of the GPU's free memory; nothing if it throws. REQUIRES: a communicator that goes then has
  // gone when it throws, or what it gives back counts against others that are measured.
  template <class Work>
  void measure(Work&& work) {
    begin();
    try {
      std::forward<Work>(work)();
    } catch (...) {
      end(false);
      throw;
    }
    end(true);
  }

 private:
  void begin() noexcept;
  void end(bool done) noexcept;

  const CudaContext& context_;
  std::uint64_t bytes_ = 0;
  std::int64_t fallen_before_ = 0;  // when the measurement under way began
};

}  // namespace kvpool
