// Page-locked host memory: registered with the CUDA driver, so that GPUs copy to and from it at full speed.
#pragma once

#include <cstddef>
#include <memory>

namespace kvpool {

class CudaContext;

// Memory that stays registered while this object lives; the registration is valid in the contexts of all devices.
// Thread-safety: any thread may destroy it. A forked child, in which the driver does not work, unregisters nothing.
class PinnedRange {
 public:
  // Holds the primary context of this device; -1: of the thread's current device, or of device 0. All or nothing.
  // Throws as CudaDriver::require.
  PinnedRange(void* base, std::size_t bytes, int device = -1);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

 private:
  std::shared_ptr<const CudaContext> context_;
  void* base_;
};

}  // namespace kvpool
