// What NCCL takes of a GPU's memory, as users are told.
#include "kvpool/routes/nccl/nccl_cost.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "fake_nccl.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "kvpool/routes/nccl/nccl_staging.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::size_t kBlockBytes = 512;
constexpr std::uint64_t kPassBytes = 8192;
constexpr int kBufferKib = 96;
constexpr std::uint64_t kBufferBytes = std::uint64_t{kBufferKib} << 10;

bool costs(int gpu, std::uint32_t communicators, std::uint64_t library_bytes, std::uint64_t staging_bytes) {
  const NcclCost cost = nccl_cost(gpu);
  return cost.communicators == communicators && cost.library_bytes == library_bytes &&
         cost.staging_bytes == staging_bytes;
}

// GPUs 0 and 1, and a pipe from one to the other.
class TwoGpus {
 public:
  TwoGpus() {
    for (int device = 0; device < 2; ++device) {
      const auto arena = std::make_shared<DeviceArena>(
          DeviceArenaOptions{.blocks = 2, .segment_bytes = {kBlockBytes}, .device = device});
      NcclMemory memory;
      memory.library = &load_nccl(fake_nccl_path());
      memory.context = arena->context();
      memory.local[0] = {arena->blocks(), arena->segments()};
      memory.keepalive = arena;
      pipes_.at(static_cast<std::size_t>(device)) =
          std::make_unique<NcclPipe>(memory, device == 0 ? NcclWay::kSend : NcclWay::kReceive);
    }
  }
  void open() {
    const NcclId id = pipes_[0]->make_id();
    on_both([&](NcclPipe& pipe) { pipe.open(id, kPassBytes, [] {}); });
  }
  void pass() {
    on_both([](NcclPipe& pipe) {
      const ContentRange whole{0, kBlockBytes};
      const Address block = make_address(1, Medium::kHbm, 0, 1);
      pipe.pass({{&whole, 1}, {&block, 1}, kBlockBytes, kBlockBytes}, [] {});
    });
  }
  NcclPipe& sender() { return *pipes_[0]; }
  NcclPipe& receiver() { return *pipes_[1]; }

 private:
  template <class Work>
  void on_both(const Work& work) {
    std::thread other([&] { work(*pipes_[0]); });
    work(*pipes_[1]);
    other.join();
  }
  std::array<std::unique_ptr<NcclPipe>, 2> pipes_;
};

TEST_CASE("a communicator's buffers are counted when it is made and first used, and no more when it is gone") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  nccl.set("buffer_kib", kBufferKib);
  REQUIRE(costs(0, 0, 0, 0));
  {
    TwoGpus gpus;
    CHECK(costs(0, 0, 0, 0));
    gpus.open();
    CHECK(costs(0, 1, kBufferBytes, kPassBytes));
    CHECK(costs(1, 1, kBufferBytes, kPassBytes));
    gpus.pass();
    CHECK(costs(0, 1, 2 * kBufferBytes, kPassBytes));
    CHECK(costs(1, 1, 2 * kBufferBytes, kPassBytes));
    gpus.pass();
    CHECK(costs(1, 1, 2 * kBufferBytes, kPassBytes));
    gpus.sender().shut();  // keeps its staging memory for the next communicator
    CHECK(costs(0, 0, 0, kPassBytes));
    gpus.receiver().let_go();
    CHECK(costs(1, 0, 0, 0));
  }
  CHECK(costs(0, 0, 0, 0));
  CHECK(cuda.left() == "");
}

