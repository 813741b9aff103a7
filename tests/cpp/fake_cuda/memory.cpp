// The fake driver's memory: physical allocations, plain device memory, handles between processes, registered host
// memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "device_addresses.h"
#include "state.h"

namespace kvpool::fake_cuda {

namespace {

constexpr char kFileName[] = "fake-cuda-";

std::byte* map_file(int fd, std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) std::abort();
  return static_cast<std::byte*>(mapped);
}

}  // namespace

Physical::Physical(int of_device, std::size_t size) : device(of_device), bytes(size) {
  fd = memfd_create((kFileName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) std::abort();
  host = map_file(fd, bytes);
  std::memset(host, 0xA5, bytes);  // new memory is not zero
  state().used[device] += bytes;
}

std::shared_ptr<Physical> Physical::import(int descriptor) {
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (readlink(link.c_str(), target, sizeof target - 1) < 0) return nullptr;
  const std::string name(target);
  const std::size_t at = name.find(kFileName);
  struct stat status{};
  if (at == std::string::npos || fstat(descriptor, &status) != 0) return nullptr;
  std::shared_ptr<Physical> physical(new Physical);
  physical->device = std::atoi(name.c_str() + at + sizeof kFileName - 1);
  physical->bytes = static_cast<std::size_t>(status.st_size);
  physical->fd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  physical->host = map_file(physical->fd, physical->bytes);
  physical->imported = true;
  return physical;
}

std::uint64_t Physical::inode() const {
  struct stat status{};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

Physical::~Physical() {
  munmap(host, bytes);
  close(fd);
  if (!imported) state().used[device] -= bytes;
}

Address take_addresses(std::size_t bytes) {
  State& s = state();
  const auto base = reinterpret_cast<Address>(s.window) + s.window_used;
  s.window_used += (bytes + kGranularity - 1) / kGranularity * kGranularity + kGranularity;  // a hole after each
  return base;
}

bool fits(int device, std::size_t bytes) {
  const std::size_t total = static_cast<std::size_t>(state().settings.at("memory_mib")) << 20;
  return bytes <= total && state().used[device] <= total - bytes;
}

bool on_device(Address address) {
  const auto window = reinterpret_cast<Address>(state().window);
  return address >= window && address < window + (Address{64} << 30);
}

namespace {

// The range that has all of [address, address + bytes), or null.
Range* range_of(Address address, std::size_t bytes, Address& base) {
  State& s = state();
  auto after = s.ranges.upper_bound(address);
  if (after == s.ranges.begin()) return nullptr;
  const auto found = std::prev(after);
  if (address + bytes > found->first + found->second.bytes) return nullptr;
  base = found->first;
  return &found->second;
}

struct IpcHandle {  // CUipcMemHandle
  int process;
  int descriptor;
  std::uint64_t inode;  // the descriptor may be another file's by now
  unsigned char rest[48];
};
static_assert(sizeof(IpcHandle) == 64);

// The memory of the handle: null when that is gone.
std::shared_ptr<Physical> physical_of(const IpcHandle& handle) {
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.descriptor);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat status{};
  const bool same = fstat(fd, &status) == 0 && status.st_ino == handle.inode;
  auto physical = same ? Physical::import(fd) : nullptr;
  close(fd);
  return physical;
}

// Of this process, every page of it.
bool is_mapped(void* base, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(base) / kPage * kPage;
  const auto end = reinterpret_cast<std::uintptr_t>(base) + bytes;
  return msync(reinterpret_cast<void*>(begin), end - begin, MS_ASYNC) == 0;  // NOLINT(performance-no-int-to-ptr)
}

bool overlaps_registered(Address address, std::size_t bytes) {
  const auto& registered = state().registered;
  const auto next = registered.lower_bound(address);
  if (next != registered.end() && next->first < address + bytes) return true;
  return next != registered.begin() && std::prev(next)->first + std::prev(next)->second > address;
}

}  // namespace

std::byte* host_address(Address address, std::size_t bytes, int device) {
  if (!on_device(address)) return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  Address base = 0;
  const Range* range = range_of(address, bytes, base);
  if (range == nullptr || range->physical == nullptr) return nullptr;
  const bool by_peer = range->plain && device >= 0 && state().contexts[device].peers.contains(range->physical->device);
  if (device >= 0 && !by_peer && !range->access.contains(device)) return nullptr;
  return range->physical->host + (address - base);
}

std::shared_ptr<Physical> physical_at(Address address) {
  Address base = 0;
  const Range* range = on_device(address) ? range_of(address, 1, base) : nullptr;
  return range == nullptr ? nullptr : range->physical;
}

bool is_registered(Address address, std::size_t bytes) {
  const auto& registered = state().registered;
  const auto after = registered.upper_bound(address);
  if (after == registered.begin()) return false;
  const auto found = std::prev(after);
  return address + bytes <= found->first + found->second;
}

}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  const Context* context = enter_context("cuMemGetInfo", "", code);
  if (context == nullptr) return code;
  *total = static_cast<std::size_t>(s.settings.at("memory_mib")) << 20;
  *free = *total - s.used[context->device];
  return kSuccess;
}

