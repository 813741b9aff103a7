// The GPU work of the application that a write or a swap of this process has to wait for.
//
// Of a stream that is an event. Of a whole device, too, where the driver can record all work of a context in one
// (CUDA 12.5): legacy or per-thread default streams say nothing of the non-blocking ones that engines work in, and
// cuCtxSynchronize cannot be given up when some of the work never ends, a receive of NCCL from a peer that stalls, say.
// Before 12.5 it is that call all the same: a thread that waits in it on our behalf could not be ended either, and
// would keep the context and its place in the driver for as long as the work stalls.
//
// A stream that waits for what a peer sends (wait_word.h) is work of its device, too. What follows the whole device
// follows that stream; where the peer waits for the very same in its turn, neither would go on before its deadline. So
// it is given up when words have been waited for so long that this is likely.
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
  // the time of wait(). Does not wait itself. Throws kArgument for a stream of another GPU, and as
  // CudaDriver::require.
  static std::shared_ptr<const DeviceOrder> after(std::shared_ptr<const CudaContext> context,
                                                  const CallerStream& stream);
  // The same, but without a stream it is after what the whole device has been given until now. Waits for it here where
  // the driver cannot put that into an event. Throws also kState, while a CUDA graph is captured on the device.
  static std::shared_ptr<const DeviceOrder> after_now(std::shared_ptr<const CudaContext> context,
                                                      const CallerStream& stream);
  ~DeviceOrder();
  DeviceOrder(const DeviceOrder&) = delete;
  DeviceOrder& operator=(const DeviceOrder&) = delete;

  // Whether wait() would return at once. Of a whole device that is not known: false. So it is when the driver fails:
  // wait() says how.
  bool ended() const noexcept;
  // Returns when the work has ended. It looks, again and again, so that nothing of the write is on the GPU before, and
  // it can be given up: throws kDeadline, kCancelled (`cancelled`, may be null). Of a whole device it cannot where the
  // driver is older than CUDA 12.5; and there kBusy is thrown when streams of the device wait for words, or, where it
  // can, have done so for kWordPatienceNs. Throws as CudaDriver::require.
  void wait(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const;

 private:
  explicit DeviceOrder(std::shared_ptr<const CudaContext> context) noexcept;
  void make_event();
  bool can_record_device() const noexcept;
  bool record_device();
  bool query() const;
  void look(std::int64_t deadline_ns, const std::atomic<bool>* cancelled, bool gives_way) const;

  const std::shared_ptr<const CudaContext> context_;
  CuEvent event_ = nullptr;  // null: of the whole device, at the time of wait()
  bool is_met_ = false;
};

}  // namespace kvpool
