// A shared library that answers for the CUDA driver: it records the calls and fails on request.
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace {

struct State {
  std::mutex mutex;
  std::string calls;
  std::map<std::string, int> failures;
  int current_device = -1;
};

// Never destroyed: pinned memory may be released at the very end of a process.
State& state() {
  static State* the_state = new State;
  return *the_state;
}

int record(const std::string& call, const std::string& argument) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.calls += (s.calls.empty() ? "" : " ") + call + "(" + argument + ")";
  const auto failure = s.failures.find(call);
  return failure == s.failures.end() ? 0 : failure->second;
}

int context_of_device[8];  // only their addresses matter

}  // namespace

extern "C" {

void fake_cuda_reset() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.calls.clear();
  s.failures.clear();
  s.current_device = -1;
}

void fake_cuda_fail(const char* call, int code) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.failures[call] = code;
}

void fake_cuda_set_current(int device) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.current_device = device;
}

const char* fake_cuda_calls() { return state().calls.c_str(); }

int cuInit(unsigned flags) { return record("cuInit", std::to_string(flags)); }

int cuCtxGetDevice(int* device) {
  *device = state().current_device;
  return *device >= 0 ? 0 : 201;  // CUDA_ERROR_INVALID_CONTEXT
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return record("cuDeviceGet", std::to_string(ordinal));
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &context_of_device[device];
  return record("cuDevicePrimaryCtxRetain", std::to_string(device));
}

int cuDevicePrimaryCtxRelease_v2(int device) { return record("cuDevicePrimaryCtxRelease", std::to_string(device)); }

int cuCtxPushCurrent_v2(void* context) {
  return record("cuCtxPushCurrent", std::to_string(static_cast<int*>(context) - context_of_device));
}

int cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  return record("cuCtxPopCurrent", "");
}

int cuMemHostRegister_v2(void*, std::size_t bytes, unsigned flags) {
  return record("cuMemHostRegister", std::to_string(bytes) + "," + std::to_string(flags));
}

int cuMemHostUnregister(void*) { return record("cuMemHostUnregister", ""); }

int cuGetErrorName(int result, const char** name) {
  if (result != 304) {
    return 1;  // CUDA_ERROR_INVALID_VALUE
  }
  *name = "CUDA_ERROR_OPERATING_SYSTEM";
  return 0;
}

}  // extern "C"
