// Services that are members of a cluster, as its directory lists them.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing::services {

inline ClusterMember member_of(const Node& node, std::vector<std::string> addresses) {
  return {node.name, node.pool->instance(), node.service.incarnation(), std::move(addresses)};
}

inline ClusterMember listening(const Node& node) { return member_of(node, {node.service.listen(unix_address())}); }

// Two nodes; each knows of both, and they are not connected.
struct Pair {
  explicit Pair(const std::vector<std::string>& routes = {"shm"})
      : a(make_node("a", routes)), b(make_node("b", routes)) {
    members = {listening(a), listening(b)};
    tell(members);
  }
  void tell(const std::vector<ClusterMember>& picture) {
    a.service.set_members(picture);
    b.service.set_members(picture);
  }
  Node a;
  Node b;
  std::vector<ClusterMember> members;
};

inline void send_one(const Node& from, const Node& to, double seconds = 10) {
  const Addresses blocks = alloc(*from.pool, 1);
  TransferRequest request = request_to(to, blocks);
  request.deadline_ns = in_seconds(seconds);
  const auto failure = error_of([&] { finish(from.service.transfer(std::move(request))); });
  from.pool->free(blocks.data(), blocks.size());
  if (failure) throw Error(*failure);
  const auto item = to.service.receive(in_seconds(60));
  REQUIRE(item != nullptr);
  to.pool->free(item->addresses.data(), item->addresses.size());
}

// The answer is Busy; on a busy machine the time may have passed before any answer came.
inline bool is_let_in(const Node& caller, const std::string& where) {
  const auto code = code_of([&] { caller.service.connect(where, in_seconds(0.2)); });
  return code != ErrorCode::kBusy && code != ErrorCode::kDeadline;
}

}  // namespace kvpool::testing::services
