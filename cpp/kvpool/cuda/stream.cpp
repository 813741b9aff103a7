#include "kvpool/cuda/stream.h"

#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/poll_backoff.h"

namespace kvpool {
namespace {

constexpr int kGreenContextVersion = 12050;

}  // namespace

void check_stream_of(const CudaContext& context, CuStream stream, const char* what) {
  const CudaDriver& driver = context.driver();
  CuContext owner = nullptr;
  // A green context is a part of the GPU; its streams belong to the primary context, which only the newer call says.
  if (driver.stream_get_ctx_v2 != nullptr && context.driver_version() >= kGreenContextVersion) {
    void* green = nullptr;
    driver.require(driver.stream_get_ctx_v2(stream, &owner, &green), "cuStreamGetCtx_v2", what);
  } else {
    driver.require(driver.stream_get_ctx(stream, &owner), "cuStreamGetCtx", what);
  }
  if (owner != context.handle()) {
    throw Error(ErrorCode::kArgument,
                "stream is no stream of the primary context of GPU " + std::to_string(context.ordinal()),
                {{"device", context.ordinal()}});
  }
  if (context.driver().stream_is_capturing == nullptr) return;
  int status = 0;
  context.driver().require(context.driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing", what);
  if (status == 0) return;
  throw Error(ErrorCode::kState,
              std::string(what) +
                  ": stream is being captured into a CUDA graph, and its work waits for the graph's "
                  "launch; name one that is not captured",
              {{"device", context.ordinal()}});
}

CudaStream::CudaStream(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
  constexpr const char* kWhat = "no CUDA stream can be made";
  const CudaDriver& driver = context_->driver();
  driver.require(driver.stream_create(&stream_, kCuStreamNonBlocking), "cuStreamCreate", kWhat);
  const CuResult result = driver.event_create(&event_, kCuEventDisableTiming);
  if (result != kCudaSuccess) driver.stream_destroy(stream_);
  driver.require(result, "cuEventCreate", kWhat);
}

CudaStream::~CudaStream() {
  const CurrentContext current(*context_);
  if (!current) return;
  context_->driver().event_destroy(event_);
  context_->driver().stream_destroy(stream_);
}

void CudaStream::follow(const CopyOrder& order) {
  constexpr const char* kWhat = "a copy cannot be ordered after the caller's work";
  if (order.is_met()) return;
  const CudaDriver& driver = context_->driver();
  const CallerStream& other = order.stream();
  if (!other) {
    driver.require(driver.ctx_synchronize(), "cuCtxSynchronize", kWhat);
    return;
  }
  check_stream_of(*context_, *other, kWhat);
  driver.require(driver.event_record(event_, *other), "cuEventRecord", kWhat);
  driver.require(driver.stream_wait_event(stream_, event_, 0), "cuStreamWaitEvent", kWhat);
}

bool CudaStream::ends_within(std::int64_t ns) noexcept {
  const CudaDriver& driver = context_->driver();
  if (driver.event_record(event_, stream_) != kCudaSuccess) return true;
  for (const PollBackoff backoff; driver.event_query(event_) == kCudaNotReady;) {
    const std::int64_t now = PollBackoff::now_ns();
    if (now - backoff.began_ns() >= ns) return false;
    backoff.pause(now);
  }
  return true;
}

void CudaStream::drain(const char* what) {
  const CudaDriver& driver = context_->driver();
  const CuResult result = driver.stream_synchronize(stream_);
  if (result == kCudaSuccess) return;
  // Pulled into a capture that began after the caller's stream had been looked at: what was put here since does not run
  // now, nor later, for the call above has broken that capture.
  int status = 0;
  if (fault_of(result) == CudaFault::kCapturing && driver.stream_is_capturing != nullptr &&
      driver.stream_is_capturing(stream_, &status) == kCudaSuccess && status != 0) {
    driver.require(result, "cuStreamSynchronize", what);
  }
  // An error need not mean that the work has ended. Asked again, a driver that still works answers.
  if (fault_of(result) != CudaFault::kLost && driver.stream_synchronize(stream_) == kCudaSuccess) {
    driver.require(result, "cuStreamSynchronize", what);
  }
  throw Error(ErrorCode::kDeviceLost, std::string(what) + ": cuStreamSynchronize failed with " + driver.name_of(result),
              {{"driver_code", result}});
}

}  // namespace kvpool
