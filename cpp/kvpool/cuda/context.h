// The primary context of a GPU, in which the CUDA runtime works, and with it torch and every engine.
//
// Thread-safety: all of it. Any thread may destroy a CudaContext.
#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/cuda/driver.h"

namespace kvpool {

class CudaContext {
 public:
  // Retains the primary context of the device with this number. Throws Error kUnsupported (no driver, no such device:
  // the text says which), kDeviceLost, kOutOfMemory. `what` begins the text: what could not be done.
  static std::shared_ptr<const CudaContext> retain(int ordinal, const char* what);
  // For the device that is current in the calling thread, or device 0: a process that works on device 3 has a context
  // there, and another on device 0 would only cost memory.
  static std::shared_ptr<const CudaContext> retain_current(const char* what);

  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const noexcept { return driver_; }
  int driver_version() const noexcept { return driver_version_; }  // 13000 for 13.0
  int ordinal() const noexcept { return ordinal_; }
  CuDevice device() const noexcept { return device_; }
  CuContext handle() const noexcept { return context_; }
  // False in a forked child, where the driver must not be called, so nothing is released.
  bool usable() const noexcept;
  // 0 for an attribute that the driver does not know. Throws as CudaDriver::require.
  int attribute(int attribute, const char* what) const;

 private:
  CudaContext(const CudaDriver& driver, CuDevice device, int ordinal, const char* what);

  const CudaDriver& driver_;
  const CuDevice device_;
  const int ordinal_;
  const std::uint32_t generation_;  // of forks
  int driver_version_ = 0;
  CuContext context_ = nullptr;
};

// Makes the context current in this thread while it lives, and relaxes the thread's capture mode. In global mode, any
// call here would break a CUDA graph capture of the engine, in whichever thread the engine captures. Relaxing is safe:
// kvpool never puts work into a stream that is being captured.
class CurrentContext {
 public:
  // Throws as CudaDriver::require.
  CurrentContext(const CudaContext& context, const char* what);
  // For destructors: does not throw; false when the context cannot be made current, as at the end of the process.
  explicit CurrentContext(const CudaContext& context) noexcept;
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  explicit operator bool() const noexcept { return current_; }

 private:
  void exchange_capture_mode() noexcept;

  const CudaContext& context_;
  bool current_;
  int capture_mode_;  // of the thread; restored by the destructor
};

}  // namespace kvpool
