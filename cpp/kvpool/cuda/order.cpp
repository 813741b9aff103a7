#include "kvpool/cuda/order.h"

#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/poll_backoff.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied after the caller's work";
constexpr int kRecordContextVersion = 12050;
constexpr std::int64_t kRetryAfterUs = 10'000;

[[noreturn]] void throw_behind_words() {
  throw Error(ErrorCode::kBusy,
              "this was to follow all work of the GPU, and a stream there waits for what a peer is to send (wait_on); "
              "try again when that fetch is done, or name the stream whose work comes first",
              {{"retry_after_us", kRetryAfterUs}});
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

bool DeviceOrder::can_record_device() const noexcept {
  return context_->driver().ctx_record_event != nullptr && context_->driver_version() >= kRecordContextVersion;
}

// False where the driver has no such call.
bool DeviceOrder::record_device() {
  if (!can_record_device()) return false;
  const CudaDriver& driver = context_->driver();
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
  if (event_ != nullptr) return poll(deadline_ns, cancelled, /*gives_way=*/false);
  if (!can_record_device() && words_unset(*context_)) throw_behind_words();
  const auto all = after_now(context_, std::nullopt);
  if (!all->is_met_) all->poll(deadline_ns, cancelled, /*gives_way=*/true);
}

// `gives_way`: to streams that wait for words.
void DeviceOrder::poll(std::int64_t deadline_ns, const std::atomic<bool>* cancelled, bool gives_way) const {
  const CurrentContext current(*context_, kWhat);
  const PollBackoff backoff;
  for (std::int64_t behind_ns = backoff.began_ns(); !query();) {
    const std::int64_t now = PollBackoff::now_ns();
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      throw Error(ErrorCode::kCancelled, "it was cancelled while it waited for the work of a GPU");
    }
    if (now >= deadline_ns) {
      throw Error(ErrorCode::kDeadline, "the deadline came before the end of the GPU's work that this was to follow");
    }
    if (!gives_way || !words_unset(*context_)) {
      behind_ns = now;
    } else if (now - behind_ns >= kWordPatienceNs) {
      throw_behind_words();
    }
    backoff.pause(now);
  }
}

}  // namespace kvpool
