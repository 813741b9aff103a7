// The ways by which two pools of this process can know each other, as types: TEST_CASE_TEMPLATE(name, Way, KVPOOL_WAYS)
// is a case for each. It begins with `if (!Way::here()) return;`: UCX runs in a process of its own, or is not there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "joined_service.h"
#include "joined_sim.h"
#include "ucx_kit.h"

namespace kvpool::testing {

template <bool one_sided>
struct SimWay {
  static constexpr bool kReal = false;
  static bool here() { return true; }
  static std::unique_ptr<JoinedPair> join(const PairOptions& options = {}) {
    return std::make_unique<SimPair>(one_sided, options);
  }
};

enum class Door : std::uint8_t { kUnix, kTcp };
enum class RealRoute : std::uint8_t { kLoopback, kShm, kCma, kSock };

template <RealRoute route, Door door = Door::kUnix>
struct RouteWay {
  static constexpr bool kReal = true;
  static bool here() { return true; }
  static std::unique_ptr<JoinedPair> join(const PairOptions& options = {}) {
    constexpr const char* kNames[] = {"loopback", "shm", "cma", "sock"};
    return std::make_unique<ServicePair>(kNames[static_cast<int>(route)],
                                         door == Door::kTcp ? "tcp:127.0.0.1:0" : unix_address(), options,
                                         [](ServiceOptions& service) { service.unix_door = door == Door::kUnix; });
  }
};

template <bool cma>
struct UcxWay {
  static constexpr bool kReal = true;
  static bool here() {
    const std::vector<std::string> lanes = cma ? std::vector<std::string>{"UCX_TLS=posix,cma"}
                                               : std::vector<std::string>{"UCX_TLS=tcp", "UCX_NET_DEVICES=lo"};
    return alone(doctest::getContextOptions()->currentTest->m_name, lanes);
  }
  static std::unique_ptr<JoinedPair> join(const PairOptions& options = {}) {
    return std::make_unique<ServicePair>("ucx", unix_address(), options,
                                         [](ServiceOptions& service) { service.ucx = ucx_place(); });
  }
};

using SimDirect = SimWay<true>;
using SimPlaced = SimWay<false>;
using Loopback = RouteWay<RealRoute::kLoopback>;
using Shm = RouteWay<RealRoute::kShm>;
using Cma = RouteWay<RealRoute::kCma>;
using SockUnix = RouteWay<RealRoute::kSock>;
using SockTcp = RouteWay<RealRoute::kSock, Door::kTcp>;
using UcxCma = UcxWay<true>;
using UcxTcp = UcxWay<false>;

}  // namespace kvpool::testing

#define KVPOOL_WAYS SimDirect, SimPlaced, Loopback, Shm, Cma, SockUnix, SockTcp, UcxCma, UcxTcp

TYPE_TO_STRING_AS("sim", kvpool::testing::SimDirect);
TYPE_TO_STRING_AS("sim-sock", kvpool::testing::SimPlaced);
TYPE_TO_STRING_AS("loopback", kvpool::testing::Loopback);
TYPE_TO_STRING_AS("shm", kvpool::testing::Shm);
TYPE_TO_STRING_AS("cma", kvpool::testing::Cma);
TYPE_TO_STRING_AS("sock-unix", kvpool::testing::SockUnix);
TYPE_TO_STRING_AS("sock-tcp", kvpool::testing::SockTcp);
TYPE_TO_STRING_AS("ucx-cma", kvpool::testing::UcxCma);
TYPE_TO_STRING_AS("ucx-tcp", kvpool::testing::UcxTcp);
