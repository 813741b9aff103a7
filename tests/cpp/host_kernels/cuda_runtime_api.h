// As much of the CUDA runtime as cuda/kernels.cu needs, for the CPU: see host_kernels.h. Only kernels.cpp includes it.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#include "host_kernels.h"

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__

namespace kvpool::host_kernels {

inline const Driver* driver = nullptr;
inline bool breaks_stores = false;

// The memory that a launch may touch, as the fake driver tells it. A launch asks once for each allocation.
class LaunchMemory {
 public:
  explicit LaunchMemory(int device) : device_(device) {}
  // Where the CPU finds this address of the kernel. Throws Fault.
  std::byte* at(std::uint64_t address, std::size_t bytes, std::size_t alignment);

 private:
  static constexpr std::size_t kSpans = 4;
  const int device_;
  std::size_t next_ = 0;
  Span spans_[kSpans];
};

// The fault that ends a launch: the result of its context's calls from then on.
struct Fault {
  int code;
};

inline std::byte* LaunchMemory::at(std::uint64_t address, std::size_t bytes, std::size_t alignment) {
  if (address % alignment != 0) throw Fault{kMisalignedAddress};
  for (const Span& span : spans_) {
    if (address >= span.begin && address < span.end && bytes <= span.end - address) {
      return span.host + (address - span.begin);
    }
  }
  Span found;
  if (!driver->reach(address, bytes, device_, found)) throw Fault{kIllegalAddress};
  std::byte* const place = found.host + (address - found.begin);
  spans_[next_++ % kSpans] = std::move(found);
  return place;
}

inline thread_local LaunchMemory* launch_memory = nullptr;  // of the launch that this thread runs

}  // namespace kvpool::host_kernels

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};
inline thread_local dim3 gridDim;
inline thread_local dim3 blockIdx;
inline thread_local dim3 threadIdx;

using cudaStream_t = struct HostKernelStream*;
struct cudaFuncAttributes {};
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

inline cudaError_t cudaGetDevice(int* device) {
  return static_cast<cudaError_t>(kvpool::host_kernels::driver->current_device(device));
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 2;  // multiprocessors
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* /*attributes*/, const void* /*kernel*/) {
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/,
                                   cudaStream_t stream) {
  return static_cast<cudaError_t>(kvpool::host_kernels::driver->copy(
      reinterpret_cast<std::uintptr_t>(to), reinterpret_cast<std::uintptr_t>(from), bytes, stream));
}

// The last thread block first: a kernel may rely on no order among them.
template <class Table>
cudaError_t cudaLaunchKernel(void (*kernel)(Table), dim3 grid, dim3 block, void** arguments, std::size_t /*shared*/,
                             cudaStream_t stream) {
  namespace host = kvpool::host_kernels;
  auto table = std::make_shared<Table>();
  std::memcpy(table.get(), arguments[0], sizeof(Table));
  const auto run = [kernel, grid, block, table = std::move(table)](int device) -> int {
    host::LaunchMemory memory(device);
    host::launch_memory = &memory;
    gridDim = grid;
    try {
      for (blockIdx.x = grid.x; blockIdx.x-- > 0;) {
        for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(*table);
      }
    } catch (const host::Fault& fault) {
      return fault.code;
    }
    return 0;
  };
  return static_cast<cudaError_t>(host::driver->launch(stream, run));
}
