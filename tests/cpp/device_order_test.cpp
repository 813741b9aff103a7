// The order after the application's work on a GPU if no stream is named, and beside an application that
// captures a CUDA graph.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "block_memory.h"
#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/swap_handle.h"
#include "swap_kit.h"
#include "thrown.h"
#include "ways.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr int kBefore12_5 = 12040;
constexpr const char* kRoutes[] = {"loopback", "cuda_ipc", "sock"};

// Work of an application that goes on until the test lets it end.
class Stalled {
 public:
  explicit Stalled(const EngineStream& engine) : engine_(engine) {
    engine_.run([this] { eventually([this] { return let_go_.load(); }); });
  }
  ~Stalled() { end(); }
  Stalled(const Stalled&) = delete;
  Stalled& operator=(const Stalled&) = delete;
  void end() {
    if (let_go_.exchange(true)) return;
    engine_.wait();
  }

 private:
  const EngineStream& engine_;
  std::atomic<bool> let_go_{false};
};

TEST_CASE("a wait for the work of a whole device ends with the work, at the deadline, or by cancellation") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const EngineStream engine(cuda);
    const EngineStream other_gpu(cuda, 1);
    for (const bool now : {true, false}) {
      CAPTURE(now);
      const auto order_of = [&] {
        return now ? DeviceOrder::after_now(context, std::nullopt) : DeviceOrder::after(context, std::nullopt);
      };
      const Stalled elsewhere(other_gpu);
      Stalled work(engine);
      const auto order = order_of();
      CHECK_FALSE(order->ended());
      std::atomic<bool> cancelled{false};
      CHECK(code_of([&] { order->wait(0, &cancelled); }) == ErrorCode::kDeadline);
      cancelled = true;
      CHECK(code_of([&] { order->wait(INT64_MAX, &cancelled); }) == ErrorCode::kCancelled);
      work.end();
      order->wait(INT64_MAX, nullptr);
      CHECK(order->ended() == now);  // not known of all the work there is
      if (!now) continue;
      const Stalled later(engine);
      CHECK(order->ended());  // later work is not waited for
      order->wait(0, nullptr);
    }
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("where the driver has no event for a whole device, the device is waited for all the same") {
  const FakeCuda cuda;
  cuda.set("version", kBefore12_5);
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  for (const bool now : {true, false}) {
    std::atomic<bool> ended{false};
    engine.run([&] {
      dawdle();
      ended = true;
    });
    if (now) {
      CHECK(DeviceOrder::after_now(context, std::nullopt)->ended());
    } else {
      DeviceOrder::after(context, std::nullopt)->wait(INT64_MAX, nullptr);
    }
    CHECK(ended);
  }
  CHECK(cuda.count("cuCtxSynchronize") == 2);
  CHECK(cuda.count("cuCtxRecordEvent") == 0);
}

TEST_CASE("a transfer that names no stream obeys cancellation and deadline while work of the GPU stalls") {
  for (const char* route : kRoutes) {
    for (const bool by_deadline : {false, true}) {
      CAPTURE(route);
      CAPTURE(by_deadline);
      GpuPair pair(route, {});
      const EngineStream engine(pair.driver());
      const Addresses from = alloc_stamped(*pair.a().pool(), 3, 10);
      const Stalled work(engine);
      TransferRequest request = pair.request(from);
      if (by_deadline) request.deadline_ns = pair.in_seconds(0.1);
      const auto transfer = pair.a().transfer(std::move(request));
      if (!by_deadline) CHECK(transfer->cancel());
      const auto error = pair.end_of(*transfer);
      REQUIRE(error.has_value());
      CHECK(error->code() == (by_deadline ? ErrorCode::kDeadline : ErrorCode::kCancelled));
    }
  }
}

// --- an application that captures a CUDA graph in another thread, in global mode

