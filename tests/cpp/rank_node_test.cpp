// A rank of a logical instance beside its scheduler, in one process: what it keeps of its GPU, and what a scheduler
// that cannot be made keeps of its pool.
#include "kvpool/ranks/rank_node.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "device_kit.h"
#include "failing_alloc.h"
#include "joined_service.h"
#include "pool_fixture.h"

namespace kvpool::testing {
namespace {

PoolOptions sharded_options() {
  PoolOptions options = small_options(8, 8);
  options.sharding = Sharding({1, 1, 4, DType::kFloat32, kPage}, {});
  return options;
}

ServiceOptions named_scheduler() {
  ServiceOptions service;
  service.name = "scheduler";
  service.secret = "s3cret";
  return service;
}

TEST_CASE("a scheduler that has no memory for its service leaves no part of it with the pool") {
  int threw = 0;
  bool more = true;
  for (std::uint64_t n = 1; more; ++n) {
    const auto pool = std::make_shared<Pool>(sharded_options());
    insert(pool, prompt(1, 1), alloc(*pool, 1, Medium::kHbm));
    PeerNode node(pool, make_ranks);
    const ServiceOptions service = named_scheduler();
    bool made = false;
    {
      const FailNthAllocation failure(n);
      try {
        node.start_service(service);
        made = true;
      } catch (const std::exception&) {  // std::bad_alloc, or an error that says so
      }
      more = failure.failed_one();
    }
    if (made) continue;
    ++threw;
    CHECK(code_of([&] { pool->swap_out(1); }) == ErrorCode::kBusy);  // from the pool: the service would say what joined
  }
  CHECK(threw > 0);
}

#ifdef KVPOOL_FAKE_CUDA

TEST_CASE("a closed rank keeps no memory of its GPU, even while the object is referenced") {
  const FakeCuda cuda;
  const PoolOptions sharded = sharded_options();
  PeerNode scheduler(std::make_shared<Pool>(sharded), make_ranks);
  Service& started = scheduler.start_service(named_scheduler());
  RankOptions options;
  options.service.name = "rank";
  options.service.secret = "s3cret";
  options.service.routes = {"loopback", "cuda_ipc", "sock"};
  options.scheduler = started.listen(unix_address());
  options.scheduler_incarnation = started.incarnation();
  options.instance = 1;
  std::unique_ptr<RankNode> rank;
  {
    PoolOptions own = small_options(8, 8);
    own.layout = sharded.sharding->rank_layout(0, /*aggregated=*/true);
    own.device = 0;
    own.pin_dram = true;
    const auto memory = std::make_shared<Pool>(own);
    rank = RankNode::join(options, {own.layout, memory->arenas()}, {real_seconds(20), {}});
  }
  REQUIRE(started.wait_for_ranks(real_seconds(20)));
  CHECK(cuda.left() != "");
  rank->close();
  CHECK(cuda.left() == "");
  CHECK(rank->lost()->code() == ErrorCode::kClosed);
}

#endif  // KVPOOL_FAKE_CUDA

}  // namespace
}  // namespace kvpool::testing
