// The CUDA driver, opened at run time: a table of the entry points that kvpool calls.
//
// The library is libcuda.so.1, or what the environment variable KVPOOL_CUDA_LIBRARY names. kvpool opens it when
// something first needs a GPU, not when kvpool is loaded, so everything else runs on a machine without it. kvpool never
// closes it, because the driver has threads, and unloading it would crash them.
//
// Thread-safety: all of it. The driver does not work in a forked child, so do not call anything here there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvpool {

// From cuda.h, which is not needed to build.
using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;
using CuPointer = std::uint64_t;  // CUdeviceptr: an address of the unified address space
using CuHandle = std::uint64_t;   // CUmemGenericAllocationHandle

inline constexpr CuResult kCudaSuccess = 0;
inline constexpr CuResult kCudaOutOfMemory = 2;
inline constexpr CuResult kCudaNoDevice = 100;
inline constexpr CuResult kCudaInvalidDevice = 101;
inline constexpr CuResult kCudaDeviceUnavailable = 46;  // another process has exclusive use of the GPU
inline constexpr CuResult kCudaNotReady = 600;          // result of a query: not yet
inline constexpr CuResult kCudaNotPermitted = 800;
inline constexpr CuResult kCudaNotSupported = 801;
inline constexpr CuResult kCudaCaptureUnsupported = 900;  // not while a CUDA graph is captured

struct CuMemLocation {
  int type;  // kCuLocationDevice
  int id;
};
struct CuMemProp {  // CUmemAllocationProp
  int type;         // kCuAllocationPinned
  int handle_types;
  CuMemLocation location;
  void* win32;
  unsigned char compression;
  unsigned char gpu_direct_rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct CuMemAccess {  // CUmemAccessDesc
  CuMemLocation location;
  int flags;
};
struct CuMemcpyAttributes {
  int source_order;
  CuMemLocation source_hint;
  CuMemLocation target_hint;
  unsigned flags;
};
struct CuIpcMemHandle {
  char reserved[64];
};
static_assert(sizeof(CuMemProp) == 32 && sizeof(CuMemAccess) == 12 && sizeof(CuMemcpyAttributes) == 24);

inline constexpr int kCuLocationDevice = 1;
inline constexpr int kCuAllocationPinned = 1;
inline constexpr int kCuHandlePosixFd = 1;
inline constexpr int kCuGranularityRecommended = 1;
inline constexpr int kCuAccessReadWrite = 3;
inline constexpr int kCuSourceOrderStream = 1;
inline constexpr unsigned kCuHostRegisterPortable = 1;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuStreamWaitGeq = 0;  // until std::int32_t(word - value) >= 0
inline constexpr unsigned kCuStreamWaitFlush = 1U << 30;
inline constexpr int kCuCaptureModeRelaxed = 2;
inline constexpr int kCuPointerMemoryType = 2;
inline constexpr int kCuPointerDeviceOrdinal = 9;
inline constexpr int kCuPointerLegacyIpcCapable = 10;  // no, for virtual memory or a range of several allocations
inline constexpr unsigned kCuIpcLazyPeerAccess = 1;
inline constexpr int kCuMemoryTypeDevice = 2;
inline constexpr int kCuDeviceL2Bytes = 38;
inline constexpr int kCuDeviceHostPointerOfRegistered = 91;
inline constexpr int kCuDeviceVirtualMemory = 102;
inline constexpr int kCuDevicePosixFd = 103;
inline constexpr int kCuDeviceFlushRemoteWrites = 98;
inline constexpr int kCuDeviceRdmaOfVirtualMemory = 110;

// What a result means for the caller. The text of every error has the driver's name and number of the result.
enum class CudaFault : std::uint8_t {
  kNone,
  kMemory,       // the device has too little memory
  kUnsupported,  // this machine or this driver cannot do it
  kArgument,     // an argument that the driver refuses
  kCapturing,    // not while a CUDA graph is captured
  kInUse,        // another process has the GPU in exclusive mode; nothing is lost
  kLost,         // the device, or the context with everything in it, is lost and unusable
};
CudaFault fault_of(CuResult result) noexcept;

namespace cuda {
struct Launcher;
}

struct CudaDriver {
  // The driver of this process. The first call that succeeds opens it for good; after a failure, the next call retries.
  // Throws Error kUnsupported: no such library, or one that lacks an entry point (named).
  static const CudaDriver& get();

  // "CUDA_ERROR_OUT_OF_MEMORY (2)", or "unknown error (9876)".
  std::string name_of(CuResult result) const;
  // Throws unless the result is success: kOutOfMemory, kDeviceLost, kState (a CUDA graph is being captured), and
  // kUnsupported for all other results (among them kInUse), with cause kMayPass unless is_lasting(result). The field
  // `driver_code` is the driver's number. `what` says what kvpool could not do.
  void require(CuResult result, const char* call, const char* what) const;

  std::string library;  // as it was opened

  CuResult (*init)(unsigned flags);
  CuResult (*driver_get_version)(int* version);
  CuResult (*get_error_name)(CuResult result, const char** name);

  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_get_count)(int* count);
  CuResult (*device_get_attribute)(int* value, int attribute, CuDevice device);
  CuResult (*device_can_access_peer)(int* can, CuDevice device, CuDevice peer);

