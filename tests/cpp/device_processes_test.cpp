// Transfers between the GPUs of two processes, also when one of them is killed. All over the fake driver.
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "block_memory.h"
#include "child_process.h"
#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/order.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/peers/retained_memory.h"
#include "peer_process.h"
#include "ways.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

void stamp_all(Pool& pool, const Addresses& addresses, std::uint64_t first) {
  for (std::size_t i = 0; i < addresses.size(); ++i) stamp(pool, addresses[i], first + i);
}

template <class Holds>
bool soon(Holds&& holds) {
  const std::int64_t until = real_seconds(20);
  while (!holds() && monotonic_ns() < until) usleep(1000);
  return holds();
}

ServiceOptions named(const char* name) {
  ServiceOptions options;
  options.name = name;
  options.secret = "s3cret";
  options.routes = {"cuda_ipc", "sock"};
  options.lease_ns = 3 * kSecond;
  return options;
}

// By which peers get at the memory of a GPU: file descriptors, or IPC handles.
constexpr DeviceMemoryKind kMemory[] = {DeviceMemoryKind::kVirtual, DeviceMemoryKind::kPlain};

std::shared_ptr<Pool> gpu_pool(int device, DeviceMemoryKind memory = DeviceMemoryKind::kAuto,
                               std::uint32_t blocks = 8) {
  PoolOptions options = small_options(blocks, blocks);
  options.device = device;
  options.device_memory = memory;
  options.pin_dram = true;
  options.audit = true;
  return std::make_shared<Pool>(options);
}

// Of two processes; `memory` is that of both.
void send_to_each_other(DeviceMemoryKind memory) {
  const std::string address = unix_address();
  // The peer sends back what it gets, with one added to each stamp.
  PeerProcess peer([&](auto&& wait) {
    const FakeCuda cuda;
    const auto pool = gpu_pool(1, memory);
    PeerNode node(pool, make_ranks);
    Service& service = node.start_service(named("peer"));
    service.listen(address);
    while (const auto item = service.receive(real_seconds(60))) {
      if (!are_stamped(*pool, item->addresses, 20)) return 1;
      stamp_all(*pool, item->addresses, 60);
      TransferRequest request;
      request.peer = "main";
      request.from = item->addresses;
      request.medium = MediumChoice::from_code(static_cast<std::uint8_t>(item->private_bytes[0]));
      request.private_bytes = Bytes();
      request.route = "cuda_ipc";
      request.deadline_ns = real_seconds(20);
      const auto transfer = service.transfer(std::move(request));
      if (!transfer->wait(real_seconds(30))) return 2;
      transfer->rethrow_if_failed();
      if (transfer->stats().route != "cuda_ipc") return 3;
      free_all(*pool, item->addresses);
      if (item->private_bytes.size() > 1) break;
    }
    wait();
    return cuda.count("pageable") == 0 ? 0 : 4;
  });
  const FakeCuda cuda;
  const auto pool = gpu_pool(0, memory);
  PeerNode node(pool, make_ranks);
  Service& service = node.start_service(named("main"));
  REQUIRE(service.connect(address, real_seconds(20)) == "peer");
  CHECK(cuda.count("cuIpcOpenMemHandle") == (memory == DeviceMemoryKind::kPlain ? 1 : 0));
  constexpr Medium kTiers[] = {Medium::kHbm, Medium::kDram};
  int left = 8;
  for (const Medium source : kTiers) {
    for (const Medium there : kTiers) {
      for (const Medium back : kTiers) {
        const Addresses from = alloc_stamped(*pool, 3, 20, source);
        TransferRequest request;
        request.peer = "peer";
        request.from = from;
        request.medium = there;
        request.private_bytes = Bytes(--left > 0 ? 1 : 2, static_cast<std::byte>(back));
        request.route = "cuda_ipc";
        request.deadline_ns = real_seconds(20);
        const auto transfer = service.transfer(std::move(request));
        REQUIRE(transfer->wait(real_seconds(30)));
        transfer->rethrow_if_failed();
        CHECK(transfer->stats().route == "cuda_ipc");
        const auto item = service.receive(real_seconds(30));
        REQUIRE(item != nullptr);
        CHECK(medium_of(item->addresses[0]) == back);
        CHECK(are_stamped(*pool, item->addresses, 60));
        free_all(*pool, item->addresses);
        free_all(*pool, from);
      }
    }
  }
  CHECK(cuda.count("pageable") == 0);
  peer.go();
  CHECK(peer.wait() == 0);
}

TEST_CASE("pools of two processes send to each other's GPUs and host memory") {
  if (!alone("pools of two processes send to each other's GPUs and host memory", {}, false)) return;
  if (!test::kChildMayStartThreads) return;
  for (const DeviceMemoryKind memory : kMemory) send_to_each_other(memory);
}

