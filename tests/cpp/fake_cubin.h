// What the fake driver takes for machine code, and what a test says that it does: fake_cuda/modules.cpp.
//
// A cubin is text: the magic word, "target 90", "kernel NAME", "threads 128", then the bytes of each parameter, "8" or
// "4", with an "a" behind those that the code takes for multiples of 16. As on a real driver:
//   - Code for another GPU is CUDA_ERROR_NO_BINARY_FOR_GPU, and a name that is not in it CUDA_ERROR_NOT_FOUND.
//   - Loading and unloading wait for all work of the GPU. So does a kernel's first launch, unless cuFuncLoad has loaded
//     it: "loaded at a launch" counts these.
//   - A launch with another number of threads, an empty or too large grid, or more shared memory than
//   cuFuncSetAttribute
//     allowed is CUDA_ERROR_INVALID_VALUE.
// It is stricter: an argument that is missing, or not a multiple of 16 where the code takes it for one, ends the
// process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace kvpool::fake_cuda {

inline constexpr const char* kFakeCubinMagic = "fake-cubin";

struct FakeParameter {
  std::size_t bytes;
  bool aligned;  // taken for a multiple of 16
};

// One launch, as its kernel sees it.
struct FakeLaunch {
  std::vector<std::byte> parameters;
  unsigned grid[3] = {};
  bool (*reach)(void* context, std::uint64_t address, std::size_t bytes, std::byte** host) = nullptr;
  void* context = nullptr;

  // Where the CPU finds these bytes of the GPU's memory; null: they are not mapped.
  std::byte* at(std::uint64_t address, std::size_t bytes) const {
    std::byte* host = nullptr;
    return reach(context, address, bytes, &host) ? host : nullptr;
  }
};

// fake_cuda_kernel: what the kernel of this name does, in the stream. Returns 0, or the fault that ends the context.
using KernelBody = std::function<int(const FakeLaunch&)>;
using KernelFunction = void(const char* name, const KernelBody& body);

}  // namespace kvpool::fake_cuda
