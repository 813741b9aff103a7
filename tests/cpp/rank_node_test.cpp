// A rank of a logical instance beside its scheduler, in one process: what it keeps of its GPU.
#include "kvpool/ranks/rank_node.h"

#include <doctest/doctest.h>

#include <memory>
#include <utility>

#include "device_kit.h"
#include "joined_service.h"
#include "pool_fixture.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

TEST_CASE("a rank that is closed keeps nothing of its GPU, though somebody holds on to it") {
  const FakeCuda cuda;
  PoolOptions sharded = small_options(8, 8);
  sharded.sharding = Sharding({1, 1, 4, DType::kFloat32, kPage}, {});
  PeerNode scheduler(std::make_shared<Pool>(sharded), make_ranks);
  ServiceOptions service;
  service.name = "scheduler";
  service.secret = "s3cret";
  Service& started = scheduler.start_service(service);
  RankOptions options;
  options.service.name = "rank";
  options.service.secret = "s3cret";
  options.service.routes = {"loopback", "cuda_ipc", "sock"};
  options.scheduler = started.listen(unix_address());
  options.scheduler_epoch = started.epoch();
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

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
