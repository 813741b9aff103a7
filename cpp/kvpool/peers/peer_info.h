// A peer, as the application is told of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/route_health.h"

namespace kvpool {

struct PeerInfo {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  std::string link;                 // "unix", "tcp 127.0.0.1:4711"
  std::vector<std::string> routes;  // the cheapest first
  std::uint64_t pid = 0;
  std::uint32_t lent_blocks = 0;             // of ours, to it
  std::uint32_t borrowed_blocks = 0;         // of its, by us
  std::uint32_t reserved_blocks = 0;         // of ours, for transfers of it that are under way
  std::uint32_t transfers = 0;               // from here, and requests to it, that are under way
  std::vector<RouteFailure> route_failures;  // of routes to it that have failed, and not worked since
  std::vector<RoutePrice> route_prices;      // what they are taken to cost
};

}  // namespace kvpool
