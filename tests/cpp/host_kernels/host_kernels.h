// The interface between the fake driver (fake_cuda/) and the kernels compiled for the CPU (this folder).
//
// cuda/kernels.cu is compiled as C++ by means of the two headers beside this one, which stand in for the CUDA runtime
// and for cuda/access.cuh, into a separate library. The fake driver opens it when the environment variable
// FAKE_CUDA_KERNELS names it. A launch is then work of one of the fake's streams: it runs when the stream comes to it,
// thread after thread, and asks the fake about every address that it touches. With HOST_KERNELS_BREAK=1 in the
// environment the kernels write wrong bytes: a test that still passes does not check what kernels write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kvpool/cuda/gpu_launch.h"

namespace kvpool::host_kernels {

inline constexpr int kIllegalAddress = 700;
inline constexpr int kMisalignedAddress = 716;

// Addresses [begin, end) of the GPU, which the CPU finds from `host` on while `keep` lives.
struct Span {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::byte* host = nullptr;
  std::shared_ptr<const void> keep;
};

// The functions that return an int return a CUresult.
struct Driver {
  int (*current_device)(int* device);
  int (*copy)(std::uint64_t to, std::uint64_t from, std::size_t bytes, void* stream);
  // Puts a kernel into the stream. Its result, if it is not 0, is what the context answers from then on.
  int (*launch)(void* stream, std::function<int(int device)> kernel);
  // The memory that holds all of [address, address + bytes), if it is mapped for this GPU, or is host memory that is
  // registered. Thread-safe.
  bool (*reach)(std::uint64_t address, std::size_t bytes, int device, Span& span);
};

// host_kernels_open, which the library exports: `driver` must stay, as the result does.
using OpenFunction = const cuda::Launcher*(const Driver& driver);

}  // namespace kvpool::host_kernels
