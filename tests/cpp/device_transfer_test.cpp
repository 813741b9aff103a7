// Transfers from and to blocks on a (fake) GPU: the order with the application's streams, failures, other processes.
// verbs_test.cpp tests transfers in general over these routes, as over all others.
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "block_memory.h"
#include "child_process.h"
#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/order.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/peers/retained_memory.h"
#include "peer_process.h"
#include "ways.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr const char* kRoutes[] = {"loopback", "cuda_ipc", "sock"};

std::shared_ptr<const DeviceOrder> order_after(const EngineStream& stream, int device = 0) {
  return DeviceOrder::after(CudaContext::retain(device, "a test's order"), stream.handle());
}

std::vector<std::uint32_t> counts_of(Node& node) {
  std::vector<std::uint32_t> counts;
  for (std::size_t state = 0; state < kBlockStateCount; ++state) {
    counts.push_back(node.count(static_cast<BlockState>(state)));
  }
  return counts;
}

void stamp_all(Pool& pool, const Addresses& addresses, std::uint64_t first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) stamp(pool, addresses[i], first + i);
}

TEST_CASE("a transfer after a stream reads what the stream's work has written, and its caller does not wait") {
  for (const char* route : kRoutes) {
    CAPTURE(route);
    GpuPair pair(route, {});
    const EngineStream engine(pair.driver());
    Pool& pool = *pair.a().pool();
    const Addresses from = alloc_stamped(pool, 3, 10);
    std::atomic<bool> may_end{false};
    std::atomic<bool> ended{false};
    engine.run([&] {
      while (!may_end) usleep(100);
      dawdle();
      stamp_all(pool, from, 50);
      ended = true;
    });
    TransferRequest request = pair.request(from);
    request.after = order_after(engine);
    request.private_bytes = Bytes();
    const auto transfer = pair.a().transfer(std::move(request));
    CHECK_FALSE(ended);
    may_end = true;
    pair.finish(*transfer);
    CHECK(ended);
    CHECK(are_stamped(*pair.b().pool(), pair.receive(pair.b())->addresses, 50));
  }
}

TEST_CASE("a transfer or fetch that names no stream reads what all streams of the GPU have written") {
  for (const char* route : kRoutes) {
    CAPTURE(route);
    GpuPair pair(route, {});
    const EngineStream engine(pair.driver());
    Pool& pool = *pair.a().pool();
    const Addresses from = alloc_stamped(pool, 3, 10);
    const Addresses to = alloc(*pair.b().pool(), 3);
    const auto work = [&](std::uint64_t first) {
      engine.run([&pool, &from, first] {
        dawdle();
        stamp_all(pool, from, first);
      });
    };
    work(50);
    TransferRequest request = pair.request(from);
    request.private_bytes = Bytes();
    pair.finish(*pair.a().transfer(std::move(request)));
    CHECK(are_stamped(*pair.b().pool(), pair.receive(pair.b())->addresses, 50));
    work(70);
    pair.finish(*pair.b().fetch(pair.fetch_request(from, to)));
    CHECK(are_stamped(*pair.b().pool(), to, 70));
  }
}

TEST_CASE("each layer of a streamed transfer follows its own work") {
  for (const char* route : kRoutes) {
    CAPTURE(route);
    GpuPair pair(route, {});
    const EngineStream engine(pair.driver());
    Pool& pool = *pair.a().pool();
    const Addresses from = alloc_stamped(pool, 2, 10);
    TransferRequest request = pair.request(from);
    request.streamed = true;
    request.private_bytes = Bytes();
    const auto transfer = pair.a().transfer(std::move(request));
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      engine.run([&] {
        dawdle();
        stamp_all(pool, from, 50);
      });
      transfer->send_layer(layer, order_after(engine));
    }
    transfer->finish();
    pair.finish(*transfer);
    CHECK(are_stamped(*pair.b().pool(), pair.receive(pair.b())->addresses, 50));
  }
}

