#include "kvpool/routes/ucx/ucx_devices.h"

#include <algorithm>

namespace kvpool {
namespace {

// Of version 1. Before, a put copies by the CPU, whatever the memory.
constexpr unsigned kMinorGpuPuts = 16;
// Before, the receiver of a range made by cuMemCreate maps nothing, or something else.
constexpr unsigned kMinorVirtualMemory = 22;

bool knows_cuda(const UcxLibrary& ucx, ucp_context_h context) {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucx.context_query(context, &attributes) != UCS_OK) return false;
  return (attributes.memory_types & (std::uint64_t{1} << UCS_MEMORY_TYPE_CUDA)) != 0;
}

}  // namespace

std::string why_not_by_ucx(const UcxLibrary& ucx, ucp_context_h context, UcxGpuMemory memory) {
  const std::string version = "UCX " + ucx.version;
  if (ucx.minor < kMinorGpuPuts) return version + " puts from and into ordinary memory alone; 1.16 and newer do GPUs'";
  if (!knows_cuda(ucx, context)) {
    return version + " in " + ucx.path + " was built without CUDA, or finds no driver or GPU here";
  }
  if (memory == UcxGpuMemory::kVirtual && ucx.minor < kMinorVirtualMemory) {
    return version +
           " cannot give memory that was made by cuMemCreate to a peer: take UCX 1.22 or newer, or the setting "
           "device_memory=\"plain\"";
  }
  if (memory == UcxGpuMemory::kUnknown) {
    return "the engine's memory has no IPC handle (CUDA does not say that it is one plain allocation), and of a range "
           "of "
           "several UCX would give a peer the first alone";
  }
  return {};
}

bool passes_descriptors(const UcxLocal& local, const MediumMap<std::string>& refused) noexcept {
  return std::ranges::any_of(
      kMedia, [&](Medium medium) { return local.on_gpu[medium] == UcxGpuMemory::kVirtual && refused[medium].empty(); });
}

}  // namespace kvpool
