// Pools of this process that connect over real sockets, and what tests do with them.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"
#include "sock_fixture.h"

namespace kvpool::testing::services {

struct Node {
  std::shared_ptr<PeerNode> node;
  std::shared_ptr<Pool> pool;  // of the node
  Service& service;
  std::string name;
};

inline Node start_node(const PoolOptions& pool_options, const ServiceOptions& options) {
  const auto pool = std::make_shared<Pool>(pool_options);
  const auto node = std::make_shared<PeerNode>(pool, make_ranks);
  return {node, pool, node->start_service(options), options.name};
}

inline Node make_node(const std::string& name, std::vector<std::string> routes = {}, std::uint32_t blocks = 16,
                      const std::function<void(ServiceOptions&)>& change = {}) {
  PoolOptions options = small_options(blocks, blocks);
  options.audit = true;
  ServiceOptions service;
  service.name = name;
  service.secret = "s3cret";
  service.routes = std::move(routes);
  if (change) change(service);
  return start_node(options, service);
}

inline std::byte* bytes_of(Pool& pool, Address address) {
  const Segment& segment = pool.arena(medium_of(address))->segments()[0];
  return segment.base + block_of(address) * segment.stride;
}

inline void stamp(Pool& pool, const Addresses& addresses, int first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    std::memset(bytes_of(pool, addresses[i]), first + static_cast<int>(i), pool.layout().block_bytes());
  }
}

inline bool is_stamped(Pool& pool, const std::vector<Address>& addresses, int first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const std::byte* bytes = bytes_of(pool, addresses[i]);
    for (std::size_t at = 0; at < pool.layout().block_bytes(); ++at) {
      if (bytes[at] != static_cast<std::byte>(first + static_cast<int>(i))) return false;
    }
  }
  return true;
}

inline void finish(const std::shared_ptr<Transfer>& transfer) {
  REQUIRE(transfer->wait(in_seconds(10)));
  transfer->rethrow_if_failed();
}

inline TransferRequest request_to(const Node& peer, const Addresses& from) {
  TransferRequest request;
  request.peer = peer.name;
  request.from = from;
  request.deadline_ns = in_seconds(10);
  return request;
}

inline std::uint32_t blocks_in(Pool& pool, BlockState state) {
  const PoolStats stats = pool.audit();
  return stats.media[Medium::kHbm].by_state[static_cast<std::size_t>(state)] +
         stats.media[Medium::kDram].by_state[static_cast<std::size_t>(state)];
}

// Links end in other threads.
inline bool all_free_soon(Pool& pool) {
  return soon([&] { return blocks_in(pool, BlockState::kFree) == 32; });
}

inline std::string unix_address() {
  static std::atomic<int> count{0};
  return "unix:@kvpool-service-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

}  // namespace kvpool::testing::services
