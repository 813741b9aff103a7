// How long one peer waits while content for another occupies the threads of a service. A write that stands still is one
// that follows work of a (fake) GPU which the test lets end.
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device_kit.h"
#include "joined_service.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/order.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kBlocks = 16;  // of a pool, in each medium
constexpr std::size_t kWrites = 3;     // more than there are threads

bool in_a_while(const std::function<bool()>& holds) {
  const std::int64_t until = real_seconds(60);
  while (!holds() && monotonic_ns() < until) usleep(1000);
  return holds();
}

// A pool that is full of prompts, and two peers; content for the first of them stands still, in all threads.
struct HeldUp {
  HeldUp() {
    first.meet(owner);
    second.meet(owner);
    const Addresses from = alloc_stamped(*owner.pool(), kWrites, 10);
    insert(owner.pool(), prompt(1, kBlocks - kWrites), alloc(*owner.pool(), kBlocks - kWrites));
    const auto order = DeviceOrder::after(CudaContext::retain(0, "a test's order"), engine.handle());
    for (std::size_t i = 0; i < kWrites; ++i) {
      TransferRequest request;
      request.peer = first.name();
      request.from = {from[i]};
      request.after = order;
      request.deadline_ns = real_seconds(100);
      sent.push_back(owner.service().transfer(std::move(request)));
    }
    // All have been given to threads, and these look whether they may begin.
    REQUIRE(in_a_while([&] { return first.count(BlockState::kReserved) == kWrites; }));
    REQUIRE(in_a_while([&] { return cuda.count("cuEventQuery") > 50; }));
  }
  ~HeldUp() {
    gate.open();
    for (const auto& transfer : sent) CHECK(transfer->wait(real_seconds(60)));
  }
  HeldUp(const HeldUp&) = delete;
  HeldUp& operator=(const HeldUp&) = delete;

  FakeCuda cuda;
  EngineStream engine{cuda};
  Gate gate{engine};
  ServiceNode first{"first", {"shm"}};
  ServiceNode second{"second", {"shm"}};
  ServiceNode owner{"owner", {"shm"}};
  std::vector<std::shared_ptr<Transfer>> sent;
};

TEST_CASE("blocks are evicted for a peer while another peer's content occupies all writing threads") {
  HeldUp held;
  Addresses lent;
  CHECK_NOTHROW(lent = held.second.service().alloc("owner", 2, Medium::kHbm, /*may_evict=*/true, real_seconds(20)));
  CHECK(lent.size() == 2);
  CHECK(held.owner.pool()->stats().counters.swapped_out_blocks > 0);  // not by free blocks
  for (const auto& transfer : held.sent) CHECK_FALSE(transfer->done());
}

TEST_CASE("a peer's transfer gets blocks and is verified while another peer's content occupies all writing threads") {
  HeldUp held;
  ServiceNode& sender = held.second;
  TransferRequest request;
  request.peer = "owner";
  request.from = alloc_stamped(*sender.pool(), 2, 50);
  request.private_bytes = Bytes(1);
  request.checksum = true;
  request.deadline_ns = real_seconds(20);
  const auto transfer = sender.service().transfer(std::move(request));
  CHECK(transfer->wait(real_seconds(30)));
  CHECK_NOTHROW(transfer->rethrow_if_failed());
  const auto item = held.owner.service().receive(real_seconds(20));
  REQUIRE(item != nullptr);
  CHECK(are_stamped(*held.owner.pool(), item->addresses, 50));
  for (const auto& one : held.sent) CHECK_FALSE(one->done());
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
