// The fake driver's streams that wait for a word of host memory.
#include <chrono>
#include <thread>

#include "state.h"

namespace kvpool::fake_cuda {
namespace {

constexpr unsigned kFlush = 1U << 30;

// Whether the wait is over: the word has reached the value, the memory is not there any more, or it was too long.
bool is_over(Address address, std::uint32_t value, Context* context, std::chrono::steady_clock::time_point until) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (context->lost != 0) return true;
  if (!is_registered(address, sizeof value)) {
    context->lost = kIllegalAddress;
    return true;
  }
  const auto* word = reinterpret_cast<const std::uint32_t*>(address);  // NOLINT(performance-no-int-to-ptr)
  const std::uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  if (static_cast<std::int32_t>(now - value) >= 0) {
    ++s.counts["waits passed"];
    return true;
  }
  if (std::chrono::steady_clock::now() < until) return false;
  context->lost = kLaunchTimeout;
  return true;
}

}  // namespace
}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuStreamWaitValue32_v2(void* handle, Address address, std::uint32_t value, unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  Stream* stream = enter_stream("cuStreamWaitValue32", "", handle, code);
  if (stream == nullptr) return code;
  if (s.settings.at("wait_value") == 0) return kNotSupported;
  if (stream->captured) return kCaptureUnsupported;
  if ((flags & ~kFlush) != 0 || address % sizeof value != 0 || !is_registered(address, sizeof value)) {
    return kInvalidValue;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(s.settings.at("wait_s"));
  s.held.insert(stream->context->device);
  stream->add([address, value, context = stream->context, until] {
    while (!is_over(address, value, context, until)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const std::lock_guard inner(state().mutex);
    state().held.erase(state().held.find(context->device));
  });
  return kSuccess;
}

}  // extern "C"
