// Measuring how a GPU copies best, over the fake driver; and copies that follow the measurement.
#include "kvpool/cuda/copy_bounds.h"

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "kvpool/arena/device_arena.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/poll_backoff.h"
#include "kvpool/cuda/wait_word.h"
#include "table_kernels.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::size_t kKiB = 1024;

// A clock by what the GPU has done: a launch of the kernel takes `launch_ns`, a piece of the engines `piece_ns`.
RaceClock costs(const FakeCuda& cuda, std::int64_t launch_ns, std::int64_t piece_ns) {
  return [&cuda, launch_ns, piece_ns] {
    return TableKernels::launches() * launch_ns + static_cast<std::int64_t>(cuda.count("copied")) * piece_ns;
  };
}

CopyBounds all(std::size_t bytes) {
  CopyBounds bounds;
  for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) bounds.set(way, bytes);
  return bounds;
}

struct Measured {
  CopyBounds bounds;
  bool complete = false;
};

Measured measure(const FakeCuda& cuda, const TableKernels& kernels, std::int64_t launch_ns, std::int64_t piece_ns) {
  Measured measured;
  measured.bounds = race_copies(CudaContext::retain(0, "a test"), kernels.set(), costs(cuda, launch_ns, piece_ns),
                                &measured.complete);
  return measured;
}

TEST_CASE("the bound between kernels and copy engines lies where they are equally fast") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const TableKernels kernels(cuda);
  // 4 MiB are 128 pieces of 32 KiB, 64 of 64 KiB, and so on.
  const Measured even = measure(cuda, kernels, 25, 1);
  CHECK(even.complete);
  CHECK(even.bounds == all(128 * kKiB));
  CHECK(measure(cuda, kernels, 1, 1).bounds == all(1024 * kKiB));
  CHECK(measure(cuda, kernels, 1000, 1).bounds == all(16 * kKiB));
  CHECK(cuda.count("pageable") == 0);
  CHECK(cuda.left() == "");
}

TEST_CASE("a copy within the GPU is measured with more bytes than its L2 cache holds") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  cuda.set("l2_kib", 8 * 1024);
  const TableKernels kernels(cuda);
  // 8 MiB are twice as many pieces as the 4 MiB that cross the bus, so the engines win at pieces twice as long.
  const Measured measured = measure(cuda, kernels, 25, 1);
  CHECK(measured.complete);
  CHECK(measured.bounds.of(GpuWay::kOut) == 128 * kKiB);
  CHECK(measured.bounds.of(GpuWay::kIn) == 128 * kKiB);
  CHECK(measured.bounds.of(GpuWay::kWithin) == 256 * kKiB);
  CHECK(cuda.left() == "");
}

TEST_CASE("a GPU that is too slow, lacks memory or refuses is not measured, and nothing is kept of the trial") {
  const CopyBounds guess;
  for (const char* call : {"cuMemAlloc", "cuMemHostRegister", "cuStreamCreate", "cuMemcpyBatchAsync_v2"}) {
    CAPTURE(call);
    const FakeCuda cuda;
    cuda.set("delay_us", 0);
    const TableKernels kernels(cuda);
    cuda.fail(call, 2);
    const Measured failed = measure(cuda, kernels, 25, 1);
    CHECK(failed.bounds == guess);
    CHECK_FALSE(failed.complete);
    CHECK(cuda.left() == "");
  }
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const TableKernels kernels(cuda);
  const Measured slow = measure(cuda, kernels, 120'000'000, 1);
  CHECK(slow.bounds == guess);
  CHECK_FALSE(slow.complete);
  CHECK(TableKernels::launches() == 3);  // one for each way
  CHECK(cuda.left() == "");
}

TEST_CASE("losing the GPU during a measurement is reported as DeviceLost") {
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    cuda.set("delay_us", 0);
    const TableKernels kernels(cuda);
    const auto context = CudaContext::retain(0, "a test");
    cuda.fail_nth(n, 719);
    const auto code = code_of([&] { race_copies(context, kernels.set(), costs(cuda, 1000, 1)); });
    const bool reached = cuda.failed();
    cuda.fail_nth(0, 0);
    if (code) CHECK(*code == ErrorCode::kDeviceLost);
    if (!reached) break;
    n += n / 8;  // there are many
  }
}

TEST_CASE("nothing is measured while a stream waits for a word") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  const auto context = CudaContext::retain(0, "a test");
  const auto word = WaitWord::take(context, PollBackoff::now_ns() + 60'000'000'000);
  const std::size_t calls = cuda.count("cuMemAlloc") + cuda.count("cuStreamCreate");
  CHECK(measure(cuda, kernels, 25, 1).bounds == CopyBounds{});
  CHECK(cuda.count("cuMemAlloc") + cuda.count("cuStreamCreate") == calls);
  word->set();
}

TEST_CASE("nothing is measured when another library stands in for the driver") {
  const FakeCuda cuda;
  {
    const DeviceArena device(DeviceArenaOptions{.blocks = 4, .segment_bytes = {512}});
    const std::size_t launched = cuda.count("cuMemcpyAsync") + cuda.count("cuMemcpyBatchAsync_v2");
    const auto mover = DeviceMover::make(device, *make_absent_arena(Medium::kDram, 0, 512));
    CHECK(cuda.count("cuMemcpyAsync") + cuda.count("cuMemcpyBatchAsync_v2") == launched);
    CHECK(cuda.count("cuMemAlloc") == 0);
    CHECK_FALSE(known_copy_bounds(0));
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("pieces up to the bound of their direction go by a kernel, longer ones by the copy engines") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const TableKernels kernels(cuda);
  constexpr std::size_t kPiece = 64 * kKiB;
  const DeviceArena device(DeviceArenaOptions{.blocks = 4, .segment_bytes = {kPiece}});
  ArenaOptions options;
  options.blocks = 4;
  options.segment_bytes = {kPiece};
  options.huge_pages = HugePages::kNever;
  options.pin = true;
  options.pin_device = 0;
  options.commit_threads = 1;
  const auto host = make_owned_arena(options);
  for (const bool out_by_kernel : {true, false}) {
    CopyBounds bounds;
    bounds.set(GpuWay::kOut, out_by_kernel ? kPiece : kPiece - 1);
    bounds.set(GpuWay::kIn, out_by_kernel ? kPiece - 1 : kPiece);
    DeviceMover mover(device, *host, &kernels.set(), bounds);
    const Address hot = make_address(0, Medium::kHbm, 1, 1);
    const Address cold = make_address(0, Medium::kDram, 1, 2);
    fill_block(cuda, device, 1, 55);
    TableKernels::launches() = 0;
    mover.move(TierWay::kOut, &hot, &cold, 1, CopyOrder::met());
    CHECK(TableKernels::launches() == (out_by_kernel ? 1 : 0));
    fill_block(cuda, device, 1, 1);
    TableKernels::launches() = 0;
    mover.move(TierWay::kIn, &cold, &hot, 1, CopyOrder::met());
    CHECK(TableKernels::launches() == (out_by_kernel ? 0 : 1));
    CHECK(block_is(cuda, device, 1, 55));
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