TEST_CASE("a communicator that cannot be made, and staging memory without room, cost nothing") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  nccl.set("buffer_kib", kBufferKib);
  {
    TwoGpus gpus;
    const NcclId id = gpus.sender().make_id();
    nccl.fail_nth(1, 3);
    CHECK(code_of([&] { gpus.sender().open(id, kPassBytes, [] {}); }).has_value());
    CHECK(costs(0, 0, 0, kPassBytes));
    gpus.sender().let_go();
    CHECK(code_of([&] { gpus.sender().open(id, std::uint64_t{1} << 40, [] {}); }) == ErrorCode::kUnsupported);
    CHECK(costs(0, 0, 0, 0));
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("what communicators take that are made at once counts once") {
  constexpr std::size_t kSmall = 64 << 10;
  constexpr std::size_t kLarge = 256 << 10;
  const FakeCuda cuda;
  {
    const DeviceArena arena({.blocks = 2, .segment_bytes = {kBlockBytes}, .device = 0});
    const CudaContext& context = *arena.context();
    const CurrentContext current(context, "a test");
    std::array<CuPointer, 4> taken{};
    const auto take = [&](std::size_t at, std::size_t bytes) {
      REQUIRE(context.driver().mem_alloc(&taken.at(at), bytes) == kCudaSuccess);
    };
    const auto give_back = [&](std::size_t at) { context.driver().mem_free(taken.at(at)); };
    {
      CommunicatorCost one(context);
      std::optional<CommunicatorCost> two(std::in_place, context);
      one.measure([&] {
        take(0, kSmall);
        two->measure([&] { take(1, kLarge); });
        CHECK(costs(0, 2, kLarge, 0));  // what fell before it began is not its own
      });
      CHECK(costs(0, 2, kSmall + kLarge, 0));
      CHECK(costs(0, 2, kSmall + kLarge, 0));
      CHECK(code_of([&] {
              one.measure([&] {
                two->measure([&] { take(2, kSmall); });
                take(3, kLarge);
                give_back(3);
                throw Error(ErrorCode::kUnsupported, "a test");
              });
            }) == ErrorCode::kUnsupported);
      CHECK(costs(0, 2, 2 * kSmall + kLarge, 0));
      give_back(1);
      give_back(2);
      two.reset();
      one.measure([] {});  // what was freed meanwhile is not owed to the next
      one.measure([&] { take(3, kSmall); });
      CHECK(costs(0, 1, 2 * kSmall, 0));
      give_back(0);
      give_back(3);
    }
    CHECK(costs(0, 0, 0, 0));
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("what a communicator that fails takes, and one that goes gives back, is charged to no other") {
  constexpr std::size_t kSmall = 64 << 10;
  constexpr std::size_t kLarge = 256 << 10;
  const FakeCuda cuda;
  {
    const DeviceArena arena({.blocks = 2, .segment_bytes = {kBlockBytes}, .device = 0});
    const CudaContext& context = *arena.context();
    const CurrentContext current(context, "a test");
    std::array<CuPointer, 4> taken{};
    const auto take = [&](std::size_t at, std::size_t bytes) {
      REQUIRE(context.driver().mem_alloc(&taken.at(at), bytes) == kCudaSuccess);
    };
    const auto give_back = [&](std::size_t at) { context.driver().mem_free(taken.at(at)); };
    const auto fail = [&](CommunicatorCost& cost, std::size_t at) {
      CHECK(code_of([&] {
              cost.measure([&] {
                take(at, kLarge);
                throw Error(ErrorCode::kUnsupported, "a test");
              });
            }) == ErrorCode::kUnsupported);
    };
    {
      CommunicatorCost one(context);
      CommunicatorCost two(context);
      CommunicatorCost three(context);
      one.measure([&] {
        fail(two, 0);
        three.measure([&] { take(1, kSmall); });
        CHECK(costs(0, 3, kSmall, 0));
        give_back(0);
      });
      CHECK(costs(0, 3, kSmall, 0));
      take(0, kLarge);  // of a communicator that goes while others are made
      one.measure([&] {
        two.measure([&] { give_back(0); });
        three.measure([&] { take(2, kSmall); });
      });
      CHECK(costs(0, 3, 2 * kSmall, 0));
      give_back(1);
      give_back(2);
    }
    CHECK(costs(0, 0, 0, 0));
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a driver that does not say how much memory is free leaves NCCL's share unknown") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  nccl.set("buffer_kib", kBufferKib);
  {
    TwoGpus gpus;
    cuda.fail("cuMemGetInfo", 999);
    gpus.open();
    gpus.pass();
    CHECK(costs(0, 1, 0, kPassBytes));
  }
  CHECK(costs(0, 0, 0, 0));
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
