// The kernels on a GPU against their references: the cases of kernel_cases.h, and those that need the memory or the
// graphs of a real one.
#include <doctest/doctest.h>

#include "gpu_memory.h"
//
#include "kernel_cases.h"

namespace kvpool::cuda {
namespace {

using testing::must;

TEST_CASE("blocks that lie beyond 4 GiB") {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  must(cudaMemGetInfo(&free_bytes, &total_bytes));
  const std::size_t stride = std::size_t{1} << 30;
  if (free_bytes < 14 * stride) {
    MESSAGE("skipped: it takes 14 GiB of device memory");
    return;
  }
  Shared from(6 * stride, Where::kDevice);
  Shared to(6 * stride, Where::kDevice);
  testing::Dice dice(2);
  const std::size_t bytes = 100'000;
  const Bytes content = random_bytes(bytes, dice);
  must(cudaMemcpy(from.data() + 5 * stride, content.data(), bytes, cudaMemcpyDefault));
  const std::vector<PlannedStrip> strips{{from.data(), to.data(), bytes, stride, stride}};
  const std::vector<BlockPair> pairs{{5, 5}, {0, 1}};
  GpuStream stream;
  REQUIRE(gpu_kernels()->copy({strips, pairs}, stream.get(), {}) == 0);
  stream.wait();
  Bytes copied(bytes);
  must(cudaMemcpy(copied.data(), to.data() + 5 * stride, bytes, cudaMemcpyDefault));
  CHECK(copied == content);
}

TEST_CASE("a launch can be captured into a graph") {
  testing::Dice dice(3);
  Shared memory(4096, Where::kDevice);
  const std::vector<PlannedStrip> strips{{memory.data(), memory.data() + 2048, 1024, 1024, 1024}};
  const std::vector<BlockPair> pairs{{0, 0}};
  cudaStream_t stream = nullptr;
  must(cudaStreamCreate(&stream));
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  REQUIRE(gpu_kernels()->copy({strips, pairs}, stream, {}) == 0);
  must(cudaStreamEndCapture(stream, &graph));
  Bytes content = random_bytes(4096, dice);
  memory.set(content);
  cudaGraphExec_t runnable = nullptr;
  must(cudaGraphInstantiate(&runnable, graph, 0));
  must(cudaGraphLaunch(runnable, stream));
  must(cudaStreamSynchronize(stream));
  std::copy_n(content.begin(), 1024, content.begin() + 2048);
  CHECK(memory.get() == content);
  must(cudaGraphExecDestroy(runnable));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace kvpool::cuda
