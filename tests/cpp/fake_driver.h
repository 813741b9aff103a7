// The fake CUDA driver (fake_cuda/fake_cuda.h) as the one that kvpool finds, while a test runs.
#pragma once

#ifdef KVPOOL_FAKE_CUDA

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fake_cuda/fake_cuda.h"
#include "fake_paths.h"
#include "kvpool/cuda/driver.h"

namespace kvpool::testing {

// Stands for the CUDA driver while it lives.
class ChosenDriver {
 public:
  explicit ChosenDriver(const char* library) { setenv("KVPOOL_CUDA_LIBRARY", library, 1); }
  ~ChosenDriver() { unsetenv("KVPOOL_CUDA_LIBRARY"); }
  ChosenDriver(const ChosenDriver&) = delete;
  ChosenDriver& operator=(const ChosenDriver&) = delete;
};

class FakeCuda {
 public:
  FakeCuda() : chosen_(fake_cuda_path()), handle_(dlopen(fake_cuda_path(), RTLD_NOW)) {
    REQUIRE(handle_ != nullptr);
    find<fake_cuda::ResetFunction>("fake_cuda_reset")();
  }
  // In a forked child, for tests of calls that end the process.
  void go_on_after_fork() const { find<fake_cuda::GoOnFunction>("fake_cuda_go_on_after_fork")(); }
  void fail(const char* call, int code) const { find<fake_cuda::FailFunction>("fake_cuda_fail")(call, code); }
  // Of the calls from now on, the n-th; 0: none.
  void fail_nth(int n, int code) const { find<fake_cuda::FailNthFunction>("fake_cuda_fail_nth")(n, code); }
  bool failed() const { return find<fake_cuda::FailedFunction>("fake_cuda_failed")(); }
  void set(const char* name, int value) const { find<fake_cuda::SetFunction>("fake_cuda_set")(name, value); }
  void set_current(int device) const { find<fake_cuda::SetCurrentFunction>("fake_cuda_set_current")(device); }
  void lose(int device, int code) const { find<fake_cuda::LoseFunction>("fake_cuda_lose")(device, code); }
  std::string calls() const { return find<fake_cuda::CallsFunction>("fake_cuda_calls")(); }
  std::string left() const { return find<fake_cuda::LeftFunction>("fake_cuda_left")(); }
  std::size_t count(const char* name) const { return find<fake_cuda::CountFunction>("fake_cuda_count")(name); }

  // The bytes of device memory, for the CPU.
  std::byte* host(const std::byte* address, std::size_t bytes) const {
    void* found = find<fake_cuda::HostFunction>("fake_cuda_host")(reinterpret_cast<std::uintptr_t>(address), bytes);
    REQUIRE(found != nullptr);
    return static_cast<std::byte*>(found);
  }

  // An entry point of the driver, by its exported name.
  template <typename Function>
  Function* find(const char* name) const {
    auto* function = reinterpret_cast<Function*>(dlsym(handle_, name));
    REQUIRE((function != nullptr));
    return function;
  }

 private:
  ChosenDriver chosen_;
  void* handle_;  // stays open, as the driver's does
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
