// Pools of this process that attend to each other's blocks over real sockets.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "joined_service.h"
#include "sequence_kit.h"

namespace kvpool::testing {

inline std::int64_t soon() { return monotonic_ns() + kSecondsNs; }

// Returns whether it came to hold within some seconds.
template <class Holds>
bool comes_true(Holds holds) {
  for (const std::int64_t until = soon(); monotonic_ns() < until; usleep(200)) {
    if (holds()) return true;
  }
  return false;
}

struct AttendMember {
  explicit AttendMember(const std::string& name, std::uint32_t blocks = 64, std::uint32_t attend_lent_max = 64,
                        const std::string& route = "", std::uint32_t transfers_max = 4096)
      : node(make_attendable_node(blocks)) {
    ServiceOptions options;
    options.transfers_max = transfers_max;
    if (!route.empty()) options.routes = {route};
    options.name = name;
    options.secret = "s3cret";
    options.attend_lent_max = attend_lent_max;
    service = &node->start_service(options);
  }
  Pool& pool() const { return node->pool(); }
  void meet(const AttendMember& other) const {
    service->connect(other.service->listen(unix_address()), real_seconds(60));
  }
  Addresses borrow(const std::string& peer, std::size_t n) const {
    return service->alloc(peer, n, Medium::kHbm, /*may_evict=*/true, soon());
  }

  std::shared_ptr<PeerNode> node;
  Service* service;
};

struct Three {
  explicit Three(std::uint32_t blocks = 64, const std::string& route = "")
      : a("a", blocks, 64, route), b("b", blocks, 64, route), c("c", blocks, 64, route) {
    a.meet(b);
    a.meet(c);
  }
  // Whose block it is.
  Pool& pool_of(Address address) const {
    for (const AttendMember* member : {&b, &c}) {
      if (instance_of(address) == member->pool().instance()) return member->pool();
    }
    return a.pool();
  }

  AttendMember a;
  AttendMember b;
  AttendMember c;
};

inline Addresses operator+(Addresses left, const Addresses& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

}  // namespace kvpool::testing