TEST_CASE("the fake refuses what is unsafe while a graph is captured, and counts it") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  cuda.set("capturing", 1);
  CuPointer pointer = 0;
  {
    const CurrentContext current(*context, "a test");
    CHECK(context->driver().mem_alloc(&pointer, 64) == 0);
    CHECK(context->driver().mem_free(pointer) == 0);
    CHECK(cuda.count("captures broken") == 0);
    CHECK(context->driver().ctx_synchronize() == kCudaCaptureUnsupported);
    CHECK(cuda.count("captures broken") == 1);
  }
  cuda.set_current(0);
  CHECK(context->driver().mem_alloc(&pointer, 64) == kCudaCaptureUnsupported);  // the thread is as it was
  CHECK(cuda.count("captures broken") == 2);
}

TEST_CASE("a thread keeps the capture mode that it has chosen") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const CudaDriver& driver = context->driver();
  int mode = 1;
  CHECK(driver.exchange_capture_mode(&mode) == 0);
  CHECK(mode == 0);
  {
    const CurrentContext outer(*context, "a test");
    const CurrentContext inner(*context);
  }
  CHECK(driver.exchange_capture_mode(&mode) == 0);
  CHECK(mode == 1);
}

TEST_CASE("pools, swaps and transfers that name a stream break no capture") {
  for (const char* route : kRoutes) {
    CAPTURE(route);
    GpuPair pair(route, {});
    const FakeCuda& cuda = pair.driver();
    const EngineStream engine(cuda);
    cuda.set("capturing", 1);
    Pool& sender = *pair.a().pool();
    const Addresses from = alloc_stamped(sender, 3, 10);
    TransferRequest request = pair.request(from);
    request.private_bytes = Bytes();
    request.checksum = true;
    request.after = DeviceOrder::after(CudaContext::retain(0, "a test's order"), engine.handle());
    pair.finish(*pair.a().transfer(std::move(request)));
    CHECK(are_stamped(*pair.b().pool(), pair.receive(pair.b())->addresses, 10));
    {
      PoolOptions options = small_options(4, 4);
      options.device = 0;
      options.pin_dram = true;
      const auto pool = std::make_shared<Pool>(options);
      insert(pool, prompt(1, 2), alloc(*pool, 2));
      const Addresses out = pool->swap_out(2, engine.handle());
      CHECK(out.size() == 2);
      swap_in(pool, out, {}, engine.handle());
      const auto swap = pool->begin_swap_out(2, engine.handle());
      CHECK(eventually([&] { return swap->done(); }));
      CHECK_NOTHROW(swap->rethrow_if_failed());
    }
    CHECK(cuda.count("captures broken") == 0);
    cuda.set("capturing", 0);
  }
}

TEST_CASE("a stream that is being captured is refused, and neither the capture nor the pool suffers") {
  const FakeCuda cuda;
  PoolOptions options = small_options(4, 4);
  options.device = 0;
  options.pin_dram = true;
  const auto pool = std::make_shared<Pool>(options);
  const EngineStream engine(cuda);
  insert(pool, prompt(1, 2), alloc(*pool, 2));
  insert(pool, prompt(2, 2), alloc(*pool, 2, Medium::kDram));
  const Addresses cold = match(pool, prompt(2, 2)).addresses;
  engine.begin_capture();
  std::string text;
  CHECK(code_of([&] { pool->swap_out(2, engine.handle()); }, &text) == ErrorCode::kState);
  CHECK(text.find("captured") != std::string::npos);
  CHECK(code_of([&] { swap_in(pool, cold, {}, engine.handle()); }) == ErrorCode::kState);
  CHECK(code_of([&] { pool->begin_swap_out(2, engine.handle()); }) == ErrorCode::kState);
  CHECK(code_of([&] { pool->begin_swap_in(cold, {}, engine.handle()); }) == ErrorCode::kState);
  CHECK(code_of([&] { pool->order_after(engine.handle()); }) == ErrorCode::kState);
  CHECK(cuda.count("captures broken") == 0);
  CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 2);
  engine.end_capture();
  CHECK(pool->swap_out(2, engine.handle()).size() == 2);
}

