// Memory of a GPU that pipes gather into and scatter from.
//
// To give memory back (cuMemFree) waits for all that the GPU does, a receive of another pipe among it, which ends only
// when its peer sends; and who else asks the driver meanwhile may wait with it: the very thread that would notice the
// deadline of that receive. So it is given back when no pipe passes anything, and no stream waits for a word
// (cuda/wait_word.h); until then it is kept, for the next pipe that asks for as much.
//
// Invariants
//   U4  Staging memory is given back only while no pass of its context is under way, and none begins meanwhile.
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
  // Takes memory that was kept, or new. Throws kUnsupported when the GPU has no room, and as CudaDriver::require.
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
  std::size_t bytes_;  // that it has: no fewer than were asked for
  CuPointer base_ = 0;
};

// A pass is under way while this lives. REQUIRES: the context is current when it goes.
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
