// Copies between memories that one GPU reaches: its own, page-locked host memory, and what other processes and other
// GPUs have let it map. How: stream_copier.h. Each call has a stream to itself, so that calls of several threads
// overlap. A call that comes to a stand while streams wait for words (wait_word.h) sets these by force.
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
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/stream_copier.h"

namespace kvpool {

class DeviceCopier {
 public:
  // As StreamCopier.
  DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const char* what);
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  const std::shared_ptr<const CudaContext>& context() const noexcept { return copier_.context(); }

  // Strip s of block from[i] to block to[i], for all of them; the plan has only blocks of one medium on each side.
  // Returns when the bytes have arrived, how many pieces there were. `merge`: neighbours that lie in a row are one.
  // Throws kDeviceLost, kUnsupported, kOutOfMemory, std::bad_alloc. Whatever it throws, but for kDeviceLost, nothing is
  // written any more then. REQUIRES: host memory is page-locked; no two pieces overlap where they are written.
  std::uint64_t copy(std::span<const PlannedStrip> plan, std::span<const Address> from, std::span<const Address> to,
                     bool merge);
  // The same for pieces as they are.
  void copy(std::span<const CopyPiece> pieces);
  // Takes what the next call needs of the driver, so that it need not then. Throws as CudaDriver::require.
  void warm_up();

 private:
  class Lease;
  template <class Put>
  std::uint64_t on_a_stream(Put&& put);
  std::unique_ptr<CudaStream> take();
  void put_back(std::unique_ptr<CudaStream> stream) noexcept;

  StreamCopier copier_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaStream>> idle_;  // under mutex_
};

}  // namespace kvpool
