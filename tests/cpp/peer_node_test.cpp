// A pool and its service as one node: in which order they end, and blocks of both in one list.
#include "kvpool/peers/peer_node.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

// The state that the service's part of a node found when it was closed.
struct Noted {
  int closed = 0;
  int stopped = 0;
  bool memory_there = false;
};

// The ranks of an instance of one rank, which note when they are closed.
class NotingRanks final : public InstanceRanks {
 public:
  NotingRanks(const RanksHost& host, Noted& noted) : pool_(host.pool), noted_(noted), ranks_(make_ranks(host)) {}
  void introduce(PeerMetadata& metadata) const override { ranks_->introduce(metadata); }
  void check_complete() const override { ranks_->check_complete(); }
  std::shared_ptr<GroupConnection> plan(const PeerMetadata& peer) override { return ranks_->plan(peer); }
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) override {
    return ranks_->admit(link, metadata);
  }
  void refuse(const std::shared_ptr<Link>& link, std::uint64_t meeting, const Error& why) override {
    ranks_->refuse(link, meeting, why);
  }
  std::vector<RankInfo> list() const override { return ranks_->list(); }
  bool wait_until_joined(std::int64_t deadline_ns) override { return ranks_->wait_until_joined(deadline_ns); }
  void close() noexcept override {
    ++noted_.closed;
    noted_.memory_there = pool_.arena(Medium::kHbm) != nullptr;
    ranks_->close();
  }
  void stop() noexcept override {
    ++noted_.stopped;
    ranks_->stop();
  }

 private:
  Pool& pool_;
  Noted& noted_;
  const std::unique_ptr<InstanceRanks> ranks_;
};

MakeRanks noting(Noted& noted) {
  return [&noted](const RanksHost& host) { return std::make_unique<NotingRanks>(host, noted); };
}

ServiceOptions options_of(const std::string& name) {
  ServiceOptions options;
  options.name = name;
  options.secret = "s3cret";
  return options;
}

TEST_CASE("the service of a node ends before its pool frees its memory, whichever of them is closed first") {
  for (const bool by_pool : {false, true}) {
    CAPTURE(by_pool);
    Noted noted;
    const auto pool = std::make_shared<Pool>(small_options(16, 16));
    PeerNode node(pool, noting(noted));
    Service& service = node.start_service(options_of("a"));
    Node peer = make_node("b");
    service.connect(peer.service.listen(unix_address()), in_seconds(10));
    REQUIRE(peer.service.peers().size() == 1);
    const std::weak_ptr<Arena> memory = pool->arena(Medium::kHbm);
    by_pool ? pool->close() : node.close();
    CHECK(noted.closed == 1);
    CHECK(noted.stopped == 1);
    CHECK(noted.memory_there);
    CHECK(soon([&] { return memory.expired(); }));  // the peer has it open until it learns of the end
    CHECK(soon([&] { return peer.service.peers().empty(); }));
    CHECK(code_of([&] { service.receive(0); }) == ErrorCode::kClosed);
    node.close();
    pool->close();
    CHECK(noted.closed == 1);
    CHECK(code_of([&] { node.prepare_service(options_of("c")); }) == ErrorCode::kClosed);
  }
}

TEST_CASE("a pool that outlives its node goes on without peers") {
  Noted noted;
  const auto pool = std::make_shared<Pool>(small_options(16, 16));
  Node peer = make_node("b");
  {
    PeerNode node(pool, noting(noted));
    node.start_service(options_of("a")).connect(peer.service.listen(unix_address()), in_seconds(10));
  }
  CHECK(noted.closed == 1);
  CHECK(soon([&] { return peer.service.peers().empty(); }));
  const Addresses own = alloc(*pool, 4);
  CHECK_NOTHROW(pool->free(own.data(), own.size()));
  CHECK_NOTHROW(pool->close());
}

