// What tests set in the fake driver, and ask of it: the functions of fake_cuda.h.
#include <chrono>
#include <string>

#include "fake_cuda.h"
#include "state.h"

namespace kvpool::fake_cuda {
namespace {

// Streams that were destroyed may have work left, which must not end in another test's world.
void wait_for_destroyed(std::unique_lock<std::mutex>& lock) {
  State& s = state();
  s.stopped.wait_for(lock, std::chrono::seconds(40), [&] {
    std::size_t known = s.streams.size();
    for (const Context& context : s.contexts) known += context.defaults.size();
    return s.working.size() == known;
  });
}

}  // namespace
}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

void fake_cuda_reset() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (s.forked) {
    s.forked = false;
    s.initialized = false;
    s.streams.clear();
    current_stack.clear();
  }
  wait_for_destroyed(lock);
  s.calls.clear();
  s.counts.clear();
  s.failures.clear();
  s.settings = default_settings();
  s.fail_in = 0;
  s.failed = false;
  s.current_device = -1;
  // Objects that a test left behind because it made the driver refuse to take them back.
  s.registered.clear();
  s.ranges.clear();
  s.handles.clear();
  forget_modules();
  for (const auto& [handle, event] : s.events) delete event;
  s.events.clear();
  for (Context& context : s.contexts) {
    context.lost = 0;
    context.retained = 0;
    context.peers.clear();
  }
}

void fake_cuda_go_on_after_fork() {
  const std::lock_guard lock(state().mutex);
  state().forked = false;
}

void fake_cuda_fail(const char* call, int code) {
  const std::lock_guard lock(state().mutex);
  state().failures[call] = code;
}

void fake_cuda_fail_nth(int n, int code) {
  const std::lock_guard lock(state().mutex);
  state().fail_in = n;
  state().fail_code = code;
  if (n > 0) state().failed = false;
}

bool fake_cuda_failed() {
  const std::lock_guard lock(state().mutex);
  return state().failed;
}

void fake_cuda_set_current(int device) {
  const std::lock_guard lock(state().mutex);
  state().current_device = device;
}

void fake_cuda_set(const char* name, int value) {
  const std::lock_guard lock(state().mutex);
  state().settings.at(name) = value;
}

void fake_cuda_lose(int device, int code) {
  const std::lock_guard lock(state().mutex);
  state().contexts[device].lost = code;
}

const char* fake_cuda_calls() { return state().calls.c_str(); }

const char* fake_cuda_left() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::size_t bytes = 0;
  std::size_t contexts = 0;
  for (int i = 0; i < kDevicesMax; ++i) {
    bytes += s.used[i];
    contexts += static_cast<std::size_t>(s.contexts[i].retained);
  }
  s.text.clear();
  const auto add = [&](const char* name, std::size_t count) {
    if (count > 0) s.text += (s.text.empty() ? "" : " ") + std::string(name) + "=" + std::to_string(count);
  };
  add("bytes", bytes);
  add("handles", s.handles.size());
  add("ranges", s.ranges.size());
  add("contexts", contexts);
  add("registered", s.registered.size());
  add("streams", s.streams.size());
  add("events", s.events.size());
  add("modules", modules_left());
  return s.text.c_str();
}

std::size_t fake_cuda_count(const char* name) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (std::string(name) == "bytes") {
    std::size_t bytes = 0;
    for (const std::size_t used : s.used) bytes += used;
    return bytes;
  }
  const auto found = s.counts.find(name);
  return found == s.counts.end() ? 0 : found->second;
}

void* fake_cuda_host_of(int device, unsigned long long address, std::size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto physical = physical_at(address);
  return physical == nullptr || physical->device != device ? nullptr : host_address(address, bytes, device);
}

void* fake_cuda_host(unsigned long long address, std::size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return host_address(address, bytes, -1);
}

}  // extern "C"
