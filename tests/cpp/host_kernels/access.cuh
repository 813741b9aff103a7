// Stands in for cuda/access.cuh on the CPU: every access must be aligned and of memory that the fake GPU may touch.
#pragma once

#include <cstring>

#include "cuda_runtime_api.h"
#include "kvpool/cuda/tile.h"

namespace kvpool::cuda {

struct StreamingMemory {
  template <class T>
  T load(std::uint64_t address) const {
    T unit;
    std::memcpy(&unit, host_kernels::launch_memory->at(address, sizeof(T), sizeof(T)), sizeof(T));
    return unit;
  }
  template <class T>
  void store(std::uint64_t address, const T& unit) const {
    std::byte* const place = host_kernels::launch_memory->at(address, sizeof(T), sizeof(T));
    std::memcpy(place, &unit, sizeof(T));
    if (host_kernels::breaks_stores) *place ^= std::byte{1};
  }
};

inline const unsigned char* table_in_memory(const TableHeader& header, const unsigned char* data) {
  const std::size_t pairs = header.tiles / header.tiles_of_pair.divisor;
  return reinterpret_cast<const unsigned char*>(host_kernels::launch_memory->at(
      reinterpret_cast<std::uintptr_t>(data), table_bytes(header.strips, pairs), alignof(DeviceStrip)));
}

}  // namespace kvpool::cuda
