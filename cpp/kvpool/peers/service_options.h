// The options of a pool's service.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/routes/transport_settings.h"

namespace kvpool {

struct ServiceOptions {
  std::string name;                               // "": host name, pid and a random number
  std::string secret;                             // shared by all peers; required for TCP
  std::string model;                              // fingerprint: peers with a different one are refused
  std::vector<std::string> routes;                // the allowed ones; empty: the default
  std::int64_t lease_ns = 3'000'000'000;          // a peer that is silent for this long is lost
  std::int64_t reserve_max_ns = 600'000'000'000;  // the longest life of a reservation
  int worker_threads = 2;
  std::uint32_t transfers_max = 4096;     // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;  // blocks of one peer, reserved and lent together
  std::uint32_t viewed_max = 1U << 22;    // blocks that one peer views
  std::uint32_t received_max = 65536;     // items that wait for the application; then peers get kBusy
  std::uint32_t attend_lent_max = 64;     // attention calls of peers that run or wait here; 0: none is computed
  bool trusted_network = false;           // frames on TCP carry a checksum, not a MAC, if both sides set this
  bool prefer_unix_socket = true;         // for peers on this host, even when their TCP address was given
  bool measure_routes = true;             // when peers connect, if there is a choice: see transfer/route_probe.h
  std::int64_t measure_ns = 50'000'000;   // a measurement begins no write after this time
  bool joins_cluster = false;             // has no peers before join(), which sets the instance id
  TransportSettings transports;
};

}  // namespace kvpool
