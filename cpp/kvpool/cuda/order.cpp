#include "kvpool/cuda/order.h"

#include <sched.h>
#include <time.h>

#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied after the caller's work";
constexpr int kRecordContextVersion = 12050;
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
  order->make_event();
  own.driver().require(own.driver().event_record(order->event_, *stream), "cuEventRecord", kWhat);
  return order;
}

std::shared_ptr<const DeviceOrder> DeviceOrder::after_now(std::shared_ptr<const CudaContext> context,
                                                          const CallerStream& stream) {
  if (stream) return after(std::move(context), stream);
  std::shared_ptr<DeviceOrder> order(new DeviceOrder(std::move(context)));
  const CudaContext& own = *order->context_;
  const CurrentContext current(own, kWhat);
  if (order->record_device()) return order;
  own.driver().require(own.driver().ctx_synchronize(), "cuCtxSynchronize", kWhat);
  order->is_met_ = true;
  return order;
}

// REQUIRES: the context is current, here and below.
void DeviceOrder::make_event() {
  const CudaDriver& driver = context_->driver();
  driver.require(driver.event_create(&event_, kCuEventDisableTiming), "cuEventCreate", kWhat);
}

// False where the driver has no such call.
bool DeviceOrder::record_device() {
  const CudaDriver& driver = context_->driver();
  if (driver.ctx_record_event == nullptr || context_->driver_version() < kRecordContextVersion) return false;
  make_event();
  driver.require(driver.ctx_record_event(context_->handle(), event_), "cuCtxRecordEvent", kWhat);
  return true;
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
  if (event_ == nullptr) return is_met_;
  const CurrentContext current(*context_);
  return current && context_->driver().event_query(event_) == kCudaSuccess;
}

void DeviceOrder::wait(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const {
  if (is_met_) return;
  if (event_ == nullptr) return after_now(context_, std::nullopt)->wait(deadline_ns, cancelled);
  const CurrentContext current(*context_, kWhat);
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
