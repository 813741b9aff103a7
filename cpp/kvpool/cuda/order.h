// What a write from this process has to wait for: the work that the application has given to its GPU.
//
// Thread-safety: all of it. An order may go in any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

class DeviceOrder {
 public:
  // After what the stream has been given until now; without a stream, after what the whole device has been given by
  // the time of wait(). Does not wait itself. Throws kArgument for a stream that is none of this GPU, and as
  // CudaDriver::require.
  static std::shared_ptr<const DeviceOrder> after(std::shared_ptr<const CudaContext> context,
                                                  const CallerStream& stream);
  ~DeviceOrder();
  DeviceOrder(const DeviceOrder&) = delete;
  DeviceOrder& operator=(const DeviceOrder&) = delete;

  // Whether wait() would return at once. Of a whole device that is not known: false. So it is when the driver fails:
  // wait() says how.
  bool ended() const noexcept;
  // Returns when the work has ended. Of a stream it looks, again and again, so that nothing of the write is on the
  // GPU before, and it can be given up: throws kDeadline, kCancelled (`cancelled`, may be null). Of a whole device it
  // cannot. Throws as CudaDriver::require.
  void wait(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const;

 private:
  explicit DeviceOrder(std::shared_ptr<const CudaContext> context) noexcept;
  bool query() const;

  const std::shared_ptr<const CudaContext> context_;
  CuEvent event_ = nullptr;  // null: of the whole device
};

}  // namespace kvpool
