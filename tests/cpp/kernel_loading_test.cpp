// Loading the kernels before they are needed, and its errors: over the fake driver.
#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <string>

#include "device_kit.h"
#include "kvpool/cuda/stream_copier.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("kernels are loaded in their context, and the calling thread's context is restored") {
  const FakeCuda cuda;
  {
    const StreamKernels kernels(cuda);
    for (const int device : {0, 2}) {
      CHECK(loaded(*CudaContext::retain(device, "a test"), kernels.set()) == &kernels.set());
      CHECK(StreamKernels::loaded_on() == device);
      int current = -1;
      CHECK(cuda.find<int(int*)>("cuCtxGetDevice")(&current) != 0);
    }
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("kernels that the GPU cannot run are done without, and any other failure to load them is an error") {
  const FakeCuda cuda;
  {
    const StreamKernels kernels(cuda);
    const auto context = CudaContext::retain(0, "a test");
    // No code for this GPU, PTX that is too new for the driver, a driver that is too old, no such function.
    for (const int code : {209, 222, 35, 98, 1}) {
      CAPTURE(code);
      StreamKernels::load_answer() = code;
      CHECK(loaded(*context, kernels.set()) == nullptr);
    }
    const auto code_after = [&](int code) {
      StreamKernels::load_answer() = code;
      return code_of([&] { loaded(*context, kernels.set()); });
    };
    CHECK(code_after(2) == ErrorCode::kOutOfMemory);
    CHECK(code_after(719) == ErrorCode::kDeviceLost);
    CHECK(code_after(900) == ErrorCode::kState);
    cuda.lose(0, 700);
    CHECK(code_after(700) == ErrorCode::kDeviceLost);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("the kernels of this build are not used when another library stands in for the driver") {
  const FakeCuda cuda;
  CHECK(kernels_for(*CudaContext::retain(0, "a test")) == nullptr);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