TEST_CASE("a kvpool stream that was pulled into a capture is not taken for a lost device") {
  const FakeCuda cuda;
  const EngineStream engine(cuda);
  const auto context = CudaContext::retain(0, "a test");
  const CurrentContext current(*context, "a test");
  CudaStream stream(context);
  engine.begin_capture();
  CuEvent event = nullptr;
  REQUIRE(context->driver().event_create(&event, kCuEventDisableTiming) == 0);
  REQUIRE(context->driver().event_record(event, engine.handle()) == 0);
  REQUIRE(context->driver().stream_wait_event(stream.handle(), event, 0) == 0);
  CHECK(code_of([&] { stream.drain("a test"); }) == ErrorCode::kState);
  CHECK(cuda.count("captures broken") == 1);
  engine.end_capture();
  CHECK_NOTHROW(stream.drain("a test"));
  CHECK(context->driver().event_destroy(event) == 0);
}

TEST_CASE("without a stream a swap reports that a graph is being captured, and the pool is unchanged") {
  const FakeCuda cuda;
  PoolOptions options = small_options(4, 4);
  options.device = 0;
  options.pin_dram = true;
  const auto pool = std::make_shared<Pool>(options);
  insert(pool, prompt(1, 2), alloc(*pool, 2));
  cuda.set("capturing", 1);
  std::string text;
  CHECK(code_of([&] { pool->swap_out(2); }, &text) == ErrorCode::kState);
  CHECK(text.find("name the stream") != std::string::npos);
  CHECK(code_of([&] { pool->begin_swap_out(2); }) == ErrorCode::kState);
  CHECK(count(*pool, Medium::kHbm, BlockState::kHistorical) == 2);
  cuda.set("capturing", 0);
  CHECK(pool->swap_out(2).size() == 2);
}

// --- one way to copy

TEST_CASE(
    "where batched copies are not supported, the pieces of a transfer go one by one too, and no batch is retried") {
  const FakeCuda cuda;
  cuda.set("delay_us", 10);
  DeviceArenaOptions options;
  options.blocks = 8;
  options.segment_bytes = {96, 160};
  const DeviceArena from(options);
  options.segment_bytes = {64, 128, 64};
  const DeviceArena to(options);
  cuda.fail("cuMemcpyBatchAsync_v2", 801);
  DeviceCopier copier(CudaContext::retain(0, "a test"), nullptr, {}, "a test");
  for (std::uint32_t block = 0; block < 8; ++block) {
    fill_block(cuda, from, block, static_cast<std::uint8_t>(40 + block));
    fill_block(cuda, to, block, 1);
  }
  const BlockStrip whole{0, 0, from.block_bytes()};
  std::vector<PlannedStrip> plan;
  plan_strips({8, from.segments()}, {8, to.segments()}, {&whole, 1}, true, plan);
  const auto address = [](std::uint32_t block) { return make_address(0, Medium::kHbm, 1, block); };
  const Addresses source{address(0), address(5)};
  const Addresses target{address(3), address(0)};
  const std::uint64_t pieces = copier.copy(kvpool::GpuWay::kWithin, plan, source, target, true);
  CHECK(pieces > 1);
  CHECK(cuda.count("cuMemcpyBatchAsync_v2") == 1);
  CHECK(cuda.count("cuMemcpyAsync") == pieces);
  const Segment& first = from.segments()[0];
  const Segment& last = to.segments()[2];
  const CopyPiece some[] = {{last.base + 6 * last.stride, first.base + 2 * first.stride, 64},
                            {last.base + 7 * last.stride, first.base + 3 * first.stride, 64}};
  copier.copy(some);
  CHECK(cuda.count("cuMemcpyBatchAsync_v2") == 1);
  CHECK(cuda.count("cuMemcpyAsync") == pieces + 2);
  CHECK(block_is(cuda, to, 3, 40));
  CHECK(block_is(cuda, to, 0, 45));
  CHECK(cuda.host(last.base + 7 * last.stride, 64)[63] == std::byte{43});
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
