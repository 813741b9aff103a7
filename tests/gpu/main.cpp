// The program of the tests that need a GPU. Without one it says so and ends with 77: nothing was tested, nothing
// failed.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdio>

#include "kvpool/cuda/kernels.h"

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&devices);
  if (result != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA GPU: %s. No GPU test was run.\n",
                 result == cudaSuccess ? "the driver knows no device" : cudaGetErrorString(result));
    return 77;
  }
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) == cudaSuccess) {
    std::printf("%s, sm_%d%d, %d multiprocessors; kernels for %s\n", device.name, device.major, device.minor,
                device.multiProcessorCount, kvpool::cuda::kernel_targets());
  }
  return doctest::Context(argc, argv).run();
}
