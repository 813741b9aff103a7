// Copies between memories that one GPU reaches: its own, page-locked host memory, and what other processes and other
// GPUs have let it map.
//
// Many small pieces are one kernel; few large ones go by the copy engines, in one call where the driver has it
// (cuMemcpyBatchAsync, CUDA 12.8). Each call has a stream to itself, so that calls of several threads overlap.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

// The kernels that can be launched in this context: null without any, and where another library than the machine's own
// driver answers, which the kernels would not call.
const cuda::KernelSet* kernels_for(const CudaContext& context) noexcept;

class DeviceCopier {
 public:
  // Mean length of a piece up to which a kernel copies; as DeviceMover has it.
  static constexpr std::size_t kKernelPieceBytesMax = std::size_t{256} << 10;

  // `kernels`: null, the copy engines copy small pieces, too. Throws as CudaDriver::require. `what` begins the text of
  // errors: what cannot be done then; it is kept, not copied.
  DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const char* what);
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  const std::shared_ptr<const CudaContext>& context() const noexcept { return context_; }

  // Strip s of block from[i] to block to[i], for all of them; the plan has only blocks of one medium on each side.
  // Returns when the bytes have arrived, how many pieces there were. `merge`: neighbours that lie in a row are one.
  // Throws kDeviceLost, kUnsupported, kOutOfMemory, std::bad_alloc. Whatever it throws, but for kDeviceLost, nothing is
  // written any more then. REQUIRES: host memory is page-locked; no two pieces overlap where they are written.
  std::uint64_t copy(std::span<const PlannedStrip> plan, std::span<const Address> from, std::span<const Address> to,
                     bool merge);
  // The same for pieces as they are.
  void copy(std::span<const CopyPiece> pieces);

 private:
  class Lease;
  std::unique_ptr<CudaStream> take();
  void put_back(std::unique_ptr<CudaStream> stream) noexcept;
  bool launch(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
              std::span<const Address> to);
  void copy_batch(CuStream stream, std::span<const CopyPiece> pieces);

  const std::shared_ptr<const CudaContext> context_;
  const cuda::KernelSet* const kernels_;
  const char* const what_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaStream>> idle_;  // under mutex_
};

}  // namespace kvpool
