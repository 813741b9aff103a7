// The GPU work of the application that a write or a swap of this process has to wait for.
//
// For a stream it is an event. For a whole device it is an event, too, if the driver can record all work of a context
// in one (CUDA 12.5): default streams do not cover the non-blocking streams that engines use, and a thread cannot leave
// cuCtxSynchronize when some of the work never ends (an NCCL receive from a stalled peer, say). With an older driver it
// is that call all the same: a helper thread in the call could not be ended either, and would keep the context for as
// long as the work stalls.
//
// A stream that waits for a peer's content (wait_word.h) is work of its device, too. A wait for the whole device waits
// for that stream; if the peer waits in the same way, neither advances before its deadline. So the wait is given up
// when streams have waited for words so long that this is likely.
//
// Thread-safety: all of it. Any thread may destroy an order.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

class DeviceOrder {
 public:
  // After the work that the stream has now; without a stream, after the work that the whole device has at the time of
  // wait(). Does not wait itself. Throws kArgument for a stream of another GPU, and as
  // CudaDriver::require.
  static std::shared_ptr<const DeviceOrder> after(std::shared_ptr<const CudaContext> context,
                                                  const CallerStream& stream);
  // The same, but without a stream it is after the work that the whole device has now. Waits for that work here if the
  // driver cannot record it in an event. Also throws kState while a CUDA graph is captured on the device.
  static std::shared_ptr<const DeviceOrder> after_now(std::shared_ptr<const CudaContext> context,
                                                      const CallerStream& stream);
  ~DeviceOrder();
  DeviceOrder(const DeviceOrder&) = delete;
  DeviceOrder& operator=(const DeviceOrder&) = delete;

  // Whether wait() would return at once. False for a whole device, because that is unknown, and when the driver fails:
  // wait() throws the error.
  bool ended() const noexcept;
  // Returns when the work has ended. Polls, so that the write puts nothing on the GPU before, and so that the wait can
  // end early: throws kDeadline, kCancelled (`cancelled`, may be null). A wait for a whole device cannot end early if
  // the driver is older than CUDA 12.5: it throws kBusy if streams of the device wait for words. With a newer driver it
  // throws kBusy if they have done so for kWordPatienceNs. Throws as CudaDriver::require.
  void wait(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const;

 private:
  explicit DeviceOrder(std::shared_ptr<const CudaContext> context) noexcept;
  void make_event();
  bool can_record_device() const noexcept;
  bool record_device();
  bool query() const;
  void poll(std::int64_t deadline_ns, const std::atomic<bool>* cancelled, bool gives_way) const;

  const std::shared_ptr<const CudaContext> context_;
  CuEvent event_ = nullptr;  // null: the whole device, at the time of wait()
  bool is_met_ = false;
};

}  // namespace kvpool
