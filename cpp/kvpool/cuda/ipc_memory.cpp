#include "kvpool/cuda/ipc_memory.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kGiving = "memory of the GPU cannot be given to other processes";
constexpr const char* kOpening = "a peer's GPU memory cannot be opened";

// Which of these, by rising address, holds [address, address + bytes); their end: none.
template <class Allocations, class Base>
auto holder_of(const Allocations& allocations, Base&& base_of, std::uint64_t address, std::size_t bytes) {
  const auto after = std::ranges::upper_bound(allocations, address, {}, base_of);
  if (after == allocations.begin()) return allocations.end();
  const auto found = std::prev(after);
  const std::uint64_t offset = address - base_of(*found);
  return offset <= found->bytes && bytes <= found->bytes - offset ? found : allocations.end();
}

// What the driver cannot do there is no failure; all else is.
bool answers(const CudaDriver& driver, CuResult result, const char* call) {
  const CudaFault fault = fault_of(result);
  if (fault == CudaFault::kArgument || fault == CudaFault::kUnsupported) return false;
  driver.require(result, call, kGiving);
  return true;
}

}  // namespace

std::vector<IpcAllocation> ipc_allocations(const CudaContext& context,
                                           std::span<const std::span<const std::byte>> ranges) {
  std::vector<IpcAllocation> allocations;
  if (ranges.empty()) return allocations;
  const CurrentContext current(context, kGiving);
  const CudaDriver& driver = context.driver();
  for (const std::span<const std::byte> range : ranges) {
    const auto address = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(range.data()));
    const auto known = holder_of(allocations, std::mem_fn(&IpcAllocation::base), address, range.size());
    if (known != allocations.end()) continue;
    int capable = 0;
    IpcAllocation found;
    if (!answers(driver, driver.pointer_get_attribute(&capable, kCuPointerLegacyIpcCapable, address),
                 "cuPointerGetAttribute") ||
        capable == 0 ||
        !answers(driver, driver.mem_get_address_range(&found.base, &found.bytes, address), "cuMemGetAddressRange") ||
        !answers(driver, driver.ipc_get_mem_handle(&found.handle, found.base), "cuIpcGetMemHandle")) {
      return {};
    }
    const auto place = std::ranges::upper_bound(allocations, found.base, {}, &IpcAllocation::base);
    const auto added = allocations.insert(place, found);
    // More than one allocation that stand side by side: opened, they would not.
    if (address - added->base + range.size() > added->bytes) return {};
  }
  return allocations;
}

OpenedMemory::OpenedMemory(std::shared_ptr<const CudaContext> context, std::span<const IpcAllocation> allocations)
    : context_(std::move(context)) {
  opened_.reserve(allocations.size());
  const CurrentContext current(*context_, kOpening);
  const CudaDriver& driver = context_->driver();
  try {
    for (const IpcAllocation& allocation : allocations) {
      CuPointer base = 0;
      driver.require(driver.ipc_open_mem_handle(&base, allocation.handle, kCuIpcLazyPeerAccess), "cuIpcOpenMemHandle",
                     kOpening);
      opened_.push_back({allocation.base, allocation.bytes, base});
      // What a peer says of its length is only that. Beyond the end is other memory, or none, where a copy ends the
      // context. A driver that does not tell leaves it at the peer's word.
      CuPointer start = 0;
      std::size_t bytes = 0;
      if (driver.mem_get_address_range(&start, &bytes, base) == kCudaSuccess &&
          (base - start > bytes || allocation.bytes > bytes - (base - start))) {
        throw Error(ErrorCode::kUnsupported, std::string(kOpening) + ": an allocation of " + std::to_string(bytes) +
                                                 " bytes is said to have " + std::to_string(allocation.bytes));
      }
    }
  } catch (...) {
    close();
    throw;
  }
}

OpenedMemory::~OpenedMemory() {
  const CurrentContext current(*context_);
  if (current) close();
}

// REQUIRES: the context is current. What the driver answers is of no use here.
void OpenedMemory::close() noexcept {
  for (const Opened& opened : opened_) context_->driver().ipc_close_mem_handle(opened.base);
  opened_.clear();
}

std::byte* OpenedMemory::at(std::uint64_t address, std::size_t bytes) const noexcept {
  const auto found = holder_of(opened_, std::mem_fn(&Opened::address), address, bytes);
  if (found == opened_.end()) return nullptr;
  return reinterpret_cast<std::byte*>(found->base + (address - found->address));  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace kvpool
