// The race between kernels and copy engines on a GPU: what it finds, and that it leaves nothing behind.
#include <doctest/doctest.h>

#include <cstddef>

#include "gpu_memory.h"
#include "kvpool/cuda/copy_bounds.h"
#include "kvpool/cuda/poll_backoff.h"

namespace kvpool::testing {
namespace {

TEST_CASE("kernels and copy engines race each way, and a bound is found for each") {
  const auto context = CudaContext::retain(0, "a test");
  REQUIRE(cuda::gpu_kernels()->load() == 0);
  must(cudaDeviceSynchronize());
  std::size_t total = 0;
  std::size_t before = 0;
  std::size_t after = 0;
  must(cudaMemGetInfo(&before, &total));
  for (int round = 0; round < 3; ++round) {
    bool complete = false;
    const std::int64_t began = PollBackoff::now_ns();
    const CopyBounds bounds = race_copies(context, *cuda::gpu_kernels(), PollBackoff::now_ns, &complete);
    const std::int64_t took_ms = (PollBackoff::now_ns() - began) / 1'000'000;
    MESSAGE("out ", bounds.of(GpuWay::kOut), ", in ", bounds.of(GpuWay::kIn), ", within ", bounds.of(GpuWay::kWithin),
            " bytes, in ", took_ms, " ms");
    CHECK(complete);
    for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) {
      CHECK(bounds.of(way) >= std::size_t{16} << 10);
      CHECK(bounds.of(way) <= std::size_t{1} << 20);
    }
    CHECK(took_ms < 1000);
  }
  must(cudaMemGetInfo(&after, &total));
  CHECK(after + (std::size_t{64} << 20) > before);
}

}  // namespace
}  // namespace kvpool::testing
