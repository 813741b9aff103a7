// Registering a peer's host memory for a GPU, and transfers while a large one is being registered.
#include "kvpool/routes/cuda_ipc/registered_peer_memory.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device_kit.h"
#include "joined_service.h"
#include "kvpool/base/clock.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr int kHeld = 8 << 20;  // more than the buffers by which sockets send

template <class Holds>
bool soon(Holds&& holds) {
  const std::int64_t until = real_seconds(20);
  while (!holds() && monotonic_ns() < until) usleep(1000);
  return holds();
}

// A pool on a GPU, and one with DRAM that takes long to register, which is connected to the GPU's.
struct LargePeer {
  LargePeer() {
    cuda.set("hold_register", kHeld);
    PairOptions options;
    options.piece_bytes = {std::size_t{1} << 20};
    options.hbm_blocks = 4;
    options.dram_blocks = 4;
    options.device = 0;
    gpu = std::make_unique<ServiceNode>("gpu", kRoutes, options, kNoChange);
    options.device = -1;
    options.dram_blocks = 16;
    host = std::make_unique<ServiceNode>("host", kRoutes, options, kNoChange);
    gpu->connect(*host);
  }

  std::shared_ptr<Transfer> send(double seconds, const char* route = "", Medium target = Medium::kDram) {
    TransferRequest request;
    request.peer = "host";
    request.from = from;
    request.medium = target;
    request.route = route;
    request.deadline_ns = real_seconds(seconds);
    return gpu->service().transfer(std::move(request));
  }
  static std::optional<ErrorCode> end_of(Transfer& transfer) {
    REQUIRE(transfer.wait(real_seconds(30)));
    return code_of([&] { transfer.rethrow_if_failed(); });
  }

  static const std::vector<std::string> kRoutes;
  static const std::function<void(ServiceOptions&)> kNoChange;
  const FakeCuda cuda;
  std::unique_ptr<ServiceNode> gpu;
  std::unique_ptr<ServiceNode> host;
  Addresses from;
};

const std::vector<std::string> LargePeer::kRoutes = {"cuda_ipc", "sock"};
const std::function<void(ServiceOptions&)> LargePeer::kNoChange;

TEST_CASE("another route serves while host memory is registered, and naming this one keeps the deadline") {
  {
    LargePeer pair;
    pair.from = alloc(*pair.gpu->pool(), 1);
    // As soon as something is to be sent there, it begins; nothing waits for it that need not.
    const auto by_socket = pair.send(30);
    CHECK_FALSE(LargePeer::end_of(*by_socket));
    CHECK(by_socket->stats().route == "sock");
    CHECK(soon([&] { return pair.cuda.count("cuMemHostRegister") > 0; }));
    const auto late = pair.send(0.1, "cuda_ipc");
    const auto cancelled = pair.send(30, "cuda_ipc");
    CHECK(LargePeer::end_of(*late) == ErrorCode::kDeadline);
    CHECK(cancelled->cancel());
    CHECK(LargePeer::end_of(*cancelled) == ErrorCode::kCancelled);
    const auto waits = pair.send(30, "cuda_ipc");
    CHECK_FALSE(waits->done());
    pair.cuda.set("hold_register", 0);
    CHECK_FALSE(LargePeer::end_of(*waits));
    CHECK(waits->stats().route == "cuda_ipc");
  }
}

TEST_CASE("a pool that closes while a peer's memory is being registered gives it back afterwards") {
  const FakeCuda cuda;
  {
    LargePeer pair;
    pair.from = alloc(*pair.gpu->pool(), 1);
    const auto waits = pair.send(30, "cuda_ipc");
    const std::size_t before = cuda.count("cuMemHostUnregister");
    pair.gpu->pool()->close();
    CHECK(LargePeer::end_of(*waits).has_value());
    pair.gpu.reset();
    pair.cuda.set("hold_register", 0);
    CHECK(soon([&] { return cuda.count("cuMemHostUnregister") > before; }));
  }
  CHECK(soon([&] { return cuda.left() == ""; }));
}

TEST_CASE("host memory that the driver refuses to register is reached by other routes, and not tried again") {
  LargePeer pair;
  pair.from = alloc(*pair.gpu->pool(), 1);
  pair.cuda.set("hold_register", 0);
  pair.cuda.fail("cuMemHostRegister", 801);
  CHECK(LargePeer::end_of(*pair.send(30, "cuda_ipc")) == ErrorCode::kUnsupported);
  const std::size_t asked = pair.cuda.count("cuMemHostRegister");
  CHECK(code_of([&] { pair.send(30, "cuda_ipc"); }) == ErrorCode::kUnsupported);
  CHECK(pair.cuda.count("cuMemHostRegister") == asked);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
