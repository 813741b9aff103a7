// The fake NCCL (fake_nccl/fake_nccl.h) over the fake driver, while a test runs.
#pragma once

#include "device_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <string>

#include "fake_nccl/fake_nccl.h"

namespace kvpool::testing {

class FakeNccl {
 public:
  FakeNccl() : handle_(dlopen(fake_nccl_path(), RTLD_NOW)) {
    REQUIRE(handle_ != nullptr);
    find<fake_nccl::ResetFunction>("fake_nccl_reset")();
  }
  ~FakeNccl() { find<fake_nccl::ResetFunction>("fake_nccl_reset")(); }
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  void set(const char* name, int value) const { find<fake_nccl::SetFunction>("fake_nccl_set")(name, value); }
  void fail_nth(int n, int code) const { find<fake_nccl::FailNthFunction>("fake_nccl_fail_nth")(n, code); }
  bool failed() const { return find<fake_nccl::FailedFunction>("fake_nccl_failed")(); }
  std::size_t count(const char* name) const { return find<fake_nccl::CountFunction>("fake_nccl_count")(name); }

 private:
  template <typename Function>
  Function* find(const char* name) const {
    auto* function = reinterpret_cast<Function*>(dlsym(handle_, name));
    REQUIRE((function != nullptr));
    return function;
  }
  void* handle_;
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
