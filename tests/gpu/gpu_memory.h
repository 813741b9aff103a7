// Memory of the GPU and of the host that the tests and the kernels share, and the CUDA calls that a test makes.
#pragma once

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/cuda/kernels.h"

namespace kvpool::testing {

inline void must(cudaError_t result) {
  if (result != cudaSuccess) FAIL(cudaGetErrorName(result), ": ", cudaGetErrorString(result));
}

enum class Where : std::uint8_t { kDevice, kPinned };

// Memory that a kernel reads or writes. In pinned memory the device's pointer is the host's.
class Shared {
 public:
  Shared(std::size_t bytes, Where where) : bytes_(bytes), where_(where) {
    void* memory = nullptr;
    must(where == Where::kDevice ? cudaMalloc(&memory, bytes) : cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Shared() { static_cast<void>(where_ == Where::kDevice ? cudaFree(memory_) : cudaFreeHost(memory_)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  std::byte* data() const noexcept { return memory_; }
  std::size_t size() const noexcept { return bytes_; }
  Where where() const noexcept { return where_; }

  void set(const std::vector<std::byte>& content) {
    must(cudaMemcpy(memory_, content.data(), content.size(), cudaMemcpyDefault));
  }
  std::vector<std::byte> get() const {
    std::vector<std::byte> content(bytes_);
    must(cudaMemcpy(content.data(), memory_, bytes_, cudaMemcpyDefault));
    return content;
  }

 private:
  std::size_t bytes_;
  Where where_;
  std::byte* memory_ = nullptr;
};

class GpuStream {
 public:
  GpuStream() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~GpuStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  cudaStream_t get() const noexcept { return stream_; }
  void wait() const { must(cudaStreamSynchronize(stream_)); }
  // Into the stream, both.
  void fill(std::byte* at, int value, std::size_t bytes) const { must(cudaMemsetAsync(at, value, bytes, stream_)); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// What the cases of kernel_cases.h need to know.
struct GpuHere {};
inline constexpr bool kOnCpu = false;
inline const cuda::KernelSet& kernels() { return *cuda::gpu_kernels(); }

}  // namespace kvpool::testing
