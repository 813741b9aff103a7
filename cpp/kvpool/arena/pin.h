// Page-locked host memory: registered with the CUDA driver, so that GPUs copy to and from it at full speed.
//
// The driver is opened at run time (libcuda.so.1, or what the environment variable KVPOOL_CUDA_LIBRARY names); a
// machine without it still runs everything else.
#pragma once

#include <cstddef>
#include <memory>

namespace kvpool {

// Memory that stays registered while this object lives. Holds the primary context of the device that is current in the
// constructing thread, or of device 0; the registration is valid in the contexts of all devices.
// Thread-safety: may be destroyed by another thread than the one that made it. In a forked child, where the driver does
// not work, it must be leaked rather than destroyed.
class PinnedRange {
 public:
  // Throws Error kUnsupported, with the driver's code in the field `driver_code` when the driver refused. Everything
  // done until then is undone.
  PinnedRange(void* base, std::size_t bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

 private:
  struct Driver;
  std::unique_ptr<Driver> driver_;
  void* base_;
  int device_ = 0;
  void* context_ = nullptr;
};

}  // namespace kvpool
