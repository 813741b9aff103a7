// How a lane reads and writes: the Memory of tile.h on the GPU.
//
// What is read goes through the read-only path and does not stay in L1; what is written is marked to leave L2 first.
// Both are touched once, and what the model has in the caches is worth more. `volatile` keeps all loads of a tile
// before its first store. Addresses may be of the device or of mapped host memory.
#pragma once

#include "kvpool/cuda/tile.h"

namespace kvpool::cuda {

struct StreamingMemory {
  template <class T>
  __device__ T load(std::uint64_t address) const {
    T unit;
    if constexpr (sizeof(T) == 16) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(unit.words[0]), "=r"(unit.words[1]), "=r"(unit.words[2]), "=r"(unit.words[3])
                   : "l"(address));
    } else if constexpr (sizeof(T) == 4) {
      asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(unit) : "l"(address));
    } else {
      static_assert(sizeof(T) == 1);
      std::uint32_t wide;
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(wide) : "l"(address));
      unit = static_cast<T>(wide);
    }
    return unit;
  }

  template <class T>
  __device__ void store(std::uint64_t address, const T& unit) const {
    if constexpr (sizeof(T) == 16) {
      asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(unit.words[0]), "r"(unit.words[1]),
                   "r"(unit.words[2]), "r"(unit.words[3])
                   : "memory");
    } else if constexpr (sizeof(T) == 4) {
      asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(address), "r"(unit) : "memory");
    } else {
      static_assert(sizeof(T) == 1);
      asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(address), "r"(static_cast<std::uint32_t>(unit)) : "memory");
    }
  }
};

// The strips and pairs of a table in the device's memory.
__device__ inline const unsigned char* table_in_memory(const TableHeader& /*header*/, const unsigned char* data) {
  return data;
}

}  // namespace kvpool::cuda
