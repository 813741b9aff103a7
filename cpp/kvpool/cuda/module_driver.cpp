#include "kvpool/cuda/module_driver.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "attention on a GPU";

}  // namespace

ModuleDriver::ModuleDriver(const CudaDriver& driver) {
  // Open already, and never closed: this is the same library.
  void* handle = dlopen(driver.library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const auto load = [&](auto& function, const char* symbol) {
    void* address = handle != nullptr ? dlsym(handle, symbol) : nullptr;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    return address != nullptr;
  };
  const auto find = [&](auto& function, const char* symbol) {
    if (load(function, symbol)) return;
    throw Error(ErrorCode::kUnsupported, std::string(kWhat) + ": " + driver.library + " has no " + symbol);
  };
  find(module_load_data, "cuModuleLoadData");
  find(module_unload, "cuModuleUnload");
  find(module_get_function, "cuModuleGetFunction");
  find(func_set_attribute, "cuFuncSetAttribute");
  find(launch_kernel, "cuLaunchKernel");
  load(func_load, "cuFuncLoad");
}

LoadedKernel::LoadedKernel(std::shared_ptr<const CudaContext> context, const ModuleDriver& modules, const void* cubin,
                           const char* name, std::uint32_t threads, std::uint32_t shared_bytes)
    : context_(std::move(context)), modules_(modules), threads_(threads), shared_bytes_(shared_bytes) {
  const CudaDriver& driver = context_->driver();
  const int most = context_->attribute(kCuDeviceSharedOptinBytes, kWhat);
  if (most < 0 || shared_bytes > static_cast<std::uint32_t>(most)) {
    throw Error(ErrorCode::kUnsupported, std::string(kWhat) + ": " + name + " needs " + std::to_string(shared_bytes) +
                                             " bytes of shared memory; this GPU has " + std::to_string(most));
  }
  driver.require(modules_.module_load_data(&module_, cubin), "cuModuleLoadData", kWhat);
  try {
    driver.require(modules_.module_get_function(&function_, module_, name), "cuModuleGetFunction", kWhat);
    if (shared_bytes > kSharedBytesUsual) {
      driver.require(modules_.func_set_attribute(function_, kCuFuncSharedBytesMax, static_cast<int>(shared_bytes)),
                     "cuFuncSetAttribute", kWhat);
    }
    if (modules_.func_load != nullptr) driver.require(modules_.func_load(function_), "cuFuncLoad", kWhat);
  } catch (...) {
    modules_.module_unload(module_);
    throw;
  }
}

LoadedKernel::~LoadedKernel() {
  const CurrentContext current(*context_);
  if (current) modules_.module_unload(module_);
}

void LoadedKernel::launch(const CuGrid& grid, CuStream stream, void** arguments) const {
  KVPOOL_DCHECK(grid.x > 0 && grid.x <= kGridXMax);
  KVPOOL_DCHECK(grid.y > 0 && grid.y <= kGridYMax);
  KVPOOL_DCHECK(grid.z > 0 && grid.z <= kGridYMax);
  context_->driver().require(modules_.launch_kernel(function_, grid.x, grid.y, grid.z, threads_, 1, 1, shared_bytes_,
                                                    stream, arguments, nullptr),
                             "cuLaunchKernel", kWhat);
}

}  // namespace kvpool
