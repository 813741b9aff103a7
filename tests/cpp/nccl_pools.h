// Pools on fake GPUs that are connected by the route nccl.
#pragma once

#include "fake_nccl.h"

#ifdef KVPOOL_FAKE_CUDA

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"
#include "soon.h"
#include "thrown.h"

namespace kvpool::testing {

inline constexpr std::int64_t kNcclSecond = 1'000'000'000;

// A pool on a fake GPU that speaks NCCL alone.
struct NcclNode {
  std::shared_ptr<PeerNode> node;
  std::shared_ptr<Pool> pool;
  Service* service;
  std::string name;

  std::uint32_t count(BlockState state, Medium medium = Medium::kHbm) const {
    const PoolStats stats = pool->audit();
    return stats.media[medium].by_state[static_cast<std::size_t>(state)];
  }
};

inline NcclNode make_nccl_node(const std::string& name, int device, bool aggregated = true,
                               std::vector<std::size_t> piece_bytes = {48, 80, 64, 64},
                               const std::vector<std::string>& routes = {"nccl"},
                               std::int64_t pass_ns = NcclLimits{}.pass_ns,
                               std::uint64_t pass_bytes = NcclLimits{}.pass_bytes) {
  PoolOptions options = small_options(32, 8);
  options.layout.piece_bytes = std::move(piece_bytes);
  options.layout.aggregated = aggregated;
  options.device = device;
  options.pin_dram = true;
  options.audit = true;
  auto pool = std::make_shared<Pool>(options);
  auto node = std::make_shared<PeerNode>(pool, make_ranks);
  ServiceOptions service;
  service.name = name;
  service.secret = "s3cret";
  service.routes = routes;
  service.transports.nccl = fake_nccl_path();
  service.transports.nccl_limits.pass_ns = pass_ns;
  service.transports.nccl_limits.pass_bytes = pass_bytes;
  Service& started = node->start_service(service);
  return {std::move(node), std::move(pool), &started, name};
}

struct NcclPair {
  FakeCuda cuda;
  FakeNccl nccl;
  NcclNode a;
  NcclNode b;

  // `a` is aggregated, `b` is not: their blocks lie differently.
  explicit NcclPair(const std::vector<std::size_t>& piece_bytes = {48, 80, 64, 64}, bool both_aggregated = false,
                    const std::vector<std::string>& routes = {"nccl"}, std::int64_t pass_ns = NcclLimits{}.pass_ns,
                    std::uint64_t pass_bytes = NcclLimits{}.pass_bytes)
      : a(make_nccl_node("a", 0, true, piece_bytes, routes, pass_ns, pass_bytes)),
        b(make_nccl_node("b", 1, both_aggregated, piece_bytes, routes, pass_ns, pass_bytes)) {
    meet();
  }
  ~NcclPair() {
    nccl.set("stall", 0);
    if (a.pool != nullptr) a.pool->close();
    if (b.pool != nullptr) b.pool->close();
  }
  void meet() {
    const std::string address =
        b.service->listen("unix:@kvpool-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++addresses_made()));
    REQUIRE(a.service->connect(address, {in(20), {}}) == "b");
  }
  static int& addresses_made() {
    static int count = 0;
    return count;
  }
  static std::int64_t in(double seconds) {
    return monotonic_ns() + static_cast<std::int64_t>(seconds * static_cast<double>(kNcclSecond));
  }
  // Active blocks filled with value, value + 1, ...
  Addresses filled(const NcclNode& node, std::size_t n, int value, Medium medium = Medium::kHbm) const {
    const Addresses blocks = alloc(*node.pool, n, medium);
    for (std::size_t i = 0; i < n; ++i) {
      fill_block(cuda, *node.pool->arena(medium), block_of(blocks[i]),
                 static_cast<std::uint8_t>(value + static_cast<int>(i)));
    }
    return blocks;
  }
  bool are_filled(const NcclNode& node, const Addresses& blocks, int value) const {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto arena = node.pool->arena(medium_of(blocks[i]));
      if (!block_is(cuda, *arena, block_of(blocks[i]), static_cast<std::uint8_t>(value + static_cast<int>(i))))
        return false;
    }
    return true;
  }
  static TransferRequest request(const NcclNode& to, const Addresses& from, double seconds = 30) {
    TransferRequest request;
    request.peer = to.name;
    request.from = from;
    request.deadline_ns = in(seconds);
    request.private_bytes = Bytes{};
    return request;
  }
  // How it ended; nothing when it was well.
  static std::optional<Error> end_of(Transfer& transfer) {
    REQUIRE(transfer.wait(in(60)));
    return error_of([&] { transfer.rethrow_if_failed(); });
  }
  // Sends these, waits, and frees what was received; what it received was right.
  void exchange(NcclNode& from, NcclNode& to, const Addresses& blocks, int value) const {
    const auto sent = from.service->transfer(request(to, blocks));
    const auto error = end_of(*sent);
    REQUIRE_MESSAGE(!error, std::string(error ? error->what() : ""));
    const auto received = to.service->receive(in(30));
    REQUIRE(received != nullptr);
    CHECK(are_filled(to, received->addresses, value));
    to.pool->free(received->addresses.data(), received->addresses.size());
  }
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
