// The routes that peers measure when they connect, over real sockets.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_driver.h"
#include "joined_service.h"
#include "kvpool/base/clock.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kBlocks = 16;

std::size_t measured(ServiceNode& node) {
  std::size_t pairs = 0;
  for (const PeerInfo& peer : node.service().peers()) {
    for (const RoutePrice& price : peer.route_prices) pairs += price.between ? 1 : 0;
  }
  return pairs;
}

std::uint32_t used(ServiceNode& node) { return 2 * kBlocks - node.count(BlockState::kFree); }

// A machine that is busy, or a sanitizer, takes longer than the usual time.
void patient(ServiceOptions& options) { options.measure_ns = 20'000'000'000; }

// It may also be that a route fails just then: then with new pools.
void retry(const std::function<bool()>& holds) {
  for (int i = 0; i < 200; ++i) {
    if (holds()) return;
  }
  FAIL("never in 200 tries");
}

bool soon(const std::function<bool()>& holds, double seconds) {
  const std::int64_t until = real_seconds(seconds);
  while (!holds()) {
    if (monotonic_ns() > until) return false;
    usleep(200);
  }
  return true;
}

void send(ServiceNode& from, ServiceNode& to, std::uint64_t first) {
  const Addresses blocks = alloc_stamped(*from.pool(), 2, first);
  TransferRequest request;
  request.peer = to.name();
  request.from = blocks;
  request.deadline_ns = real_seconds(20);
  const auto sent = from.service().transfer(std::move(request));
  REQUIRE(sent->wait(real_seconds(20)));
  sent->rethrow_if_failed();
  const auto item = to.service().receive(real_seconds(20));
  REQUIRE(item != nullptr);
  CHECK(are_stamped(*to.pool(), item->addresses, first));
  free_all(*to.pool(), item->addresses);
  free_all(*from.pool(), blocks);
}

TEST_CASE("the side that connects measures named routes at once, the other one when it first sends") {
  retry([] {
    ServiceNode a("a", {"cma", "sock"}, kBlocks, patient);
    ServiceNode b("b", {"cma", "sock"}, kBlocks, patient);
    a.meet(b);
    CHECK(soon([&] { return used(a) + used(b) == 0; }, 20));  // a peer that is slow to answer has them longer
    CHECK(a.service().receive(0) == nullptr);
    CHECK(b.service().receive(0) == nullptr);
    CHECK(a.service().transfer_counts(TransferKind::kSend).ended[0] == 0);
    CHECK(measured(b) == 0);
    send(b, a, 50);
    const bool later = soon([&] { return measured(b) == 2; }, 20);
    CHECK(soon([&] { return used(a) + used(b) == 0; }, 20));
    return measured(a) == 8 && later;
  });
}

TEST_CASE("nothing is measured between pools of one host by default routes, or without the setting") {
  for (const bool named : {false, true}) {
    const std::vector<std::string> routes =
        named ? std::vector<std::string>{"cma", "sock"} : std::vector<std::string>{};
    const auto off = [&](ServiceOptions& options) { options.measure_routes = !named; };
    ServiceNode a("a", routes, kBlocks, off);
    ServiceNode b("b", routes, kBlocks, off);
    a.meet(b);
    send(a, b, 10);
    send(b, a, 20);
    CHECK(measured(a) + measured(b) == 0);
    for (const PeerInfo& peer : a.service().peers()) {
      CHECK(peer.route_prices.size() == peer.routes.size());
      for (const RoutePrice& price : peer.route_prices) CHECK(price.prior.us({1, 4096}) > 0);
    }
  }
}

TEST_CASE("pools that close during a measurement leave no block behind and no thread waiting") {
  for (int round = 0; round < 12; ++round) {
    ServiceNode a("a", {"cma", "sock"}, kBlocks);
    ServiceNode b("b", {"cma", "sock"}, kBlocks);
    const std::string where = b.service().listen(unix_address());
    std::atomic<bool> connecting{false};
    std::thread caller([&] {
      connecting = true;
      static_cast<void>(error_of([&] { a.service().connect(where, real_seconds(20)); }));
    });
    CHECK(soon([&] { return connecting.load(); }, 20));
    usleep(static_cast<useconds_t>(round * 300));
    (round % 2 == 0 ? a : b).pool()->close();
    ServiceNode& other = round % 2 == 0 ? b : a;
    if (round % 2 != 0) a.service().close();  // or it would go on calling
    caller.join();
    CHECK(soon([&] { return used(other) == 0; }, 20));
  }
}

#ifdef KVPOOL_FAKE_CUDA

TEST_CASE("routes from and to a GPU are measured, and copies by the CPU alone are not") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  retry([&] {
    const PairOptions on_gpu{.hbm_blocks = kBlocks, .dram_blocks = kBlocks, .device = 0};
    ServiceNode a("a", {}, on_gpu, patient);
    ServiceNode b("b", {}, on_gpu.of_b(), patient);
    a.meet(b);
    CHECK(soon([&] { return used(a) + used(b) == 0; }, 20));  // a peer that is slow to answer has them longer
    bool hbm = false;
    const std::vector<PeerInfo> peers = a.service().peers();
    for (const RoutePrice& price : peers[0].route_prices) {
      if (!price.between) continue;
      CHECK((price.between->first == Medium::kHbm || price.between->second == Medium::kHbm));
      hbm = hbm || *price.between == std::pair(Medium::kHbm, Medium::kHbm);
    }
    send(a, b, 30);
    send(b, a, 40);
    CHECK(soon([&] { return used(a) + used(b) == 0; }, 20));
    return hbm;
  });
  CHECK(cuda.left() == "");
}

TEST_CASE("if any driver call fails while routes are measured, no block is left over") {
  constexpr int kCalls = 400;
  constexpr int kStep = 13;
  int met = 0;
  for (int n = 1; n < kCalls; n += kStep) {
    CAPTURE(n);
    const FakeCuda cuda;
    cuda.set("delay_us", 0);
    const PairOptions on_gpu{.hbm_blocks = kBlocks, .dram_blocks = kBlocks, .device = 0};
    ServiceNode a("a", {}, on_gpu, {});
    ServiceNode b("b", {}, on_gpu.of_b(), {});
    cuda.fail_nth(n, 304);
    const auto error = error_of([&] { a.meet(b); });
    cuda.fail_nth(0, 0);
    CHECK((!error || error->code() == ErrorCode::kUnsupported || error->code() == ErrorCode::kPeerLost));
    if (!error) ++met;
    CHECK(soon([&] { return used(a) + used(b) == 0; }, 20));
  }
  CHECK(met > 0);
}

#endif  // KVPOOL_FAKE_CUDA

}  // namespace
}  // namespace kvpool::testing