TEST_CASE("verbs see a service once it is published, and another may follow a dropped one") {
  Noted noted;
  const auto pool = std::make_shared<Pool>(small_options(16, 16));
  PeerNode node(pool, noting(noted));
  CHECK(code_of([&] { node.publish_service(); }) == ErrorCode::kState);
  Service& first = node.prepare_service(options_of("a"));
  CHECK(node.service() == nullptr);
  CHECK(node.prepared_service() == &first);
  CHECK(code_of([&] { node.prepare_service(options_of("a")); }) == ErrorCode::kState);
  node.drop_service();  // that was never published
  CHECK(node.prepared_service() == nullptr);
  CHECK(noted.closed == 1);
  node.drop_service();
  CHECK(noted.closed == 1);

  Service& second = node.start_service(options_of("a"));
  CHECK(node.service() == &second);
  node.drop_service();
  CHECK(node.service() == nullptr);
  CHECK(noted.closed == 2);
  CHECK(code_of([&] { second.receive(0); }) == ErrorCode::kClosed);  // a verb that is in it may end

  Service& third = node.start_service(options_of("a"));
  Node peer = make_node("b");
  CHECK(third.connect(peer.service.listen(unix_address()), in_seconds(10)) == "b");
}

TEST_CASE("threads that wait for items get the error with which the pool fails") {
  Node node = make_node("a");
  node.pool->fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  std::string text;
  CHECK(code_of([&] { node.service.receive(in_seconds(10)); }, &text) == ErrorCode::kDeviceLost);
  CHECK(text == "the GPU is gone");
}

TEST_CASE("own and borrowed blocks are freed by one call, in whatever order they are named") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen(unix_address()), in_seconds(10));
  const Addresses own = alloc(*a.pool, 2);
  const Addresses lent = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(10));
  const Addresses mixed = {lent[1], own[0], lent[0], own[1]};
  a.node->free(mixed.data(), mixed.size());
  CHECK(blocks_in(*a.pool, BlockState::kActive) == 0);
  CHECK(blocks_in(*b.pool, BlockState::kLent) == 0);
  CHECK(code_of([&] { a.node->free(mixed.data(), mixed.size()); }).has_value());
}

TEST_CASE("one wrong address frees neither own nor borrowed blocks") {
  Node a = make_node("a");
  Node b = make_node("b");
  a.service.connect(b.service.listen(unix_address()), in_seconds(10));
  const Addresses own = alloc(*a.pool, 2);
  const Addresses lent = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(10));
  for (const Address wrong : {lent[0] ^ (Address{8} << kGenerationShift), own[0] ^ (Address{8} << kGenerationShift)}) {
    const Addresses mixed = {own[0], lent[0], wrong, own[1], lent[1]};
    CHECK(code_of([&] { a.node->free(mixed.data(), mixed.size()); }) == ErrorCode::kStaleAddress);
    CHECK(blocks_in(*a.pool, BlockState::kActive) == 2);
    CHECK(blocks_in(*b.pool, BlockState::kLent) == 2);
  }
}

TEST_CASE("own blocks are freed even if the peer that had lent the others is gone") {
  Node a = make_node("a");
  const Addresses own = alloc(*a.pool, 2);
  Addresses mixed = own;
  {
    Node b = make_node("b");
    a.service.connect(b.service.listen(unix_address()), in_seconds(10));
    const Addresses lent = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(10));
    mixed.insert(mixed.begin(), lent.begin(), lent.end());
  }
  REQUIRE(soon([&] { return a.service.peers().empty(); }));
  a.node->free(mixed.data(), mixed.size());
  CHECK(blocks_in(*a.pool, BlockState::kActive) == 0);
}

TEST_CASE("without a service, a block of another instance is an error of the pool") {
  const auto pool = std::make_shared<Pool>(small_options(16, 16));
  PeerNode node(pool, make_ranks);
  const Addresses own = alloc(*pool, 2);
  pool->set_instance(5);
  const Addresses mixed = {own[0], make_address(9, Medium::kHbm, 1, 0)};
  CHECK(code_of([&] { node.free(mixed.data(), mixed.size()); }) == ErrorCode::kNotOwner);
  CHECK_NOTHROW(node.free(own.data(), own.size()));
}

}  // namespace
}  // namespace kvpool::testing
