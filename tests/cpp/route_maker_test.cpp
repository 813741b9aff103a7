// The routes to a peer, by what the kernel says of its process.
#include "kvpool/peers/route_maker.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

struct Side {
  explicit Side(std::uint64_t incarnation) : kit(), routes(options(), memory_of(*kit.pool), incarnation, executor) {
    metadata = routes.introduce().metadata;
    metadata.incarnation = incarnation;
    metadata.name = "side " + std::to_string(incarnation);
  }
  static LocalMemory memory_of(Pool& pool) { return {pool.layout(), pool.arenas()}; }
  static ServiceOptions options() {
    ServiceOptions options;
    options.routes = {"loopback", "sock"};
    return options;
  }
  SessionKit kit;
  Executor executor;
  RouteMaker routes;
  PeerMetadata metadata;
};

std::vector<std::string> names(const std::vector<std::shared_ptr<Route>>& routes) {
  std::vector<std::string> names;
  for (const auto& route : routes) names.emplace_back(route->name());
  return names;
}

TEST_CASE("whether a pool belongs to this process is asked of the kernel, not of its metadata") {
  Side one(11);
  Side two(12);
  const auto link = std::make_shared<ScriptLink>();
  link->pid = getpid();
  CHECK(names(one.routes.make(two.metadata, link)) == std::vector<std::string>{"loopback", "sock"});
  CHECK(one.routes.exposure(two.metadata, link).by_process);
  // Over TCP the kernel does not tell; and a process that says that it is ours may be another.
  for (const std::int64_t pid : {0, getpid() + 1}) {
    link->pid = pid;
    CHECK(names(one.routes.make(two.metadata, link)) == std::vector<std::string>{"sock"});
    CHECK_FALSE(one.routes.exposure(two.metadata, link).by_process);
  }
}

TEST_CASE("a pool frees what it keeps for its peers once nothing refers to it") {
  Side one(13);
  Side two(14);
  const std::weak_ptr<Arena> arena = one.kit.pool->arena(Medium::kHbm);
  one.kit.pool->close();
  CHECK_FALSE(arena.expired());
  one.routes.let_go();
  one.kit.peer_blocks.let_go();
  CHECK(arena.expired());
  const auto link = std::make_shared<ScriptLink>();
  link->pid = getpid();
  CHECK(names(two.routes.make(one.metadata, link)) == std::vector<std::string>{"sock"});
  CHECK(code_of([&] { one.routes.introduce(); }) == ErrorCode::kClosed);
  CHECK(one.kit.peer_blocks.checksum(Addresses{make_address(0, Medium::kHbm, 1, 0)}) == 0);
}

}  // namespace
}  // namespace kvpool::testing
