// GPU memory into which pipes gather and from which they scatter.
//
// Freeing memory (cuMemFree) waits for all work of the GPU. That may include a receive of another pipe, which ends only
// when its peer sends. Other threads that call the driver meanwhile may have to wait as well, even the one that has to
// notice the deadline of that receive. So kvpool frees this memory only while no pipe is in a pass and no stream waits
// for a word (cuda/wait_word.h). Until then it keeps the memory for the next pipe that needs as much.
//
// Invariants
//   U4  Staging memory is freed only while no pass of its context is in progress, and a new pass waits for that.
//
// Thread-safety: all of it; one thread at a time uses a NcclStaging.
#pragma once

#include <cstddef>
#include <memory>

#include "kvpool/cuda/context.h"

namespace kvpool {

class NcclShelf;

class NcclStaging {
 public:
  // Takes kept memory, or allocates. Throws kUnsupported when the GPU has no room, and as CudaDriver::require.
  // REQUIRES: the context is current, here and in the destructor.
  NcclStaging(std::shared_ptr<const CudaContext> context, std::size_t bytes);
  ~NcclStaging();
  NcclStaging(const NcclStaging&) = delete;
  NcclStaging& operator=(const NcclStaging&) = delete;

  CuPointer base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  const std::shared_ptr<const CudaContext> context_;
  NcclShelf& shelf_;
  std::size_t bytes_;  // at least as many as requested
  CuPointer base_ = 0;
};

// A pass is in progress while this object lives. REQUIRES: the context is current in the destructor.
class NcclPassing {
 public:
  explicit NcclPassing(const CudaContext& context);
  ~NcclPassing();
  NcclPassing(const NcclPassing&) = delete;
  NcclPassing& operator=(const NcclPassing&) = delete;

 private:
  const CudaContext& context_;
  NcclShelf& shelf_;
};

}  // namespace kvpool
