// Kernels in the fake driver's streams: the ones in cuda/, compiled for the CPU (host_kernels/), where the environment
// variable FAKE_CUDA_KERNELS names that library. Without it kvpool finds no kernels for this driver.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <utility>

#include "../host_kernels/host_kernels.h"
#include "state.h"

namespace kvpool::fake_cuda {
namespace {

int current_device(int* device) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  const Context* context = enter_context("cuCtxGetDevice", "", code);
  if (context != nullptr) *device = context->device;
  return code;
}

extern "C" int cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* handle);

int copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

int launch(void* handle, std::function<int(int device)> kernel) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuLaunchKernel", "", handle, code);
  if (stream == nullptr) return code;
  if (stream->captured) return kSuccess;
  stream->add([kernel = std::move(kernel), context = stream->context] {
    {
      const std::lock_guard inner(state().mutex);
      if (context->lost != 0) return;
      ++state().counts["copied"];
    }
    const int fault = kernel(context->device);
    if (fault == 0) return;
    const std::lock_guard inner(state().mutex);
    if (context->lost == 0) context->lost = fault;
  });
  return kSuccess;
}

// The entry of a map from addresses that begins at the address or last before it. REQUIRES: there is one.
template <class Map>
auto before(Map& map, Address address) {
  return std::prev(map.upper_bound(address));
}

bool reach(std::uint64_t address, std::size_t bytes, int device, host_kernels::Span& span) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!on_device(address)) {
    if (!is_registered(address, bytes)) return false;
    const auto& [base, length] = *before(s.registered, address);
    span = {base, base + length, reinterpret_cast<std::byte*>(base), nullptr};  // NOLINT(performance-no-int-to-ptr)
    return true;
  }
  std::byte* const host = host_address(address, bytes, device);
  if (host == nullptr) return false;
  const auto& [base, range] = *before(s.ranges, address);
  span = {base, base + range.bytes, host - (address - base), range.physical};
  return true;
}

}  // namespace
}  // namespace kvpool::fake_cuda

// kvpool asks this of a driver that is not the machine's own: kernels_for() in cpp/kvpool/cuda/stream_copier.cpp.
extern "C" const kvpool::cuda::Launcher* kvpool_kernel_launcher() {
  using namespace kvpool;
  static constexpr host_kernels::Driver kDriver{fake_cuda::current_device, fake_cuda::copy, fake_cuda::launch,
                                                fake_cuda::reach};
  const char* library = std::getenv("FAKE_CUDA_KERNELS");
  if (library == nullptr || *library == '\0') return nullptr;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  void* open = handle != nullptr ? dlsym(handle, "host_kernels_open") : nullptr;
  if (open == nullptr) {
    std::fprintf(stderr, "FAKE_CUDA_KERNELS names no library of kernels: %s\n", dlerror());
    std::abort();
  }
  return reinterpret_cast<host_kernels::OpenFunction*>(open)(kDriver);
}
