// A stream that kvpool makes, and its order with other streams.
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
  // No work: all work before the copy has ended already.
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

// Does not wait for the default stream, nor does that wait for it. Thread-safety: none; any thread may destroy it.
class CudaStream {
 public:
  // Throws as CudaDriver::require. REQUIRES: the context is current, here and below, except in the destructor.
  explicit CudaStream(std::shared_ptr<const CudaContext> context);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  const CudaContext& context() const noexcept { return *context_; }
  CuStream handle() const noexcept { return stream_; }

  // Later work of this stream begins after the order: the GPU waits for the work that is in the other stream now. For a
  // whole device, this thread waits here. Throws kArgument for a stream of another device; kState for a stream that is
  // captured, and for a whole device while a CUDA graph is captured there.
  void follow(const CopyOrder& order);
  // Polls until all work that is in this stream now has ended, or the time is over; returns whether it has ended. Also
  // true when the driver fails: drain() throws the error.
  bool ends_within(std::int64_t ns) noexcept;
  // Returns when all work of this stream has ended. Throws as CudaDriver::require; also kDeviceLost when the driver
  // cannot say whether it has.
  void drain(const char* what);

 private:
  std::shared_ptr<const CudaContext> context_;
  CuStream stream_ = nullptr;
  CuEvent event_ = nullptr;
};

}  // namespace kvpool
