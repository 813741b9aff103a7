#include "kvpool/arena/pin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// From cuda.h, which is not needed to build.
using CuResult = int;
using CuDevice = int;
using CuContext = void*;
constexpr CuResult kCudaSuccess = 0;
constexpr unsigned kMemHostRegisterPortable = 1;

}  // namespace

// The entry points that pinning needs, under their exported names. The handle is never closed: the driver has threads
// of its own and does not survive being unloaded.
struct PinnedRange::Driver {
  Driver();

  // Throws Error kUnsupported when `result` is not success.
  void require(CuResult result, const char* call) const;

  CuResult (*init)(unsigned flags);
  CuResult (*ctx_get_device)(CuDevice* device);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*primary_ctx_retain)(CuContext* context, CuDevice device);
  CuResult (*primary_ctx_release)(CuDevice device);
  CuResult (*ctx_push)(CuContext context);
  CuResult (*ctx_pop)(CuContext* context);
  CuResult (*mem_host_register)(void* base, std::size_t bytes, unsigned flags);
  CuResult (*mem_host_unregister)(void* base);
  CuResult (*get_error_name)(CuResult result, const char** name);
};

PinnedRange::Driver::Driver() {
  const char* chosen = std::getenv("KVPOOL_CUDA_LIBRARY");
  const std::string name = chosen != nullptr && *chosen != '\0' ? chosen : "libcuda.so.1";
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Error(ErrorCode::kUnsupported, "memory cannot be pinned: no CUDA driver (" +
                                             (reason != nullptr ? std::string(reason) : "cannot open " + name) + ")");
  }
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(handle, symbol);
    if (address == nullptr) {
      dlclose(handle);
      throw Error(ErrorCode::kUnsupported, "memory cannot be pinned: " + name + " has no " + symbol);
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(init, "cuInit");
  find(ctx_get_device, "cuCtxGetDevice");
  find(device_get, "cuDeviceGet");
  find(primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  find(ctx_push, "cuCtxPushCurrent_v2");
  find(ctx_pop, "cuCtxPopCurrent_v2");
  find(mem_host_register, "cuMemHostRegister_v2");
  find(mem_host_unregister, "cuMemHostUnregister");
  find(get_error_name, "cuGetErrorName");
}

void PinnedRange::Driver::require(CuResult result, const char* call) const {
  if (result == kCudaSuccess) {
    return;
  }
  const char* name = nullptr;
  if (get_error_name(result, &name) != kCudaSuccess || name == nullptr) {
    name = "unknown error";
  }
  throw Error(
      ErrorCode::kUnsupported,
      std::string("memory cannot be pinned: ") + call + " failed with " + name + " (" + std::to_string(result) + ")",
      {{"driver_code", result}});
}

PinnedRange::PinnedRange(void* base, std::size_t bytes) : driver_(std::make_unique<Driver>()), base_(base) {
  driver_->require(driver_->init(0), "cuInit");
  // A process that works on device 3 has a context there; one on device 0 would only cost memory.
  if (driver_->ctx_get_device(&device_) != kCudaSuccess) {
    driver_->require(driver_->device_get(&device_, 0), "cuDeviceGet");
  }
  driver_->require(driver_->primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  CuResult result = driver_->ctx_push(context_);
  const char* call = "cuCtxPushCurrent";
  if (result == kCudaSuccess) {
    result = driver_->mem_host_register(base, bytes, kMemHostRegisterPortable);
    call = "cuMemHostRegister";
    CuContext popped = nullptr;
    driver_->ctx_pop(&popped);
  }
  if (result != kCudaSuccess) {
    driver_->primary_ctx_release(device_);
    driver_->require(result, call);
  }
}

// At the end of the process the driver may have shut down already; nothing is lost when these calls fail then.
PinnedRange::~PinnedRange() {
  if (driver_->ctx_push(context_) == kCudaSuccess) {
    driver_->mem_host_unregister(base_);
    CuContext popped = nullptr;
    driver_->ctx_pop(&popped);
  }
  driver_->primary_ctx_release(device_);
}

}  // namespace kvpool
