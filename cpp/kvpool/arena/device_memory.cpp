#include "kvpool/arena/device_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "no memory of the GPU can be had";

CuMemProp properties(const CudaContext& context) {
  CuMemProp properties{};
  properties.type = kCuAllocationPinned;
  properties.handle_types = kCuHandlePosixFd;
  properties.location = {kCuLocationDevice, context.device()};
  properties.gpu_direct_rdma = context.attribute(kCuDeviceRdmaOfVirtualMemory, kWhat) != 0 ? 1 : 0;
  return properties;
}

bool has_virtual_memory(const CudaContext& context) {
  return context.attribute(kCuDeviceVirtualMemory, kWhat) != 0 && context.attribute(kCuDevicePosixFd, kWhat) != 0;
}

std::int64_t as_field(std::size_t bytes) { return static_cast<std::int64_t>(std::min<std::size_t>(bytes, INT64_MAX)); }

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<const CudaContext> context, std::size_t bytes, DeviceMemoryKind kind,
                           bool check_memory)
    : context_(std::move(context)), wanted_(kind) {
  const CurrentContext current(*context_, kWhat);
  kind_ = kind;
  if (kind == DeviceMemoryKind::kAuto) {
    kind_ = has_virtual_memory(*context_) ? DeviceMemoryKind::kVirtual : DeviceMemoryKind::kPlain;
  } else if (kind == DeviceMemoryKind::kVirtual && !has_virtual_memory(*context_)) {
    throw Error(ErrorCode::kUnsupported, "GPU " + std::to_string(context_->ordinal()) +
                                             " has no virtual memory that can be exported: device_memory='plain' does");
  }
  try {
    if (kind_ == DeviceMemoryKind::kPlain || !make_virtual(bytes, check_memory)) make_plain(bytes, check_memory);
  } catch (...) {
    free();
    throw;
  }
}

DeviceMemory::~DeviceMemory() {
  const CurrentContext current(*context_);
  // Without a context, at the end of the process, there is nothing left to free.
  if (current) free();
}

// False when the machine refuses such memory though its GPU has it (a container without the right to export
// descriptors, a vGPU), and plain memory does.
bool DeviceMemory::make_virtual(std::size_t bytes, bool check_memory) {
  const CudaDriver& driver = context_->driver();
  const CuMemProp properties = kvpool::properties(*context_);
  std::size_t granularity = 0;
  const auto falls_back = [&](CuResult result) {
    if (wanted_ != DeviceMemoryKind::kAuto || (result != kCudaNotPermitted && result != kCudaNotSupported))
      return false;
    kind_ = DeviceMemoryKind::kPlain;
    return true;
  };
  require(driver.mem_granularity(&granularity, &properties, kCuGranularityRecommended),
          "cuMemGetAllocationGranularity");
  bytes_ = (bytes + granularity - 1) / granularity * granularity;
  if (check_memory) check_room(bytes_);
  const CuResult created = driver.mem_create(&handle_, bytes_, &properties, 0);
  if (falls_back(created)) return false;
  require(created, "cuMemCreate");
  require(driver.mem_address_reserve(&base_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  require(driver.mem_map(base_, bytes_, 0, handle_, 0), "cuMemMap");
  mapped_ = true;
  give_access();
  return true;
}

void DeviceMemory::make_plain(std::size_t bytes, bool check_memory) {
  bytes_ = bytes;
  if (check_memory) check_room(bytes_);
  require(context_->driver().mem_alloc(&base_, bytes_), "cuMemAlloc");
}

// To its own GPU, and to all that can reach it: without, a copy between two of them goes through the host.
void DeviceMemory::give_access() {
  const CudaDriver& driver = context_->driver();
  const CuMemAccess own{{kCuLocationDevice, context_->device()}, kCuAccessReadWrite};
  require(driver.mem_set_access(base_, bytes_, &own, 1), "cuMemSetAccess");
  int count = 0;
  require(driver.device_get_count(&count), "cuDeviceGetCount");
  for (int peer = 0; peer < count; ++peer) {
    int can = 0;
    CuDevice device = 0;
    if (peer == context_->ordinal() || driver.device_get(&device, peer) != kCudaSuccess ||
        driver.device_can_access_peer(&can, device, context_->device()) != kCudaSuccess || can == 0) {
      continue;
    }
    // A peer that cannot after all is one less: the memory is usable.
    const CuMemAccess access{{kCuLocationDevice, device}, kCuAccessReadWrite};
    if (driver.mem_set_access(base_, bytes_, &access, 1) == kCudaSuccess) peers_.push_back(peer);
  }
}

void DeviceMemory::check_room(std::size_t bytes) const {
  const CudaDriver& driver = context_->driver();
  std::size_t free = 0;
  std::size_t total = 0;
  require(driver.mem_get_info(&free, &total), "cuMemGetInfo");
  if (bytes > free) throw_out_of_memory(kCudaOutOfMemory);
}

void DeviceMemory::require(CuResult result, const char* call) const {
  if (fault_of(result) == CudaFault::kMemory) throw_out_of_memory(result);
  context_->driver().require(result, call, kWhat);
}

void DeviceMemory::throw_out_of_memory(CuResult result) const {
  std::size_t free = 0;
  std::size_t total = 0;
  const bool known = context_->driver().mem_get_info(&free, &total) == kCudaSuccess;
  std::string text =
      "an arena of " + std::to_string(bytes_) + " bytes does not fit GPU " + std::to_string(context_->ordinal());
  if (known) text += ": " + std::to_string(free) + " of its " + std::to_string(total) + " bytes are free";
  Error error(ErrorCode::kOutOfMemory, text,
              {{"needed_bytes", as_field(bytes_)}, {"device", context_->ordinal()}, {"driver_code", result}});
  if (known) {
    error.add("available_bytes", as_field(free));
    error.add("total_bytes", as_field(total));
  }
  throw Error(error);
}

// REQUIRES: the context is current. What the driver answers is of no use here.
void DeviceMemory::free() noexcept {
  const CudaDriver& driver = context_->driver();
  if (kind_ == DeviceMemoryKind::kPlain) {
    if (base_ != 0) driver.mem_free(base_);
    return;
  }
  if (mapped_) driver.mem_unmap(base_, bytes_);
  if (base_ != 0) driver.mem_address_free(base_, bytes_);
  if (handle_ != 0) driver.mem_release(handle_);
}

int DeviceMemory::export_descriptor() const {
  if (kind_ != DeviceMemoryKind::kVirtual) {
    throw Error(ErrorCode::kUnsupported, "plain memory of a GPU has an IPC handle, no file descriptor");
  }
  const CurrentContext current(*context_, kWhat);
  int descriptor = -1;
  require(context_->driver().mem_export(&descriptor, handle_, kCuHandlePosixFd, 0), "cuMemExportToShareableHandle");
  return descriptor;
}

CuIpcMemHandle DeviceMemory::export_handle() const {
  if (kind_ != DeviceMemoryKind::kPlain) {
    throw Error(ErrorCode::kUnsupported, "virtual memory of a GPU has a file descriptor, no IPC handle");
  }
  const CurrentContext current(*context_, kWhat);
  CuIpcMemHandle handle{};
  require(context_->driver().ipc_get_mem_handle(&handle, base_), "cuIpcGetMemHandle");
  return handle;
}

}  // namespace kvpool
