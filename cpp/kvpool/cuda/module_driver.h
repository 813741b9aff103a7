// The driver's entry points for machine code that was compiled ahead of time: to load it, and to launch it. Beside the
// table of driver.h, since only attention needs them.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/driver.h"

namespace kvpool {

using CuModule = void*;
using CuFunction = void*;

inline constexpr int kCuDeviceSharedOptinBytes = 97;  // shared memory of a thread block that asks for more than usual
inline constexpr int kCuDeviceMajor = 75;             // compute capability
inline constexpr int kCuDeviceMinor = 76;
inline constexpr int kCuFuncSharedBytesMax = 8;
inline constexpr std::uint32_t kSharedBytesUsual = 48U << 10;  // what a launch may have without asking

struct CuGrid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};
inline constexpr std::uint64_t kGridXMax = 0x7fffffff;
inline constexpr std::uint64_t kGridYMax = 65535;  // and of z

struct ModuleDriver {
  // Throws kUnsupported when the driver lacks an entry point (named).
  explicit ModuleDriver(const CudaDriver& driver);

  CuResult (*module_load_data)(CuModule* module, const void* image);
  CuResult (*module_unload)(CuModule module);
  CuResult (*module_get_function)(CuFunction* function, CuModule module, const char* name);
  CuResult (*func_set_attribute)(CuFunction function, int attribute, int value);
  CuResult (*launch_kernel)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream,
                            void** arguments, void** extra);
  // Null if the driver lacks it: CUDA 12.4. Loads a kernel now, which may otherwise happen at its first launch.
  CuResult (*func_load)(CuFunction function) = nullptr;
};

// One kernel of a cubin, loaded into a GPU. Any thread may destroy it.
class LoadedKernel {
 public:
  // Throws kUnsupported (lasting when this GPU cannot run the code), kOutOfMemory, kDeviceLost. REQUIRES: the context
  // is current; the driver's table outlives this.
  LoadedKernel(std::shared_ptr<const CudaContext> context, const ModuleDriver& modules, const void* cubin,
               const char* name, std::uint32_t threads, std::uint32_t shared_bytes);
  ~LoadedKernel();
  LoadedKernel(const LoadedKernel&) = delete;
  LoadedKernel& operator=(const LoadedKernel&) = delete;

  // Puts it into the stream. The arguments are read before this returns. Throws as CudaDriver::require. REQUIRES: the
  // context is current; the grid is within its limits and not empty.
  void launch(const CuGrid& grid, CuStream stream, void** arguments) const;

 private:
  const std::shared_ptr<const CudaContext> context_;
  const ModuleDriver& modules_;
  const std::uint32_t threads_;
  const std::uint32_t shared_bytes_;
  CuModule module_ = nullptr;
  CuFunction function_ = nullptr;
};

}  // namespace kvpool
