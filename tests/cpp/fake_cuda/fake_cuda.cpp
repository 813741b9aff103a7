// A shared library that stands in for the CUDA driver: it records the calls and fails on request. Here are devices and
// contexts, and the state with which all calls begin.
#include "fake_cuda.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "state.h"

namespace kvpool::fake_cuda {
namespace {

constexpr std::size_t kWindowBytes = std::size_t{64} << 30;
constexpr std::size_t kCallsTextMax = std::size_t{1} << 16;

constexpr int kModeGlobal = 0;
constexpr int kModeRelaxed = 2;

thread_local int capture_mode = kModeGlobal;

// Whether the call breaks a capture that is under way. Calls on a whole context always do; calls that may wait for
// work, or allocate or free memory, do unless the thread's capture mode is relaxed.
bool breaks_capture(const std::string& call) {
  static const std::set<std::string> kOfContext{"cuCtxSynchronize", "cuCtxRecordEvent"};
  static const std::set<std::string> kUnsafe{
      "cuEventQuery",   "cuStreamSynchronize", "cuMemAlloc",        "cuMemFree",           "cuMemCreate",
      "cuMemMap",       "cuMemUnmap",          "cuMemHostRegister", "cuMemHostUnregister", "cuStreamDestroy",
      "cuStreamCreate", "cuEventCreate",       "cuModuleLoadData",  "cuModuleUnload",      "cuFuncLoad"};
  if (state().settings.at("capturing") == 0) return false;
  return kOfContext.contains(call) || (capture_mode != kModeRelaxed && kUnsafe.contains(call));
}

// Those of cuda.h of CUDA 13.0.
bool is_known_attribute(int attribute) { return attribute >= 1 && attribute <= 147; }

// What a GPU of the fake has. An attribute that was never asked for has no value here, for a wrong one would teach
// kvpool something that no GPU says.
int value_of_attribute(int attribute) {
  const auto& settings = state().settings;
  switch (attribute) {
    case 20:  // COMPUTE_MODE
      return settings.at("compute_mode");
    case 38:  // L2_CACHE_SIZE
      return settings.at("l2_kib") * 1024;
    case 75:  // COMPUTE_CAPABILITY_MAJOR
      return settings.at("compute_capability") / 10;
    case 76:  // COMPUTE_CAPABILITY_MINOR
      return settings.at("compute_capability") % 10;
    case 97:  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
      return settings.at("shared_optin");
    case 91:  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    case 98:  // CAN_FLUSH_REMOTE_WRITES
      return 1;
    case 102:  // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    case 103:  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    case 110:  // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
      return settings.at("virtual_memory");
    default:
      std::fprintf(stderr, "fake CUDA driver: what is attribute %d of a GPU? Say so in value_of_attribute\n",
                   attribute);
      std::abort();
  }
}

bool is_device(int device) { return device >= 0 && device < state().settings.at("devices"); }

Context* context_from(void* handle) {
  for (Context& context : state().contexts) {
    if (&context == handle) return &context;
  }
  return nullptr;
}

}  // namespace

thread_local bool in_host_function = false;
thread_local std::vector<Context*> current_stack;

std::map<std::string, int> default_settings() {
  return {{"devices", 4},    {"memory_mib", 256}, {"version", 13000},         {"virtual_memory", 1},
          {"delay_us", 200}, {"ipc", 1},          {"hold_register", 0},       {"capturing", 0},
          {"wait_value", 1}, {"wait_s", 30},      {"one_queue", 0},           {"unmap_waits", 1},
          {"l2_kib", 4096},  {"compute_mode", 0}, {"compute_capability", 90}, {"shared_optin", 232448}};
}

State::State() : settings(default_settings()) {
  for (int i = 0; i < kDevicesMax; ++i) contexts[i].device = i;
  // Addresses that cannot be accessed. None is ever given twice: what is freed stays without memory.
  void* space = mmap(nullptr, kWindowBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) std::abort();
  window = static_cast<std::byte*>(space);
}

// Never destroyed: pinned memory may be released at the very end of a process.
State& state() {
  static State* the_state = [] {
    // The lock is held while the process is copied: otherwise a stream's thread may hold it, and the child has no such
    // thread. Nor has it one for any stream: default streams are made anew by a child that may use the driver.
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                   [] {
                     State& s = state();
                     for (Context& context : s.contexts) context.defaults.clear();
                     s.working.clear();
                     s.forked = s.forked || s.initialized;
                     s.mutex.unlock();
                   });
    return new State;
  }();
  return *the_state;
}

int enter(const std::string& call, const std::string& argument) {
  State& s = state();
  if (s.calls.size() < kCallsTextMax) s.calls += (s.calls.empty() ? "" : " ") + call + "(" + argument + ")";
  ++s.counts[call];
  if (!s.initialized || s.forked) return kNotInitialized;
  if (in_host_function) return kNotPermitted;
  if (s.fail_in > 0 && --s.fail_in == 0) {
    s.failed = true;
    return s.fail_code;
  }
  if (breaks_capture(call)) {
    ++s.counts["captures broken"];
    return kCaptureUnsupported;
  }
  const auto failure = s.failures.find(call);
  return failure == s.failures.end() ? kSuccess : failure->second;
}

