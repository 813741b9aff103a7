// Memory that pipes of NCCL share: it is not freed while any of them is in a pass.
#include "kvpool/routes/nccl/nccl_staging.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "fake_nccl.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/wait_word.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "soon.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::size_t kSmall = 4096;
constexpr std::size_t kLarge = 65536;

TEST_CASE("staging memory is freed at once when no pass is in progress, and otherwise after the last one") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const CurrentContext current(*context, "a test");
    {
      const NcclStaging alone(context, kSmall);
    }
    CHECK(cuda.count("cuMemFree") == 1);
    {
      const NcclPassing first(*context);
      std::optional<NcclPassing> second(std::in_place, *context);
      {
        const NcclStaging during(context, kSmall);
      }
      second.reset();
      CHECK(cuda.count("cuMemFree") == 1);
      CHECK(cuda.count("bytes") == kSmall);
      // Another GPU's pipes have nothing to do with it.
      const auto other = CudaContext::retain(1, "a test");
      const CurrentContext there(*other, "a test");
      {
        const NcclStaging elsewhere(other, kSmall);
      }
      CHECK(cuda.count("cuMemFree") == 2);
    }
    CHECK(cuda.count("cuMemFree") == 3);
    CHECK(cuda.count("bytes") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("kept staging memory serves the next request of the same size") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const CurrentContext current(*context, "a test");
    const NcclPassing passing(*context);
    {
      const NcclStaging first(context, kSmall);
    }
    {
      const NcclStaging larger(context, kLarge);
      CHECK(cuda.count("cuMemAlloc") == 2);
      const NcclStaging again(context, kSmall / 2);
      CHECK(again.bytes() == kSmall);
      CHECK(cuda.count("cuMemAlloc") == 2);
      CHECK(again.base() != larger.base());
    }
    CHECK(cuda.count("bytes") == kSmall + kLarge);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("staging memory is kept while a stream waits for a word, and is freed at the next chance") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const CurrentContext current(*context, "a test");
  const auto word = WaitWord::take(context, monotonic_ns() + 60'000'000'000);
  {
    const NcclStaging first(context, kSmall);
  }
  CHECK(cuda.count("cuMemFree") == 0);
  word->set();
  {
    const NcclPassing passing(*context);
  }
  CHECK(cuda.count("cuMemFree") == 1);
  CHECK(cuda.count("bytes") == 0);
}

TEST_CASE("staging memory without room for it is refused, and nothing is kept of the trial") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const CurrentContext current(*context, "a test");
    CHECK(code_of([&] { NcclStaging(context, std::size_t{1} << 40); }) == ErrorCode::kUnsupported);
    const NcclStaging next(context, kSmall);
    CHECK(cuda.count("bytes") == kSmall);
  }
  CHECK(cuda.left() == "");
}

// A direction between two GPUs, as the two routes have it.
class PipePair {
 public:
  explicit PipePair(const NcclMemory& from, const NcclMemory& to)
      : sender_(std::make_unique<NcclPipe>(from, NcclWay::kSend)),
        receiver_(std::make_unique<NcclPipe>(to, NcclWay::kReceive)) {}
  void open(std::uint64_t pass_bytes) {
    const NcclId id = sender_->make_id();
    std::thread other([&] { sender_->open(id, pass_bytes, [] {}); });
    receiver_->open(id, pass_bytes, [] {});
    other.join();
  }
  NcclPipe& receiver() { return *receiver_; }

 private:
  const std::unique_ptr<NcclPipe> sender_;
  const std::unique_ptr<NcclPipe> receiver_;
};

TEST_CASE("a pipe that needs more staging memory does not wait for another that receives") {
  const FakeCuda cuda;
  {
    const FakeNccl nccl;
    constexpr std::size_t kBytes = 512;
    std::array<std::shared_ptr<DeviceArena>, 2> arenas;
    std::array<NcclMemory, 2> memory;
    for (int device = 0; device < 2; ++device) {
      auto& arena = arenas[static_cast<std::size_t>(device)];
      arena =
          std::make_shared<DeviceArena>(DeviceArenaOptions{.blocks = 2, .segment_bytes = {kBytes}, .device = device});
      NcclMemory& side = memory[static_cast<std::size_t>(device)];
      side.library = &load_nccl(fake_nccl_path());
      side.context = arena->context();
      side.local[0] = {arena->blocks(), arena->segments()};
      side.keepalive = arena;
    }
    PipePair waiting(memory[0], memory[1]);
    PipePair growing(memory[0], memory[1]);
    waiting.open(kSmall);
    growing.open(kSmall);
    cuda.set("unmap_waits", 1);
    std::atomic<bool> gives_up{false};
    std::atomic<bool> ended{false};
    std::thread receives([&] {
      const ContentRange whole{0, kBytes};
      const Address block = make_address(1, Medium::kHbm, 0, 1);
      const std::int64_t until_ns = monotonic_ns() + 20'000'000'000;
      const auto code = code_of([&] {
        waiting.receiver().pass({{&whole, 1}, {&block, 1}, kBytes, kBytes}, [&] {
          if (gives_up || monotonic_ns() > until_ns) throw Error(ErrorCode::kCancelled, "nobody sends");
        });
      });
      CHECK(code == ErrorCode::kCancelled);
      ended = true;
    });
    sleep_while([&] { return nccl.count("ncclRecv") == 0; });
    growing.open(kLarge);
    CHECK_FALSE(ended);
    gives_up = true;
    receives.join();
  }
  CHECK(cuda.left() == "");
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
