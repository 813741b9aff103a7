// What a pool that speaks with peers is told when it begins.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/routes/transport_settings.h"

namespace kvpool {

struct ServiceOptions {
  std::string name;                               // "": host name, pid and a random number
  std::string secret;                             // shared by all peers; required for TCP
  std::string model;                              // fingerprint: peers with another one are refused
  std::vector<std::string> routes;                // those that may be used; empty: those by default
  std::int64_t lease_ns = 3'000'000'000;          // a peer that says nothing for so long is lost
  std::int64_t reserve_max_ns = 600'000'000'000;  // a reservation lives at most so long
  int worker_threads = 2;
  std::uint32_t transfers_max = 4096;     // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;  // blocks of one peer, reserved and lent together
  std::uint32_t received_max = 65536;     // items that wait for the application; then peers get kBusy
  bool trusted_network = false;           // frames on TCP carry a checksum, not a MAC, if the peer says so as well
  bool prefer_unix_socket = true;         // for peers on this host, even when their TCP address was given
  bool measure_routes = true;             // when peers meet, where it is a question: see transfer/route_probe.h
  std::int64_t measure_ns = 50'000'000;   // no write of a measurement begins later
  bool joins_cluster = false;             // nobody is met before join(), which brings the instance id
  TransportSettings transports;
};

}  // namespace kvpool
