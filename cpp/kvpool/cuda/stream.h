// A stream of kvpool's own, and its order with the streams of others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "kvpool/cuda/context.h"

namespace kvpool {

// Names the earlier work that a call has to wait for: that of a stream (a cudaStream_t; null, 1 and 2 are the default
// ones), or, if empty, that of the whole device.
using CallerStream = std::optional<CuStream>;

// The work that must end before a copy begins.
class CopyOrder {
 public:
  // The earlier work of that stream, or, without one, of the whole device.
  CopyOrder(CallerStream stream) noexcept : stream_(stream) {}  // NOLINT(google-explicit-constructor)
  CopyOrder(CuStream stream) noexcept : stream_(stream) {}      // NOLINT(google-explicit-constructor)
  CopyOrder(std::nullopt_t none) noexcept : stream_(none) {}    // NOLINT(google-explicit-constructor)
  // Nothing: what had to end before has ended.
  static CopyOrder met() noexcept {
    CopyOrder order{std::nullopt};
    order.is_met_ = true;
    return order;
  }

  bool is_met() const noexcept { return is_met_; }
  const CallerStream& stream() const noexcept { return stream_; }

 private:
  CallerStream stream_;
  bool is_met_ = false;
};

// Throws kArgument for a stream of another GPU, and kState for one that is being captured into a CUDA graph: what
// follows it would go into that graph. REQUIRES: the stream exists (the CUDA driver does not check a handle: one that
// was never made, or was destroyed, is undefined behaviour there); the context is current.
void check_stream_of(const CudaContext& context, CuStream stream, const char* what);

// Does not wait for the default stream, nor lets it wait.
// Thread-safety: none; may go in any thread.
class CudaStream {
 public:
  // Throws as CudaDriver::require. REQUIRES: the context is current, here and below, but in the destructor.
  explicit CudaStream(std::shared_ptr<const CudaContext> context);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  const CudaContext& context() const noexcept { return *context_; }
  CuStream handle() const noexcept { return stream_; }

  // Work that is put into this stream from now on begins when the order is met: the GPU waits for the work that is in
  // the other stream now. For a whole device this thread waits, here. Throws kArgument for a stream of another device;
  // kState for a stream that is captured, and for a whole device while a CUDA graph is captured there.
  void follow(const CopyOrder& order);
  // Polls until all work that is in this stream now has ended, or the time is over; returns whether it has ended. True,
  // too, when the driver does not say: drain() throws why.
  bool ends_within(std::int64_t ns) noexcept;
  // Returns when all that is in this stream has ended. Throws as CudaDriver::require: kDeviceLost also when the driver
  // does not say whether it has.
  void drain(const char* what);

 private:
  std::shared_ptr<const CudaContext> context_;
  CuStream stream_ = nullptr;
  CuEvent event_ = nullptr;
};

}  // namespace kvpool
