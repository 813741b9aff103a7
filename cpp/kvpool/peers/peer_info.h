// Information about a peer, for the application.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/route_health.h"
#include "kvpool/transfer/sent_bytes.h"

namespace kvpool {

struct PeerInfo {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  std::string link;                 // "unix", "tcp 127.0.0.1:4711"
  std::vector<std::string> routes;  // the cheapest first
  std::uint64_t pid = 0;
  std::uint32_t lent_blocks = 0;             // our blocks, lent to it
  std::uint32_t borrowed_blocks = 0;         // its blocks, lent to us
  std::uint32_t reserved_blocks = 0;         // our blocks, reserved for its transfers
  std::uint32_t transfers = 0;               // transfers from here and requests to it that are under way
  std::vector<RouteFailure> route_failures;  // of routes that have failed and not worked since
  std::vector<RoutePrice> route_prices;      // the expected costs of its routes
  std::vector<RouteBytes> sent_bytes;        // since it has connected
  std::uint64_t received_bytes = 0;          // likewise
};

}  // namespace kvpool
