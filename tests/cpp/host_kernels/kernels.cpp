// The kernels themselves, compiled for the CPU: see host_kernels.h.
#include "../../../cuda/kernels.cu"
//
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) const kvpool::cuda::Launcher* host_kernels_open(
    const kvpool::host_kernels::Driver& driver) {
  using namespace kvpool;
  static constexpr cuda::Launcher kLauncher{cuda::launch_on_gpu, cuda::load_on_gpu, cuda::gpu_result_name};
  host_kernels::driver = &driver;
  host_kernels::breaks_stores = std::getenv("HOST_KERNELS_BREAK") != nullptr;
  return &kLauncher;
}