  CuResult (*primary_ctx_retain)(CuContext* context, CuDevice device);
  CuResult (*primary_ctx_release)(CuDevice device);
  CuResult (*ctx_get_device)(CuDevice* device);
  CuResult (*ctx_push)(CuContext context);
  CuResult (*ctx_pop)(CuContext* context);
  CuResult (*ctx_synchronize)();

  CuResult (*mem_get_info)(std::size_t* free, std::size_t* total);
  CuResult (*mem_alloc)(CuPointer* pointer, std::size_t bytes);
  CuResult (*mem_free)(CuPointer pointer);
  CuResult (*mem_get_address_range)(CuPointer* base, std::size_t* bytes, CuPointer pointer);
  CuResult (*ipc_get_mem_handle)(CuIpcMemHandle* handle, CuPointer pointer);
  CuResult (*ipc_open_mem_handle)(CuPointer* pointer, CuIpcMemHandle handle, unsigned flags);
  CuResult (*ipc_close_mem_handle)(CuPointer pointer);
  CuResult (*mem_host_register)(void* base, std::size_t bytes, unsigned flags);
  CuResult (*mem_host_unregister)(void* base);
  CuResult (*pointer_get_attribute)(void* value, int attribute, CuPointer pointer);

  CuResult (*mem_granularity)(std::size_t* bytes, const CuMemProp* prop, int option);
  CuResult (*mem_create)(CuHandle* handle, std::size_t bytes, const CuMemProp* prop, unsigned long long flags);
  CuResult (*mem_release)(CuHandle handle);
  CuResult (*mem_address_reserve)(CuPointer* pointer, std::size_t bytes, std::size_t alignment, CuPointer hint,
                                  unsigned long long flags);
  CuResult (*mem_address_free)(CuPointer pointer, std::size_t bytes);
  CuResult (*mem_map)(CuPointer pointer, std::size_t bytes, std::size_t offset, CuHandle handle,
                      unsigned long long flags);
  CuResult (*mem_unmap)(CuPointer pointer, std::size_t bytes);
  CuResult (*mem_set_access)(CuPointer pointer, std::size_t bytes, const CuMemAccess* access, std::size_t count);
  CuResult (*mem_export)(void* shareable, CuHandle handle, int handle_type, unsigned long long flags);
  CuResult (*mem_import)(CuHandle* handle, void* shareable, int handle_type);

  CuResult (*stream_create)(CuStream* stream, unsigned flags);
  CuResult (*stream_destroy)(CuStream stream);
  CuResult (*stream_synchronize)(CuStream stream);
  CuResult (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags);
  CuResult (*stream_get_ctx)(CuStream stream, CuContext* context);
  CuResult (*event_create)(CuEvent* event, unsigned flags);
  CuResult (*event_destroy)(CuEvent event);
  CuResult (*event_record)(CuEvent event, CuStream stream);
  CuResult (*event_query)(CuEvent event);

  CuResult (*memcpy_async)(CuPointer to, CuPointer from, std::size_t bytes, CuStream stream);
  CuResult (*memset_async)(CuPointer to, unsigned char value, std::size_t bytes, CuStream stream);

  // The functions below are null if the driver lacks them. Records all work of a context in an event: CUDA 12.5.
  CuResult (*ctx_record_event)(CuContext context, CuEvent event) = nullptr;
  // Exchanges the thread's capture mode, which limits it while another thread captures a CUDA graph: CUDA 10.1.
  CuResult (*exchange_capture_mode)(int* mode) = nullptr;
  // The contexts of a stream; the second is null unless the stream is of a green context: CUDA 12.5.
  CuResult (*stream_get_ctx_v2)(CuStream stream, CuContext* context, void** green) = nullptr;
  // Whether the stream is being captured; 0: it is not: CUDA 10.0.
  CuResult (*stream_is_capturing)(CuStream stream, int* status) = nullptr;
  // The stream's later work waits until the word at this address has reached the value: CUDA 11.7.
  CuResult (*stream_wait_value)(CuStream stream, CuPointer word, std::uint32_t value, unsigned flags) = nullptr;
  // The first has the signature of CUDA 12.8; CUDA 13 dropped the failing index.
  CuResult (*memcpy_batch_v1)(CuPointer* to, CuPointer* from, std::size_t* bytes, std::size_t count,
                              CuMemcpyAttributes* attributes, std::size_t* attribute_index, std::size_t attribute_count,
                              std::size_t* failed, CuStream stream) = nullptr;
  CuResult (*memcpy_batch_v2)(CuPointer* to, CuPointer* from, std::size_t* bytes, std::size_t count,
                              CuMemcpyAttributes* attributes, std::size_t* attribute_index, std::size_t attribute_count,
                              CuStream stream) = nullptr;
  // Null in a real driver. A library that stands in for one may bring kvpool's kernels along (gpu_launch.h).
  const cuda::Launcher* (*kernel_launcher)() = nullptr;

 private:
  explicit CudaDriver(const std::string& name);
};

}  // namespace kvpool
