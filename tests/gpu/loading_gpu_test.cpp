// Kernels that are loaded do not wait at their first launch. Means most in a process that has launched nothing before:
// kvpool_gpu_tests -tc="a first launch*".
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "gpu_memory.h"
#include "kvpool/cuda/context.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {
namespace {

using testing::GpuStream;
using testing::must;
using testing::Shared;
using testing::Where;

constexpr std::chrono::seconds kPatience{20};
constexpr std::size_t kStride = 64;

// A stream waits for this word, which is set at the latest after kPatience: by force, and the test has failed.
class HeldStream {
 public:
  HeldStream() : word_(4, Where::kPinned) {
    *value() = 0;
    const auto address = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(word_.data()));
    REQUIRE(CudaDriver::get().stream_wait_value(stream_.get(), address, 1, kCuStreamWaitGeq) == kCudaSuccess);
    alarm_ = std::thread([this] {
      const auto until = std::chrono::steady_clock::now() + kPatience;
      while (!ended_ && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      forced_ = !ended_;
      __atomic_store_n(value(), 1, __ATOMIC_RELEASE);
    });
  }
  ~HeldStream() {
    ended_ = true;
    alarm_.join();
    static_cast<void>(cudaStreamSynchronize(stream_.get()));
  }
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;
  bool forced() const { return forced_; }

 private:
  std::uint32_t* value() const { return reinterpret_cast<std::uint32_t*>(word_.data()); }

  Shared word_;
  GpuStream stream_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> forced_{false};
  std::thread alarm_;
};

// One launch of each kernel there is: of each width, with each place for a table.
std::vector<std::function<int(Stream)>> launches(const Shared& from, const Shared& to, const TableSpace& table) {
  const KernelSet& kernels = *gpu_kernels();
  std::vector<std::function<int(Stream)>> all;
  for (const std::uint32_t blocks : {1u, 600u, 5000u}) {
    const auto add = [&](std::size_t offset, std::size_t bytes, auto launch) {
      const PlannedStrip strip{from.data() + offset, to.data() + offset, bytes, kStride, kStride};
      std::vector<BlockPair> pairs(blocks);
      for (std::uint32_t i = 0; i < blocks; ++i) pairs[i] = {i, i};
      all.emplace_back([=](Stream stream) {
        const std::vector<PlannedStrip> strips{strip};
        return launch(strips, pairs, stream, LaunchOptions{.thread_blocks_max = 8, .table = table});
      });
    };
    for (const std::uint32_t width : {16u, 4u, 1u}) {
      const std::size_t offset = width == 16 ? 0 : width;
      add(offset, width,
          [&kernels](const auto& strips, const auto& pairs, Stream stream, const LaunchOptions& options) {
            return kernels.copy({strips, pairs}, stream, options);
          });
    }
  }
  return all;
}

TEST_CASE("a first launch does not wait behind a stream that waits for a word, once the kernels are loaded") {
  const Shared from(5000 * kStride + kStride, Where::kDevice);
  const Shared to(5000 * kStride + kStride, Where::kDevice);
  const std::size_t table_bytes = table_bytes_of(1, 5000);
  const Shared host(table_bytes, Where::kPinned);
  const Shared device(table_bytes, Where::kDevice);
  const GpuStream stream;
  REQUIRE(gpu_kernels()->load() == 0);
  must(cudaDeviceSynchronize());
  HeldStream held;
  for (const auto& launch : launches(from, to, {host.data(), device.data(), table_bytes})) {
    REQUIRE(launch(stream.get()) == 0);
    while (cudaStreamQuery(stream.get()) == cudaErrorNotReady && !held.forced()) std::this_thread::yield();
    REQUIRE_FALSE(held.forced());
  }
  stream.wait();
}

}  // namespace
}  // namespace kvpool::cuda
