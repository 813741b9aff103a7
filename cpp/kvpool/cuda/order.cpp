#include "kvpool/cuda/order.h"

#include <sched.h>
#include <time.h>

#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "a transfer cannot be ordered after the caller's work";
constexpr std::int64_t kSpinNs = 50'000;  // then it sleeps between two looks
constexpr long kPauseNs = 50'000;

std::int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

DeviceOrder::DeviceOrder(std::shared_ptr<const CudaContext> context) noexcept : context_(std::move(context)) {}

std::shared_ptr<const DeviceOrder> DeviceOrder::after(std::shared_ptr<const CudaContext> context,
                                                      const CallerStream& stream) {
  std::shared_ptr<DeviceOrder> order(new DeviceOrder(std::move(context)));
  if (!stream) return order;
  const CudaContext& own = *order->context_;
  const CurrentContext current(own, kWhat);
  check_stream_of(own, *stream, kWhat);
  const CudaDriver& driver = own.driver();
  driver.require(driver.event_create(&order->event_, kCuEventDisableTiming), "cuEventCreate", kWhat);
  driver.require(driver.event_record(order->event_, *stream), "cuEventRecord", kWhat);
  return order;
}

DeviceOrder::~DeviceOrder() {
  if (event_ == nullptr) return;
  const CurrentContext current(*context_);
  if (current) context_->driver().event_destroy(event_);
}

bool DeviceOrder::query() const {
  const CuResult result = context_->driver().event_query(event_);
  if (result == kCudaNotReady) return false;
  context_->driver().require(result, "cuEventQuery", kWhat);
  return true;
}

bool DeviceOrder::ended() const noexcept {
  if (event_ == nullptr) return false;
  const CurrentContext current(*context_);
  return current && context_->driver().event_query(event_) == kCudaSuccess;
}

void DeviceOrder::wait(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const {
  const CurrentContext current(*context_, kWhat);
  if (event_ == nullptr) {
    context_->driver().require(context_->driver().ctx_synchronize(), "cuCtxSynchronize", kWhat);
    return;
  }
  for (const std::int64_t began = now_ns(); !query();) {
    const std::int64_t now = now_ns();
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      throw Error(ErrorCode::kCancelled, "the transfer was cancelled");
    }
    if (now >= deadline_ns) {
      throw Error(ErrorCode::kDeadline,
                  "the transfer's deadline came before the end of the work that it was to follow");
    }
    if (now - began < kSpinNs) {
      sched_yield();
    } else {
      const timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace kvpool