Context* current_context() {
  State& s = state();
  if (!current_stack.empty()) return current_stack.back();
  return s.current_device >= 0 ? &s.contexts[s.current_device] : nullptr;
}

Context* enter_context(const std::string& call, const std::string& argument, int& code) {
  code = enter(call, argument);
  if (code != kSuccess) return nullptr;
  Context* context = current_context();
  if (context == nullptr) {
    code = kInvalidContext;
  } else if (context->lost != 0) {
    code = context->lost;
  } else if (context->retained == 0 && !current_stack.empty()) {
    code = kContextDestroyed;
  }
  return code == kSuccess ? context : nullptr;
}

}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuInit(unsigned flags) {
  const std::lock_guard lock(state().mutex);
  state().initialized = true;  // so a child that is forked may no longer
  return enter("cuInit", std::to_string(flags));
}

int cuDriverGetVersion(int* version) {
  const std::lock_guard lock(state().mutex);
  *version = state().settings.at("version");
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  const std::lock_guard lock(state().mutex);
  *count = state().settings.at("devices");
  return enter("cuDeviceGetCount", "");
}

int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(state().mutex);
  *device = ordinal;
  const int code = enter("cuDeviceGet", std::to_string(ordinal));
  if (code != kSuccess) return code;
  return is_device(ordinal) ? kSuccess : kInvalidDevice;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuDeviceGetAttribute", std::to_string(attribute));
  if (code != kSuccess) return code;
  if (!is_known_attribute(attribute)) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  *value = value_of_attribute(attribute);
  return kSuccess;
}

// Devices 0 and 1 reach each other, and so do 2 and 3.
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuDeviceCanAccessPeer", std::to_string(device) + "," + std::to_string(peer));
  if (code != kSuccess) return code;
  if (!is_device(device) || !is_device(peer)) return kInvalidDevice;
  *can = device / 2 == peer / 2 && device != peer ? 1 : 0;
  return kSuccess;
}

// Lets the current context reach the plain memory of that one.
int cuCtxEnablePeerAccess(void* handle, unsigned flags) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Context* context = enter_context("cuCtxEnablePeerAccess", "", code);
  if (context == nullptr) return code;
  const Context* peer = context_from(handle);
  if (peer == nullptr || peer == context) return kInvalidContext;
  if (flags != 0) return kInvalidValue;
  if (peer->device / 2 != context->device / 2) return kPeerAccessUnsupported;
  return context->peers.insert(peer->device).second ? kSuccess : kPeerAccessAlreadyEnabled;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuDevicePrimaryCtxRetain", std::to_string(device));
  if (code != kSuccess) return code;
  if (!is_device(device)) return kInvalidDevice;
  Context& retained = state().contexts[device];
  ++retained.retained;
  *context = &retained;
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuDevicePrimaryCtxRelease", std::to_string(device));
  if (code != kSuccess) return code;
  if (!is_device(device)) return kInvalidDevice;
  Context& released = state().contexts[device];
  if (released.retained == 0) return kInvalidContext;
  if (--released.retained == 0) released.peers.clear();
  return kSuccess;
}

int cuCtxGetDevice(int* device) {
  const std::lock_guard lock(state().mutex);
  if (!state().initialized || state().forked) return kNotInitialized;
  const Context* context = current_context();
  if (context == nullptr) return kInvalidContext;
  *device = context->device;
  return kSuccess;
}

int cuCtxPushCurrent_v2(void* handle) {
  const std::lock_guard lock(state().mutex);
  Context* context = context_from(handle);
  const int code = enter("cuCtxPushCurrent", context == nullptr ? "?" : std::to_string(context->device));
  if (code != kSuccess) return code;
  if (context == nullptr) return kInvalidContext;
  if (context->retained == 0) return kContextDestroyed;
  current_stack.push_back(context);
  return kSuccess;
}

// Pops also when it returns an error, which may come from earlier work.
int cuCtxPopCurrent_v2(void** handle) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuCtxPopCurrent", "");
  if (current_stack.empty()) return kInvalidContext;
  *handle = current_stack.back();
  current_stack.pop_back();
  return code;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  const std::lock_guard lock(state().mutex);
  if (*mode < kModeGlobal || *mode > kModeRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int cuGetErrorName(int result, const char** name) {
  switch (result) {
    case kNotInitialized:
      *name = "CUDA_ERROR_NOT_INITIALIZED";
      return kSuccess;
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      return kSuccess;
    case 304:
      *name = "CUDA_ERROR_OPERATING_SYSTEM";
      return kSuccess;
    case kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kSuccess;
    case kInvalidDevice:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      return kSuccess;
    case 46:
      *name = "CUDA_ERROR_DEVICE_UNAVAILABLE";
      return kSuccess;
    case kNotPermitted:
      *name = "CUDA_ERROR_NOT_PERMITTED";
      return kSuccess;
    case kNotSupported:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      return kSuccess;
    case kCaptureUnsupported:
      *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
      return kSuccess;
    case kContextDestroyed:
      *name = "CUDA_ERROR_CONTEXT_IS_DESTROYED";
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

}  // extern "C"
