// The ways by which two pools of this process can know each other, as types: TEST_CASE_TEMPLATE(name, Way, KVPOOL_WAYS)
// is a case for each. It begins with `if (!Way::here()) return;`: UCX runs in a separate process, or is not there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fake_driver.h"
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

enum class Family : std::uint8_t { kUnix, kTcp };
enum class RealRoute : std::uint8_t { kLoopback, kShm, kCma, kSock };

template <RealRoute route, Family family = Family::kUnix>
struct RouteWay {
  static constexpr bool kReal = true;
  static bool here() { return true; }
  static std::unique_ptr<JoinedPair> join(const PairOptions& options = {}) {
    constexpr const char* kNames[] = {"loopback", "shm", "cma", "sock"};
    return std::make_unique<ServicePair>(
        kNames[static_cast<int>(route)], family == Family::kTcp ? "tcp:127.0.0.1:0" : unix_address(), options,
        [](ServiceOptions& service) { service.prefer_unix_socket = family == Family::kUnix; });
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
                                         [](ServiceOptions& service) { service.transports.ucx = ucx_place(); });
  }
};

#ifdef KVPOOL_FAKE_CUDA
// Pools with HBM on two GPUs of the fake driver.
class GpuPair final : public JoinedPair {
 public:
  GpuPair(const std::string& route, PairOptions options) {
    driver_.set("delay_us", 10);
    options.device = 0;
    pair_ = std::make_unique<ServicePair>(route, unix_address(), options);
  }
  ~GpuPair() override {
    pair_.reset();
    // An event of a wait, if destroying it was the call that failed.
    CHECK((driver_.left() == "" || (driver_.failed() && driver_.left() == "events=1")));
    CHECK(driver_.count("pageable") == 0);
  }
  GpuPair(const GpuPair&) = delete;
  GpuPair& operator=(const GpuPair&) = delete;

  ServiceNode& a() override { return pair_->a(); }
  ServiceNode& b() override { return pair_->b(); }
  const char* route() const override { return pair_->route(); }
  std::int64_t now_ns() const override { return pair_->now_ns(); }
  bool live(std::int64_t until_ns, const std::function<bool()>& holds) override { return pair_->live(until_ns, holds); }
  const FakeCuda& driver() const { return driver_; }

 private:
  const FakeCuda driver_;
  std::unique_ptr<ServicePair> pair_;
};

enum class GpuRoute : std::uint8_t { kLoopback, kCudaIpc, kSock };

template <GpuRoute route>
struct GpuWay {
  static constexpr bool kReal = true;
  static bool here() { return true; }
  static std::unique_ptr<JoinedPair> join(const PairOptions& options = {}) {
    constexpr const char* kNames[] = {"loopback", "cuda_ipc", "sock"};
    return std::make_unique<GpuPair>(kNames[static_cast<int>(route)], options);
  }
};

using GpuLoopback = GpuWay<GpuRoute::kLoopback>;
using GpuIpc = GpuWay<GpuRoute::kCudaIpc>;
using GpuSock = GpuWay<GpuRoute::kSock>;
#define KVPOOL_GPU_WAYS , GpuLoopback, GpuIpc, GpuSock
#else
#define KVPOOL_GPU_WAYS
#endif

using SimDirect = SimWay<true>;
using SimPlaced = SimWay<false>;
using Loopback = RouteWay<RealRoute::kLoopback>;
using Shm = RouteWay<RealRoute::kShm>;
using Cma = RouteWay<RealRoute::kCma>;
using SockUnix = RouteWay<RealRoute::kSock>;
using SockTcp = RouteWay<RealRoute::kSock, Family::kTcp>;
using UcxCma = UcxWay<true>;
using UcxTcp = UcxWay<false>;

}  // namespace kvpool::testing

#define KVPOOL_WAYS SimDirect, SimPlaced, Loopback, Shm, Cma, SockUnix, SockTcp, UcxCma, UcxTcp KVPOOL_GPU_WAYS

TYPE_TO_STRING_AS("sim", kvpool::testing::SimDirect);
TYPE_TO_STRING_AS("sim-sock", kvpool::testing::SimPlaced);
TYPE_TO_STRING_AS("loopback", kvpool::testing::Loopback);
TYPE_TO_STRING_AS("shm", kvpool::testing::Shm);
TYPE_TO_STRING_AS("cma", kvpool::testing::Cma);
TYPE_TO_STRING_AS("sock-unix", kvpool::testing::SockUnix);
TYPE_TO_STRING_AS("sock-tcp", kvpool::testing::SockTcp);
TYPE_TO_STRING_AS("ucx-cma", kvpool::testing::UcxCma);
TYPE_TO_STRING_AS("ucx-tcp", kvpool::testing::UcxTcp);
#ifdef KVPOOL_FAKE_CUDA
TYPE_TO_STRING_AS("gpu-loopback", kvpool::testing::GpuLoopback);
TYPE_TO_STRING_AS("gpu-cuda-ipc", kvpool::testing::GpuIpc);
TYPE_TO_STRING_AS("gpu-sock", kvpool::testing::GpuSock);
#endif
