// A pool has one set of threads: swaps, copies and its service work on the same executor.
#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "joined_service.h"
#include "kvpool/exec/executor.h"
#include "pool_fixture.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

PoolOptions large_blocks() {
  PoolOptions options = small_options(8, 8);
  options.layout.piece_bytes = {std::size_t{1} << 20};
  return options;
}

TEST_CASE("swaps and copies run on the threads of the pool, which end when it is closed") {
  const auto pool = std::make_shared<Pool>(large_blocks());
  CHECK(pool->executor().threads() == 0);
  insert(pool, prompt(1, 4), alloc(*pool, 4));
  pool->swap_out(2);  // in this thread and one that it borrows
  CHECK(pool->executor().threads() >= 1);
  CHECK_FALSE(end_of(*pool->begin_swap_out(2)));
  CHECK(pool->executor().threads() >= 2);
  CHECK(pool->executor().threads() <= pool->executor().threads_max());
  pool->close();
  CHECK(pool->executor().threads() == 0);
}

TEST_CASE("a service works on its pool's threads, and so does another service of that pool") {
  ServiceNode peer("peer");
  const auto pool = std::make_shared<Pool>(large_blocks());
  PeerNode node(pool, make_ranks);
  const int before = pool->executor().threads_max();
  ServiceOptions options = peer.service().options();
  options.name = "node";
  for (int i = 0; i < 2; ++i) {
    node.start_service(options);
    CHECK(pool->executor().threads_max() > before);
    node.drop_service();
    CHECK_FALSE(end_of(*pool->begin_swap_out(0)));  // the others' tasks go on
  }
  node.close();
  CHECK(pool->executor().threads() == 0);
}

TEST_CASE("a task that throws fails its pool") {
  const auto pool = std::make_shared<Pool>(small_options(4, 0));
  TaskClass tasks(pool->executor(), {1, 1});
  tasks.run(Priority::kPrefill, [] { throw std::runtime_error("a flaw"); });
  tasks.stop();
  Addresses one(1);
  CHECK(code_of([&] { pool->try_alloc(1, Medium::kHbm, one.data()); }) == ErrorCode::kState);
}

}  // namespace
}  // namespace kvpool::testing
