#include "kvpool/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

#include "kvpool/base/error.h"
#include "kvpool/cuda/lasting.h"

namespace kvpool {

CudaFault fault_of(CuResult result) noexcept {
  switch (result) {
    case kCudaSuccess:
      return CudaFault::kNone;
    case kCudaOutOfMemory:
      return CudaFault::kMemory;
    case 1:    // INVALID_VALUE
    case 400:  // INVALID_HANDLE
      return CudaFault::kArgument;
    case kCudaDeviceUnavailable:
    case 216:  // CONTEXT_ALREADY_IN_USE
      return CudaFault::kInUse;
    case kCudaCaptureUnsupported:
    case 901:  // STREAM_CAPTURE_INVALIDATED
    case 902:  // STREAM_CAPTURE_MERGE
    case 903:  // STREAM_CAPTURE_UNMATCHED
    case 904:  // STREAM_CAPTURE_UNJOINED
    case 905:  // STREAM_CAPTURE_ISOLATION
    case 906:  // STREAM_CAPTURE_IMPLICIT
    case 907:  // CAPTURED_EVENT
    case 908:  // STREAM_CAPTURE_WRONG_THREAD
      return CudaFault::kCapturing;
    case 4:    // DEINITIALIZED
    case 201:  // INVALID_CONTEXT
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS: this one and those below end the context
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 807:  // MPS_SERVER_NOT_READY
    case 810:  // MPS_CLIENT_TERMINATED
      return CudaFault::kLost;
    default:
      return CudaFault::kUnsupported;
  }
}

CudaDriver::CudaDriver(const std::string& name) : library(name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Error(ErrorCode::kUnsupported,
                "there is no CUDA driver: " + (reason != nullptr ? std::string(reason) : "cannot open " + name));
  }
  const auto load = [&](auto& function, const char* symbol) {
    void* address = dlsym(handle, symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    return address != nullptr;
  };
  const auto find = [&](auto& function, const char* symbol) {
    if (load(function, symbol)) return;
    dlclose(handle);
    throw Error(ErrorCode::kUnsupported, "there is no CUDA driver that is new enough: " + name + " has no " + symbol);
  };
  // By their exported names: what cuda.h calls cuMemAlloc is cuMemAlloc_v2, and so on.
  find(init, "cuInit");
  find(driver_get_version, "cuDriverGetVersion");
  find(get_error_name, "cuGetErrorName");
  find(device_get, "cuDeviceGet");
  find(device_get_count, "cuDeviceGetCount");
  find(device_get_attribute, "cuDeviceGetAttribute");
  find(device_can_access_peer, "cuDeviceCanAccessPeer");
  find(primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  find(ctx_get_device, "cuCtxGetDevice");
  find(ctx_push, "cuCtxPushCurrent_v2");
  find(ctx_pop, "cuCtxPopCurrent_v2");
  find(ctx_synchronize, "cuCtxSynchronize");
  find(mem_get_info, "cuMemGetInfo_v2");
  find(mem_alloc, "cuMemAlloc_v2");
  find(mem_free, "cuMemFree_v2");
  find(mem_get_address_range, "cuMemGetAddressRange_v2");
  find(ipc_get_mem_handle, "cuIpcGetMemHandle");
  find(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2");
  find(ipc_close_mem_handle, "cuIpcCloseMemHandle");
  find(mem_host_register, "cuMemHostRegister_v2");
  find(mem_host_unregister, "cuMemHostUnregister");
  find(pointer_get_attribute, "cuPointerGetAttribute");
  find(mem_granularity, "cuMemGetAllocationGranularity");
  find(mem_create, "cuMemCreate");
  find(mem_release, "cuMemRelease");
  find(mem_address_reserve, "cuMemAddressReserve");
  find(mem_address_free, "cuMemAddressFree");
  find(mem_map, "cuMemMap");
  find(mem_unmap, "cuMemUnmap");
  find(mem_set_access, "cuMemSetAccess");
  find(mem_export, "cuMemExportToShareableHandle");
  find(mem_import, "cuMemImportFromShareableHandle");
  find(stream_create, "cuStreamCreate");
  find(stream_destroy, "cuStreamDestroy_v2");
  find(stream_synchronize, "cuStreamSynchronize");
  find(stream_wait_event, "cuStreamWaitEvent");
  find(stream_get_ctx, "cuStreamGetCtx");
  find(event_create, "cuEventCreate");
  find(event_destroy, "cuEventDestroy_v2");
  find(event_record, "cuEventRecord");
  find(event_query, "cuEventQuery");
  find(memcpy_async, "cuMemcpyAsync");
  find(memset_async, "cuMemsetD8Async");
  load(ctx_record_event, "cuCtxRecordEvent");
  load(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  load(stream_get_ctx_v2, "cuStreamGetCtx_v2");
  load(stream_is_capturing, "cuStreamIsCapturing");
  load(stream_wait_value, "cuStreamWaitValue32_v2");
  load(memcpy_batch_v1, "cuMemcpyBatchAsync");
  load(memcpy_batch_v2, "cuMemcpyBatchAsync_v2");
  load(kernel_launcher, "kvpool_kernel_launcher");
}

const CudaDriver& CudaDriver::get() {
  // Never destroyed: threads may outlive static objects. By name, for the variable may change, as it does in tests.
  static auto* const mutex = new std::mutex;
  static auto* const tables = new std::map<std::string, std::unique_ptr<const CudaDriver>>;
  const char* chosen = std::getenv("KVPOOL_CUDA_LIBRARY");
  const std::string name = chosen != nullptr && *chosen != '\0' ? chosen : "libcuda.so.1";
  const std::lock_guard lock(*mutex);
  const auto found = tables->find(name);
  if (found != tables->end()) return *found->second;
  std::unique_ptr<const CudaDriver> table(new CudaDriver(name));
  return *tables->emplace(name, std::move(table)).first->second;
}

std::string CudaDriver::name_of(CuResult result) const {
  const char* name = nullptr;
  if (get_error_name(result, &name) != kCudaSuccess || name == nullptr) name = "unknown error";
  return std::string(name) + " (" + std::to_string(result) + ")";
}

void CudaDriver::require(CuResult result, const char* call, const char* what) const {
  ErrorCode code{};
  switch (fault_of(result)) {
    case CudaFault::kNone:
      return;
    case CudaFault::kMemory:
      code = ErrorCode::kOutOfMemory;
      break;
    case CudaFault::kLost:
      code = ErrorCode::kDeviceLost;
      break;
    case CudaFault::kCapturing:
      throw Error(
          ErrorCode::kState,
          std::string(what) + ": " + call + " failed with " + name_of(result) +
              ", a CUDA graph is being captured: name the stream whose work comes first, one that is not captured",
          {{"driver_code", result}});
    case CudaFault::kInUse:
      throw Error(
          ErrorCode::kUnsupported,
          std::string(what) + ": " + call + " failed with " + name_of(result) +
              ", this GPU takes no more processes: another one has it to itself, or none may use it (compute mode "
              "EXCLUSIVE_PROCESS or PROHIBITED; nvidia-smi -q -d COMPUTE says which). Nothing is lost: end the "
              "other process, or set the mode to DEFAULT",
          {{"driver_code", result}})
          .because(ErrorCause::kMayPass);
    case CudaFault::kArgument:  // kvpool made the call, so kvpool's caller cannot correct the argument
    case CudaFault::kUnsupported:
      code = ErrorCode::kUnsupported;
      break;
  }
  const Error error(code, std::string(what) + ": " + call + " failed with " + name_of(result),
                    {{"driver_code", result}});
  const bool may_pass = code == ErrorCode::kUnsupported && !is_lasting(result);
  throw may_pass ? error.because(ErrorCause::kMayPass) : error;
}

}  // namespace kvpool
