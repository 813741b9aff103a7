// The declarations of cuda/driver.h against the toolkit's own header, if there is one to build with.
// The driver is called through these declarations, and nothing else notices when one of them is wrong.
#if __has_include(<cuda.h>)
#include <cuda.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <type_traits>

#include "kvpool/base/error.h"
#include "kvpool/cuda/driver.h"
#include "kvpool/cuda/lasting.h"
#include "kvpool/cuda/module_driver.h"

namespace kvpool {
namespace {

// Whether a caller passes the same bits: integers and enumerations of one size, pointers to things of one size.
template <class Ours, class Theirs>
constexpr bool same_bits() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OurThing = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using TheirThing = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_void_v<OurThing> || std::is_void_v<TheirThing>) {
      return true;  // a handle
    } else {
      return sizeof(OurThing) == sizeof(TheirThing);
    }
  } else if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return false;
  } else {
    return sizeof(Ours) == sizeof(Theirs) && std::is_class_v<Ours> == std::is_class_v<Theirs>;
  }
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class Result, class... Ours, class TheirResult, class... Theirs>
struct SameCall<Result (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return same_bits<Result, TheirResult>() && (same_bits<Ours, Theirs>() && ...);
    } else {
      return false;
    }
  }();
};

// The names on the right are macros, and so the versions that this header means.
#define KVPOOL_SAME_CALL(ours, theirs) \
  static_assert(SameCall<decltype(CudaDriver::ours), decltype(&(theirs))>::value, #theirs)
KVPOOL_SAME_CALL(init, cuInit);
KVPOOL_SAME_CALL(driver_get_version, cuDriverGetVersion);
KVPOOL_SAME_CALL(get_error_name, cuGetErrorName);
KVPOOL_SAME_CALL(device_get, cuDeviceGet);
KVPOOL_SAME_CALL(device_get_count, cuDeviceGetCount);
KVPOOL_SAME_CALL(device_get_attribute, cuDeviceGetAttribute);
KVPOOL_SAME_CALL(device_can_access_peer, cuDeviceCanAccessPeer);
KVPOOL_SAME_CALL(primary_ctx_retain, cuDevicePrimaryCtxRetain);
KVPOOL_SAME_CALL(primary_ctx_release, cuDevicePrimaryCtxRelease);
KVPOOL_SAME_CALL(ctx_get_device, cuCtxGetDevice);
KVPOOL_SAME_CALL(ctx_push, cuCtxPushCurrent);
KVPOOL_SAME_CALL(ctx_pop, cuCtxPopCurrent);
KVPOOL_SAME_CALL(ctx_synchronize, cuCtxSynchronize);
KVPOOL_SAME_CALL(mem_get_info, cuMemGetInfo);
KVPOOL_SAME_CALL(mem_alloc, cuMemAlloc);
KVPOOL_SAME_CALL(mem_free, cuMemFree);
KVPOOL_SAME_CALL(mem_get_address_range, cuMemGetAddressRange);
KVPOOL_SAME_CALL(ipc_get_mem_handle, cuIpcGetMemHandle);
KVPOOL_SAME_CALL(ipc_open_mem_handle, cuIpcOpenMemHandle);
KVPOOL_SAME_CALL(ipc_close_mem_handle, cuIpcCloseMemHandle);
KVPOOL_SAME_CALL(mem_host_register, cuMemHostRegister);
KVPOOL_SAME_CALL(mem_host_unregister, cuMemHostUnregister);
KVPOOL_SAME_CALL(pointer_get_attribute, cuPointerGetAttribute);
KVPOOL_SAME_CALL(mem_granularity, cuMemGetAllocationGranularity);
KVPOOL_SAME_CALL(mem_create, cuMemCreate);
KVPOOL_SAME_CALL(mem_release, cuMemRelease);
KVPOOL_SAME_CALL(mem_address_reserve, cuMemAddressReserve);
KVPOOL_SAME_CALL(mem_address_free, cuMemAddressFree);
KVPOOL_SAME_CALL(mem_map, cuMemMap);
KVPOOL_SAME_CALL(mem_unmap, cuMemUnmap);
KVPOOL_SAME_CALL(mem_set_access, cuMemSetAccess);
KVPOOL_SAME_CALL(mem_export, cuMemExportToShareableHandle);
KVPOOL_SAME_CALL(mem_import, cuMemImportFromShareableHandle);
KVPOOL_SAME_CALL(stream_create, cuStreamCreate);
KVPOOL_SAME_CALL(stream_destroy, cuStreamDestroy);
KVPOOL_SAME_CALL(stream_synchronize, cuStreamSynchronize);
KVPOOL_SAME_CALL(stream_wait_event, cuStreamWaitEvent);
KVPOOL_SAME_CALL(stream_get_ctx, cuStreamGetCtx);
KVPOOL_SAME_CALL(event_create, cuEventCreate);
KVPOOL_SAME_CALL(event_destroy, cuEventDestroy);
KVPOOL_SAME_CALL(event_record, cuEventRecord);
KVPOOL_SAME_CALL(event_query, cuEventQuery);
KVPOOL_SAME_CALL(memcpy_async, cuMemcpyAsync);
KVPOOL_SAME_CALL(memset_async, cuMemsetD8Async);
KVPOOL_SAME_CALL(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
KVPOOL_SAME_CALL(stream_is_capturing, cuStreamIsCapturing);
KVPOOL_SAME_CALL(stream_wait_value, cuStreamWaitValue32);
#if CUDA_VERSION >= 12050
KVPOOL_SAME_CALL(ctx_record_event, cuCtxRecordEvent);
#endif
#if CUDA_VERSION >= 13000
KVPOOL_SAME_CALL(memcpy_batch_v2, cuMemcpyBatchAsync);
#elif CUDA_VERSION >= 12080
KVPOOL_SAME_CALL(memcpy_batch_v1, cuMemcpyBatchAsync);
#endif
#undef KVPOOL_SAME_CALL

#define KVPOOL_SAME_CALL(ours, theirs) \
  static_assert(SameCall<decltype(ModuleDriver::ours), decltype(&(theirs))>::value, #theirs)
KVPOOL_SAME_CALL(module_load_data, cuModuleLoadData);
KVPOOL_SAME_CALL(module_unload, cuModuleUnload);
KVPOOL_SAME_CALL(module_get_function, cuModuleGetFunction);
KVPOOL_SAME_CALL(func_set_attribute, cuFuncSetAttribute);
KVPOOL_SAME_CALL(launch_kernel, cuLaunchKernel);
#if CUDA_VERSION >= 12040
KVPOOL_SAME_CALL(func_load, cuFuncLoad);
#endif
#undef KVPOOL_SAME_CALL

#define KVPOOL_SAME_FIELD(ours, field, theirs, their_field) \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field), #theirs "." #their_field)
static_assert(sizeof(CuMemLocation) == sizeof(CUmemLocation));
KVPOOL_SAME_FIELD(CuMemLocation, id, CUmemLocation, id);
static_assert(sizeof(CuMemProp) == sizeof(CUmemAllocationProp));
KVPOOL_SAME_FIELD(CuMemProp, type, CUmemAllocationProp, type);
KVPOOL_SAME_FIELD(CuMemProp, handle_types, CUmemAllocationProp, requestedHandleTypes);
KVPOOL_SAME_FIELD(CuMemProp, location, CUmemAllocationProp, location);
KVPOOL_SAME_FIELD(CuMemProp, compression, CUmemAllocationProp, allocFlags.compressionType);
KVPOOL_SAME_FIELD(CuMemProp, gpu_direct_rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
KVPOOL_SAME_FIELD(CuMemProp, usage, CUmemAllocationProp, allocFlags.usage);
static_assert(sizeof(CuMemAccess) == sizeof(CUmemAccessDesc));
KVPOOL_SAME_FIELD(CuMemAccess, flags, CUmemAccessDesc, flags);
static_assert(sizeof(CuIpcMemHandle) == sizeof(CUipcMemHandle));
#if CUDA_VERSION >= 12080
static_assert(sizeof(CuMemcpyAttributes) == sizeof(CUmemcpyAttributes));
KVPOOL_SAME_FIELD(CuMemcpyAttributes, source_order, CUmemcpyAttributes, srcAccessOrder);
KVPOOL_SAME_FIELD(CuMemcpyAttributes, source_hint, CUmemcpyAttributes, srcLocHint);
KVPOOL_SAME_FIELD(CuMemcpyAttributes, target_hint, CUmemcpyAttributes, dstLocHint);
KVPOOL_SAME_FIELD(CuMemcpyAttributes, flags, CUmemcpyAttributes, flags);
static_assert(int{kCuSourceOrderStream} == int{CU_MEMCPY_SRC_ACCESS_ORDER_STREAM});
#endif
#undef KVPOOL_SAME_FIELD

TEST_CASE("cuda abi: constants are those of cuda.h") {
  struct Pair {
    const char* name;
    long long ours;
    long long theirs;
  };
  const Pair pairs[] = {
      {"CUDA_SUCCESS", kCudaSuccess, CUDA_SUCCESS},
      {"CUDA_ERROR_OUT_OF_MEMORY", kCudaOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY},
      {"CUDA_ERROR_NO_DEVICE", kCudaNoDevice, CUDA_ERROR_NO_DEVICE},
      {"CUDA_ERROR_INVALID_DEVICE", kCudaInvalidDevice, CUDA_ERROR_INVALID_DEVICE},
      {"CUDA_ERROR_NOT_READY", kCudaNotReady, CUDA_ERROR_NOT_READY},
      {"CUDA_ERROR_NOT_SUPPORTED", kCudaNotSupported, CUDA_ERROR_NOT_SUPPORTED},
      {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", kCudaCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
      {"CU_STREAM_CAPTURE_MODE_RELAXED", kCuCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED},
      {"CU_MEM_LOCATION_TYPE_DEVICE", kCuLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE},
      {"CU_MEM_ALLOCATION_TYPE_PINNED", kCuAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED},
      {"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", kCuHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
      {"CU_MEM_ALLOC_GRANULARITY_RECOMMENDED", kCuGranularityRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED},
      {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE", kCuAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
      {"CU_MEMHOSTREGISTER_PORTABLE", kCuHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE},
      {"CU_STREAM_NON_BLOCKING", kCuStreamNonBlocking, CU_STREAM_NON_BLOCKING},
      {"CU_EVENT_DISABLE_TIMING", kCuEventDisableTiming, CU_EVENT_DISABLE_TIMING},
      {"CU_STREAM_WAIT_VALUE_GEQ", kCuStreamWaitGeq, CU_STREAM_WAIT_VALUE_GEQ},
      {"CU_STREAM_WAIT_VALUE_FLUSH", kCuStreamWaitFlush, CU_STREAM_WAIT_VALUE_FLUSH},
      {"CU_POINTER_ATTRIBUTE_MEMORY_TYPE", kCuPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE},
      {"CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", kCuPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL},
      {"CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", kCuPointerLegacyIpcCapable,
       CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE},
      {"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", kCuIpcLazyPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS},
      {"CU_MEMORYTYPE_DEVICE", kCuMemoryTypeDevice, CU_MEMORYTYPE_DEVICE},
      {"CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", kCuDeviceHostPointerOfRegistered,
       CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
      {"CAN_FLUSH_REMOTE_WRITES", kCuDeviceFlushRemoteWrites, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES},
      {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", kCuDeviceVirtualMemory,
       CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
      {"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", kCuDevicePosixFd,
       CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
      {"GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", kCuDeviceRdmaOfVirtualMemory,
       CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
      {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", kCuDeviceSharedOptinBytes,
       CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
      {"COMPUTE_CAPABILITY_MAJOR", kCuDeviceMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
      {"COMPUTE_CAPABILITY_MINOR", kCuDeviceMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
      {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", kCuFuncSharedBytesMax,
       CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES},
  };
  for (const Pair& pair : pairs) {
    CAPTURE(pair.name);
    CHECK(pair.ours == pair.theirs);
  }
}

static_assert(int{CU_STREAM_CAPTURE_STATUS_NONE} == 0);

TEST_CASE("cuda abi: errors that end a context mean that the device is lost, and others do not") {
  for (const CUresult result :
       {CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_ASSERT, CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_TENSOR_MEMORY_LEAK, CUDA_ERROR_MPS_SERVER_NOT_READY,
        CUDA_ERROR_MPS_CLIENT_TERMINATED}) {
    CAPTURE(result);
    CHECK(fault_of(result) == CudaFault::kLost);
  }
  CHECK(fault_of(CUDA_ERROR_DEVICE_UNAVAILABLE) == CudaFault::kInUse);  // of a GPU in an exclusive mode, say
  for (const CUresult result : {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_HANDLE}) {
    CHECK(fault_of(result) == CudaFault::kArgument);
  }
  for (const CUresult result :
       {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_MERGE,
        CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD}) {
    CHECK(fault_of(result) == CudaFault::kCapturing);
  }
  for (const CUresult result :
       {CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_NOT_PERMITTED}) {
    CHECK(fault_of(result) == CudaFault::kUnsupported);
    CHECK(is_lasting(static_cast<CuResult>(result)));
  }
  for (const CUresult result : {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_UNKNOWN}) {
    CHECK_FALSE(is_lasting(static_cast<CuResult>(result)));
  }
}

}  // namespace
}  // namespace kvpool
#endif