void kill_a_writer(DeviceMemoryKind memory) {
  const std::string address = unix_address();
  PeerProcess sender([&](auto&& wait) {
    const FakeCuda cuda;
    const auto pool = gpu_pool(1, memory);
    PeerNode node(pool, make_ranks);
    Service& service = node.start_service(named("sender"));
    service.connect(address, real_seconds(20));
    const Addresses from = alloc_stamped(*pool, 4, 10);
    cuda.set("delay_us", 3'000'000);  // a write is long under way
    TransferRequest request;
    request.peer = "main";
    request.from = from;
    request.route = "cuda_ipc";
    request.deadline_ns = real_seconds(60);
    const auto transfer = service.transfer(std::move(request));
    wait();
    return transfer->done() ? 1 : 0;
  });
  const FakeCuda cuda;
  const auto pool = gpu_pool(0, memory);
  PeerNode node(pool, make_ranks);
  Service& service = node.start_service(named("main"));
  service.listen(address);
  const auto count = [&](BlockState state) {
    return pool->audit().media[Medium::kHbm].by_state[static_cast<std::size_t>(state)];
  };
  const auto until = [&](auto&& holds) {
    const std::int64_t end = real_seconds(30);
    while (!holds() && monotonic_ns() < end) usleep(1000);
    return holds();
  };
  REQUIRE(until([&] { return count(BlockState::kReserved) == 4; }));
  sender.stop();  // silent, but not gone: it may write when it wakes
  REQUIRE(until([&] { return count(BlockState::kQuarantined) == 4; }));
  const std::int64_t before_ns = monotonic_ns();
  sender.kill_and_wait();
  const std::int64_t gone_ns = monotonic_ns();
  const bool kept = count(BlockState::kQuarantined) == 4;
  CHECK((kept || monotonic_ns() - before_ns >= 400'000'000));
  REQUIRE(until([&] { return count(BlockState::kFree) == 8; }));
  CHECK(monotonic_ns() - gone_ns >= 400'000'000);  // its GPU has had time to finish: WriterQuarantine::kGpuGraceNs
}

TEST_CASE("blocks on a GPU are freed when the process that writes them is killed and not before") {
  if (!alone("blocks on a GPU are freed when the process that writes them is killed and not before", {}, false)) {
    return;
  }
  if (!test::kChildMayStartThreads) return;
  for (const DeviceMemoryKind memory : kMemory) kill_a_writer(memory);
}

TEST_CASE("memory that a peer has opened by a handle outlives its pool until that peer has ended") {
  if (!alone("memory that a peer has opened by a handle outlives its pool until that peer has ended", {}, false)) {
    return;
  }
  if (!test::kChildMayStartThreads) return;
  for (const bool stopped : {false, true}) {
    CAPTURE(stopped);
    const std::string address = unix_address();
    PeerProcess peer([&](auto&& wait) {
      const FakeCuda cuda;
      const auto pool = gpu_pool(1, DeviceMemoryKind::kPlain);
      PeerNode node(pool, make_ranks);
      node.start_service(named("peer")).listen(address);
      wait();
      return cuda.count("cuIpcOpenMemHandle") == 1 && cuda.count("cuIpcCloseMemHandle") == 1 ? 0 : 1;
    });
    const FakeCuda cuda;
    auto pool = gpu_pool(0, DeviceMemoryKind::kPlain);
    PeerNode node(pool, make_ranks);
    node.start_service(named("main")).connect(address, real_seconds(20));
    // Nothing is promised to it or being written. But memory that it has open must not be freed.
    if (stopped) peer.stop();
    pool->close();
    pool.reset();
    CHECK(RetainedMemory::count() == (stopped ? 1 : 0));
    CHECK((cuda.count("bytes") > 0) == stopped);
    if (stopped) {
      peer.kill_and_wait();
      CHECK(soon([&] { return RetainedMemory::count() == 0; }));
    } else {
      peer.go();
      CHECK(peer.wait() == 0);
    }
    CHECK(cuda.left() == "");
  }
}

TEST_CASE("a transfer to a GPU of a process that is killed reports the lost peer and leaves its blocks unchanged") {
  if (!alone("a transfer to a GPU of a process that is killed reports the lost peer and leaves its blocks unchanged",
             {}, false)) {
    return;
  }
  if (!test::kChildMayStartThreads) return;
  for (const char* route : {"cuda_ipc", "sock"}) {
    CAPTURE(route);
    const std::string address = unix_address();
    PeerProcess receiver([&](auto&& wait) {
      const FakeCuda cuda;
      const auto pool = gpu_pool(1);
      PeerNode node(pool, make_ranks);
      node.start_service(named("receiver")).listen(address);
      wait();
      return 0;
    });
    const int status = test::run_in_child([&] {
      const FakeCuda cuda;
      const auto pool = gpu_pool(0);
      PeerNode node(pool, make_ranks);
      Service& service = node.start_service(named("main"));
      service.connect(address, real_seconds(20));
      const Addresses from = alloc_stamped(*pool, 4, 10);
      cuda.set("delay_us", 1'000'000);
      TransferRequest request;
      request.peer = "receiver";
      request.from = from;
      request.route = route;
      request.deadline_ns = real_seconds(60);
      const auto transfer = service.transfer(std::move(request));
      receiver.signal(SIGKILL);
      if (!transfer->wait(real_seconds(40))) return 1;
      if (code_of([&] { transfer->rethrow_if_failed(); }) != ErrorCode::kPeerLost) return 2;
      cuda.set("delay_us", 10);
      if (!are_stamped(*pool, from, 10)) return 3;
      free_all(*pool, from);
      return pool->audit().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kFree)] == 8 ? 0 : 4;
    });
    CHECK(status == 0);
    receiver.kill_and_wait();
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
