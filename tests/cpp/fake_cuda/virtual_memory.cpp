// The fake driver's virtual memory: reserved addresses, physical memory that is mapped there, who may access it, and
// its export as a file.
#include <fcntl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device_addresses.h"
#include "state.h"

namespace kvpool::fake_cuda {
namespace {

struct Prop {  // CUmemAllocationProp
  int type;
  int handle_types;
  int location_type;
  int location_id;
  void* win32;
  unsigned char flags[8];
};

struct Access {  // CUmemAccessDesc
  int location_type;
  int location_id;
  int flags;
};

bool is_right(const Prop* prop) {
  return prop->type == 1 && prop->handle_types == 1 && prop->location_type == 1 && prop->win32 == nullptr &&
         prop->location_id >= 0 && prop->location_id < state().settings.at("devices");
}

}  // namespace
}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuMemGetAllocationGranularity(std::size_t* bytes, const void* prop, int /*option*/) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuMemGetAllocationGranularity", "");
  if (code != kSuccess) return code;
  *bytes = kGranularity;
  return is_right(static_cast<const Prop*>(prop)) ? kSuccess : kInvalidValue;
}

int cuMemCreate(Address* handle, std::size_t bytes, const void* raw_prop, unsigned long long flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuMemCreate", std::to_string(bytes));
  if (code != kSuccess) return code;
  const auto* prop = static_cast<const Prop*>(raw_prop);
  if (flags != 0 || !is_right(prop) || bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  if (s.settings.at("virtual_memory") == 0) return kNotSupported;
  if (!fits(prop->location_id, bytes)) return kOutOfMemory;
  *handle = s.next_handle++;
  s.handles[*handle] = std::make_shared<Physical>(prop->location_id, bytes);
  return kSuccess;
}

int cuMemRelease(Address handle) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuMemRelease", "");
  if (code != kSuccess) return code;
  return state().handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
}

int cuMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address, unsigned long long flags) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuMemAddressReserve", std::to_string(bytes));
  if (code != kSuccess) return code;
  if (flags != 0 || bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
  *address = take_addresses(bytes);
  state().ranges[*address] = Range{bytes, false, 0, nullptr, {}};
  return kSuccess;
}

int cuMemAddressFree(Address address, std::size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuMemAddressFree", "");
  if (code != kSuccess) return code;
  const auto found = s.ranges.find(address);
  if (found == s.ranges.end() || found->second.plain || found->second.bytes != bytes) return kInvalidValue;
  if (found->second.physical != nullptr) return kInvalidValue;  // still mapped, or opened
  s.ranges.erase(found);
  return kSuccess;
}

int cuMemMap(Address address, std::size_t bytes, std::size_t offset, Address handle, unsigned long long flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuMemMap", "");
  if (code != kSuccess) return code;
  const auto range = s.ranges.find(address);
  const auto physical = s.handles.find(handle);
  if (flags != 0 || offset != 0 || range == s.ranges.end() || range->second.plain || range->second.bytes != bytes ||
      range->second.physical != nullptr || physical == s.handles.end() || physical->second->bytes != bytes) {
    return kInvalidValue;
  }
  range->second.physical = physical->second;
  return kSuccess;
}

int cuMemUnmap(Address address, std::size_t bytes) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const int code = enter("cuMemUnmap", "");
  if (code != kSuccess) return code;
  if (const Context* context = current_context(); context != nullptr) wait_to_unmap(lock, context->device);
  const auto range = s.ranges.find(address);
  if (range == s.ranges.end() || range->second.bytes != bytes || range->second.physical == nullptr ||
      range->second.opened > 0) {
    return kInvalidValue;
  }
  range->second.physical = nullptr;
  range->second.access.clear();
  return kSuccess;
}

int cuMemSetAccess(Address address, std::size_t bytes, const void* raw_access, std::size_t count) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto* access = static_cast<const Access*>(raw_access);
  const int code = enter("cuMemSetAccess", count == 0 ? "" : std::to_string(access[0].location_id));
  if (code != kSuccess) return code;
  const auto range = s.ranges.find(address);
  if (range == s.ranges.end() || range->second.bytes != bytes || range->second.physical == nullptr) {
    return kInvalidValue;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const int device = access[i].location_id;
    const int owner = range->second.physical->device;
    if (access[i].location_type != 1 || access[i].flags != 3) return kInvalidValue;
    if (device != owner && device / 2 != owner / 2) return kInvalidDevice;
    range->second.access.insert(device);
  }
  return kSuccess;
}

int cuMemExportToShareableHandle(void* shareable, Address handle, int type, unsigned long long flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuMemExportToShareableHandle", "");
  if (code != kSuccess) return code;
  const auto physical = s.handles.find(handle);
  if (physical == s.handles.end() || type != 1 || flags != 0) return kInvalidValue;
  *static_cast<int*>(shareable) = fcntl(physical->second->fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}

int cuMemImportFromShareableHandle(Address* handle, void* shareable, int type) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuMemImportFromShareableHandle", "");
  if (code != kSuccess) return code;
  if (type != 1) return kInvalidValue;
  auto physical = Physical::import(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)));
  if (physical == nullptr) return kInvalidValue;
  *handle = s.next_handle++;
  s.handles[*handle] = std::move(physical);
  return kSuccess;
}

}  // extern "C"