int cuMemAlloc_v2(Address* address, std::size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  const Context* context = enter_context("cuMemAlloc", std::to_string(bytes), code);
  if (context == nullptr) return code;
  if (bytes == 0) return kInvalidValue;
  if (!fits(context->device, bytes)) return kOutOfMemory;
  *address = take_addresses(bytes);
  s.ranges[*address] = Range{bytes, true, 0, std::make_shared<Physical>(context->device, bytes), {context->device}};
  return kSuccess;
}

int cuMemFree_v2(Address address) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  int code = 0;
  const Context* context = enter_context("cuMemFree", "", code);
  if (context != nullptr) wait_to_unmap(lock, context->device);
  const auto found = s.ranges.find(address);
  if (found == s.ranges.end() || !found->second.plain) return kInvalidValue;
  s.ranges.erase(found);
  return code;
}

int cuIpcGetMemHandle(void* handle, Address address) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  if (enter_context("cuIpcGetMemHandle", "", code) == nullptr) return code;
  const auto found = s.ranges.find(address);
  if (found == s.ranges.end() || !found->second.plain) return kInvalidValue;
  if (s.settings.at("ipc") == 0) return kNotSupported;
  const Physical& physical = *found->second.physical;
  const IpcHandle made{static_cast<int>(getpid()), physical.fd, physical.inode(), {}};
  std::memcpy(handle, &made, sizeof made);
  return kSuccess;
}

int cuIpcOpenMemHandle_v2(Address* address, IpcHandle handle, unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  const Context* context = enter_context("cuIpcOpenMemHandle", std::to_string(flags), code);
  if (context == nullptr) return code;
  if (flags != 1) return kInvalidValue;
  if (handle.process == getpid()) return kInvalidContext;
  for (auto& [base, range] : s.ranges) {
    if (range.opened == 0 || range.physical->inode() != handle.inode || !range.access.contains(context->device))
      continue;
    ++range.opened;
    *address = base;
    return kSuccess;
  }
  auto physical = physical_of(handle);
  if (physical == nullptr) return kInvalidHandle;
  if (physical->device / 2 != context->device / 2) return kPeerAccessUnsupported;
  *address = take_addresses(physical->bytes);
  s.ranges[*address] = Range{physical->bytes, false, 1, physical, {context->device}};
  return kSuccess;
}

int cuIpcCloseMemHandle(Address address) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  int code = 0;
  const Context* context = enter_context("cuIpcCloseMemHandle", "", code);
  if (context != nullptr) wait_to_unmap(lock, context->device);
  const auto found = s.ranges.find(address);
  if (found == s.ranges.end() || found->second.opened == 0) return kInvalidValue;
  if (--found->second.opened == 0) s.ranges.erase(found);
  return code;
}

int cuMemGetAddressRange_v2(Address* base, std::size_t* bytes, Address address) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  if (enter_context("cuMemGetAddressRange", "", code) == nullptr) return code;
  const Range* range = on_device(address) ? range_of(address, 1, *base) : nullptr;
  if (range == nullptr || range->physical == nullptr) return kInvalidValue;
  *bytes = range->bytes;
  return kSuccess;
}

int cuMemHostRegister_v2(void* base, std::size_t bytes, unsigned flags) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  int code = 0;
  if (enter_context("cuMemHostRegister", std::to_string(bytes) + "," + std::to_string(flags), code) == nullptr) {
    return code;
  }
  const auto held = [&] {
    const int from = s.settings.at("hold_register");
    return from > 0 && bytes >= static_cast<std::size_t>(from);
  };
  while (held()) {
    lock.unlock();
    usleep(100);
    lock.lock();
  }
  const auto address = reinterpret_cast<Address>(base);
  if (on_device(address) || bytes == 0 || flags > 15 || !is_mapped(base, bytes)) return kInvalidValue;
  if (overlaps_registered(address, bytes)) return kAlreadyRegistered;
  s.registered[address] = bytes;
  return kSuccess;
}

int cuMemHostUnregister(void* base) {
  std::unique_lock lock(state().mutex);
  int code = 0;
  const Context* context = enter_context("cuMemHostUnregister", "", code);
  if (context != nullptr) wait_to_unmap(lock, context->device);
  const bool lost = context == nullptr && current_context() != nullptr && current_context()->lost == code;
  if (context == nullptr && !lost) return code;
  if (state().registered.erase(reinterpret_cast<Address>(base)) == 0) return kNotRegistered;
  return code;
}

int cuPointerGetAttribute(void* value, int attribute, Address address) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuPointerGetAttribute", std::to_string(attribute));
  if (code != kSuccess) return code;
  Address base = 0;
  const Range* range = on_device(address) ? range_of(address, 1, base) : nullptr;
  const bool is_device = range != nullptr && range->physical != nullptr;
  if (!is_device && !is_registered(address, 1)) return kInvalidValue;
  auto* number = static_cast<int*>(value);
  switch (attribute) {
    case 2:
      *number = is_device ? 2 : 1;
      return kSuccess;
    case 9:
      *number = is_device ? range->physical->device : 0;
      return kSuccess;
    case 10:  // IS_LEGACY_CUDA_IPC_CAPABLE
      *number = is_device && range->plain ? 1 : 0;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

}  // extern "C"