TEST_CASE("a transfer that waits for a stream can be cancelled, and ends at its deadline, before that work has ended") {
  for (const char* route : kRoutes) {
    for (const bool by_deadline : {false, true}) {
      CAPTURE(route);
      CAPTURE(by_deadline);
      GpuPair pair(route, {});
      const EngineStream engine(pair.driver());
      const Addresses from = alloc_stamped(*pair.a().pool(), 3, 10);
      const Addresses lent = pair.a().borrow(3, Medium::kHbm);
      stamp_all(*pair.b().pool(), lent, 90);
      const auto before = counts_of(pair.b());
      std::atomic<bool> may_end{false};
      engine.run([&] {
        while (!may_end) usleep(100);
      });
      TransferRequest request = pair.request(from);
      request.to = lent;
      request.after = order_after(engine);
      if (by_deadline) request.deadline_ns = pair.in_seconds(0.1);
      const auto transfer = pair.a().transfer(std::move(request));
      if (!by_deadline) CHECK(transfer->cancel());
      const auto error = pair.end_of(*transfer);
      REQUIRE(error.has_value());
      CHECK(error->code() == (by_deadline ? ErrorCode::kDeadline : ErrorCode::kCancelled));
      may_end = true;
      engine.wait();
      CHECK(are_stamped(*pair.b().pool(), lent, 90));
      CHECK(counts_of(pair.b()) == before);
      pair.a().give_back(lent);
    }
  }
}

TEST_CASE("an `after` that is no stream of the pool's GPU is refused") {
  const FakeCuda cuda;
  const EngineStream other(cuda, 1);
  const auto own = CudaContext::retain(0, "a test");
  CHECK(code_of([&] { DeviceOrder::after(own, other.handle()); }) == ErrorCode::kArgument);
  cuda.fail("cuEventRecord", 304);
  const EngineStream stream(cuda);
  CHECK(code_of([&] { DeviceOrder::after(own, stream.handle()); }) == ErrorCode::kUnsupported);
  CHECK(cuda.left().find("events") == std::string::npos);
}

TEST_CASE("pools connect by every route that reaches a GPU, and the CPU does the copies that need no GPU") {
  const FakeCuda cuda;
  {
    // Measuring would take the few free blocks for a moment: service_measure_test.cpp
    const auto by_guess = [](ServiceOptions& options) { options.measure_routes = false; };
    ServiceNode a("a", {}, PairOptions{.device = 0}, by_guess);
    ServiceNode b("b", {}, PairOptions{.device = 1}, by_guess);
    ServiceNode host("host", {}, PairOptions{}, by_guess);
    a.meet(b);
    CHECK(a.service().peers()[0].routes == std::vector<std::string>{"loopback", "shm", "cuda_ipc", "sock"});
    const std::string peer = a.connect(host);
    std::uint64_t first = 100;
    const auto send = [&](ServiceNode& from, ServiceNode& to, Medium source, Medium target, const char* by = "") {
      const Addresses addresses = alloc_stamped(*from.pool(), 2, first += 10, source);
      TransferRequest request;
      request.peer = to.name();
      request.from = addresses;
      request.medium = target;
      request.private_bytes = Bytes();
      request.checksum = true;
      request.route = by;
      request.deadline_ns = real_seconds(10);
      const auto transfer = from.service().transfer(std::move(request));
      REQUIRE(transfer->wait(real_seconds(20)));
      transfer->rethrow_if_failed();
      const auto item = to.service().receive(real_seconds(10));
      REQUIRE(item != nullptr);
      CHECK(are_stamped(*to.pool(), item->addresses, first));
      free_all(*to.pool(), item->addresses);
      free_all(*from.pool(), addresses);
      return transfer->stats().route;
    };
    for (const Medium source : {Medium::kHbm, Medium::kDram}) {
      for (const Medium target : {Medium::kHbm, Medium::kDram}) {
        CHECK_NOTHROW(send(a, b, source, target));
        // The other pool's memory is not page-locked, but its second mapping here is.
        CHECK(send(a, host, source, target, "cuda_ipc") == "cuda_ipc");
        const std::string to_host = send(a, host, source, target);
        if (source == Medium::kHbm) CHECK((to_host == "cuda_ipc" || to_host == "sock"));
        // A pool without a GPU sends to one that has it over the socket.
        const std::string route = send(host, a, source, target);
        if (target == Medium::kHbm) CHECK(route == "sock");
      }
    }
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("if any driver call fails in a transfer, both pools are unchanged and the next transfer works") {
  for (const char* route : kRoutes) {
    int failures = 0;
    for (int n = 1;; ++n) {
      CAPTURE(route);
      CAPTURE(n);
      GpuPair pair(route, {});
      const Addresses from = alloc_stamped(*pair.a().pool(), 3, 10);
      const auto before_a = counts_of(pair.a());
      const auto before_b = counts_of(pair.b());
      const auto send = [&] {
        TransferRequest request = pair.request(from);
        request.private_bytes = Bytes();
        request.checksum = true;
        const auto transfer = pair.a().transfer(std::move(request));
        return pair.end_of(*transfer);
      };
      pair.driver().fail_nth(n, 304);
      const auto error = send();
      const bool reached = pair.driver().failed();
      pair.driver().fail_nth(0, 0);
      if (error) {
        ++failures;
        // A failure on the receiver's side ends the connection.
        const bool lost = error->code() == ErrorCode::kPeerLost;
        const bool own = error->code() == ErrorCode::kRouteFailed || error->code() == ErrorCode::kUnsupported;
        CHECK((lost || own));
        CHECK(counts_of(pair.a()) == before_a);
        CHECK(pair.eventually([&] { return counts_of(pair.b()) == before_b; }));
        if (!lost) CHECK_FALSE(send());
      }
      CHECK(are_stamped(*pair.a().pool(), from, 10));
      while (const auto item = pair.b().next_received()) CHECK(are_stamped(*pair.b().pool(), item->addresses, 10));
      if (!reached) break;
    }
    CHECK(failures >= 3);
  }
}

TEST_CASE("if any driver call fails when two pools connect, they connect or fail, and leave nothing") {
  bool without_ipc = false;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    {
      const auto error = error_of([&] {
        PoolOptions options = small_options(4, 4);
        options.device = 0;
        options.pin_dram = true;
        PeerNode one(std::make_shared<Pool>(options), make_ranks);
        options.device = 1;
        PeerNode two(std::make_shared<Pool>(options), make_ranks);
        ServiceOptions service;
        service.secret = "s";
        service.name = "one";
        service.measure_routes = false;  // hundreds of calls more: service_measure_test.cpp
        cuda.fail_nth(n, 304);
        Service& first = one.start_service(service);
        service.name = "two";
        Service& second = two.start_service(service);
        first.connect(second.listen(unix_address()), real_seconds(10));
        cuda.fail_nth(0, 0);
        const std::vector<PeerInfo> peers = first.peers();
        const auto& routes = peers[0].routes;
        without_ipc = without_ipc || std::ranges::find(routes, "cuda_ipc") == routes.end();
      });
      if (error) CHECK((error->code() == ErrorCode::kUnsupported || error->code() == ErrorCode::kPeerLost));
    }
    const bool reached = cuda.failed();
    // A handle of an imported and unmapped allocation, if releasing it was the call that failed.
    CHECK((cuda.left() == "" || cuda.left() == "handles=1"));
    if (!reached) break;
  }
  CHECK(without_ipc);
}

TEST_CASE("a transfer from a lost GPU says so, and so does the pool from then on") {
  for (const char* route : kRoutes) {
    CAPTURE(route);
    GpuPair pair(route, {});
    const Addresses from = alloc_stamped(*pair.a().pool(), 3, 10);
    pair.driver().lose(0, 719);
    const auto transfer = pair.a().transfer(pair.request(from));
    const auto error = pair.end_of(*transfer);
    REQUIRE(error.has_value());
    CHECK(error->code() == ErrorCode::kDeviceLost);
    CHECK(code_of([&] { pair.a().pool()->swap_out(1); }) == ErrorCode::kDeviceLost);
    // The GPU may write its orders at any time later: this process, which would have to end, is the peer's own.
    const std::uint32_t kept = route == std::string("sock") ? 0 : 3;
    CHECK(pair.eventually([&] {
      return pair.b().count(BlockState::kQuarantined) == kept && pair.b().count(BlockState::kFree) == 32 - kept;
    }));
  }
}

TEST_CASE("a kernel copies small pieces in one launch, with the same result as the copy engines") {
  const FakeCuda cuda;
  cuda.set("delay_us", 10);
  Dice dice(7);
  const auto context = CudaContext::retain(0, "a test");
  DeviceArenaOptions options;
  options.blocks = 8;
  options.segment_bytes = {96, 160};
  const DeviceArena from(options);
  options.segment_bytes = {64, 128, 64};
  const DeviceArena to(options);
  const StreamKernels kernels(cuda);
  for (const bool by_kernel : {true, false}) {
    DeviceCopier copier(context, by_kernel ? &kernels.set() : nullptr, {}, "a test");
    for (std::uint32_t block = 0; block < 8; ++block) {
      fill_block(cuda, from, block, static_cast<std::uint8_t>(40 + block));
      fill_block(cuda, to, block, 1);
    }
    const BlockStrip whole{0, 0, from.block_bytes()};
    std::vector<PlannedStrip> plan;
    plan_strips({8, from.segments()}, {8, to.segments()}, {&whole, 1}, true, plan);
    const auto address = [](std::uint32_t block) { return make_address(0, Medium::kHbm, 1, block); };
    const Addresses source{address(0), address(1), address(5)};
    const Addresses target{address(3), address(4), address(0)};
    StreamKernels::launches() = 0;
    CHECK(copier.copy(kvpool::GpuWay::kWithin, plan, source, target, true) > 0);
    CHECK(StreamKernels::launches() == (by_kernel ? 1 : 0));
    CHECK(block_is(cuda, to, 3, 40));
    CHECK(block_is(cuda, to, 4, 41));
    CHECK(block_is(cuda, to, 0, 45));
    CHECK(block_is(cuda, to, 1, 1));
  }
}

TEST_CASE("another GPU's memory is imported by the GPUs that reach it, and no other memory is") {
  const FakeCuda cuda;
  {
    DeviceArenaOptions options;
    options.blocks = 4;
    options.segment_bytes = {64};
    const DeviceArena arena(options);
    const std::size_t bytes = arena.device_memory()->bytes();
    const int fd = arena.device_memory()->export_descriptor();
    fill_block(cuda, arena, 2, 77);
    {
      const ImportedMemory near(CudaContext::retain(1, "a test"), fd, bytes);
      CHECK(cuda.host(near.base() + 128, 64)[0] == std::byte{77});
      CHECK(code_of([&] { ImportedMemory(CudaContext::retain(2, "a test"), fd, bytes); }) == ErrorCode::kUnsupported);
      CHECK(code_of([&] { ImportedMemory(CudaContext::retain(0, "a test"), fd, bytes * 2); }) ==
            ErrorCode::kUnsupported);
      CHECK(code_of([&] { ImportedMemory(CudaContext::retain(0, "a test"), 0, bytes); }) == ErrorCode::kUnsupported);
    }
    for (int n = 1;; ++n) {
      cuda.fail_nth(n, 2);
      const auto code = code_of([&] { ImportedMemory(CudaContext::retain(1, "a test"), fd, bytes); });
      const bool reached = cuda.failed();
      cuda.fail_nth(0, 0);
      if (!reached) break;
      if (code) CHECK(*code == ErrorCode::kOutOfMemory);
    }
    close(fd);
  }
  CHECK(cuda.left().find("bytes") == std::string::npos);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
