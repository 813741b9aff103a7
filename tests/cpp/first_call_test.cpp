// The first listen or connect of a pool, which may fail.
#include <doctest/doctest.h>

#include "endpoint_fixture.h"
#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

ServiceOptions with_secret(const std::string& secret) {
  ServiceOptions options;
  options.name = "caller";
  options.secret = secret;
  return options;
}

std::shared_ptr<PeerNode> fresh_node() {
  return std::make_shared<PeerNode>(std::make_shared<Pool>(small_options(8, 8)), make_ranks);
}

TEST_CASE("a service that was prepared for a failed call leaves no trace, and another takes its place") {
  const Node other = make_node("other");
  const std::string at = other.service.listen("tcp:127.0.0.1:0");
  const auto node = fresh_node();
  CHECK(code_of([&] { node->publish_service(); }) == ErrorCode::kState);
  const int before = open_descriptors();
  for (int round = 0; round < 3; ++round) {
    Service& prepared = node->prepare_service(with_secret("wrong"));
    CHECK(node->prepared_service() == &prepared);
    CHECK(node->service() == nullptr);  // no verb sees it
    CHECK(code_of([&] { node->prepare_service(with_secret("s3cret")); }) == ErrorCode::kState);
    CHECK(code_of([&] { prepared.connect(at, in_seconds(60)); }) == ErrorCode::kAuth);
    node->drop_service();
    CHECK(node->prepared_service() == nullptr);
    CHECK(node->pool().instance() == 0);
  }
  CHECK(soon([&] { return open_descriptors() <= before; }));
  Service& right = node->prepare_service(with_secret("s3cret"));
  CHECK(right.connect(at, in_seconds(60)) == "other");
  node->publish_service();
  CHECK(node->service() == &right);
  CHECK(node->pool().instance() != 0);
}

bool has_no_id(Pool& pool) {
  const Addresses own = alloc(pool, 1);
  pool.free(own.data(), own.size());
  return instance_of(own[0]) == 0;
}

TEST_CASE("a first connect that fails after the peer has admitted it leaves the pool without an instance id") {
  const Node other = make_node("other");
  const std::string at = other.service.listen(unix_address());
  const auto node = fresh_node();
  Pool& pool = node->pool();
  const Addresses before = alloc(pool, 1);
  Service& prepared = node->prepare_service(with_secret("s3cret"));
  CHECK(prepared.connect(at, in_seconds(60)) == "other");
  // The peer may use the pool at once, and gets addresses with the id.
  const std::uint32_t proposed = pool.instance();
  CHECK(proposed != 0);
  const Addresses lent = other.service.alloc("caller", 1, Medium::kHbm, true, in_seconds(60));
  CHECK(instance_of(lent[0]) == proposed);
  TransferRequest insertion = request_to({node, nullptr, prepared, "caller"}, alloc(*other.pool, 1));
  insertion.insert = true;
  insertion.tokens = prompt(1, 1);
  const auto sent = other.service.transfer(std::move(insertion));
  finish(sent);
  CHECK(instance_of(sent->addresses()[0]) == proposed);
  // The application does not see it.
  CHECK(has_no_id(pool));
  Found found = match(pool.shared_from_this(), prompt(1, 1));
  REQUIRE(found.hit.pages == 1);
  CHECK(instance_of(found.addresses[0]) == 0);

  node->drop_service();  // as after Ctrl-C in connect()
  CHECK(pool.instance() == 0);
  CHECK(soon([&] { return other.service.peers().empty(); }));
  CHECK(has_no_id(pool));
  found.pins = Pins();
  CHECK_NOTHROW(pool.audit());
  pool.free(before.data(), before.size());
  // So the pool may still join a cluster, which gives it an id.
  pool.set_instance(proposed == 7 ? 8 : 7);
  CHECK_FALSE(has_no_id(pool));
}

// Such an item has blocks that no caller knows: they stayed active for good.
TEST_CASE("a first connect that is given up after a delivery frees the blocks of the delivery") {
  const Node other = make_node("other");
  const auto node = fresh_node();
  Pool& pool = node->pool();
  const auto active = [&] {
    return pool.audit().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kActive)];
  };
  Service& prepared = node->prepare_service(with_secret("s3cret"));
  CHECK(prepared.connect(other.service.listen(unix_address()), in_seconds(60)) == "other");
  TransferRequest request = request_to({node, nullptr, prepared, "caller"}, alloc(*other.pool, 3));
  request.private_bytes = Bytes(1);
  finish(other.service.transfer(std::move(request)));
  CHECK(soon([&] { return active() == 3; }));
  node->drop_service();  // as after Ctrl-C in connect()
  CHECK(active() == 0);
  CHECK(alloc(pool, 8).size() == 8);
}

TEST_CASE("a first connect that succeeds puts the instance id into the addresses of the pool") {
  const Node other = make_node("other");
  const auto node = fresh_node();
  Pool& pool = node->pool();
  const Addresses before = alloc(pool, 1);
  Service& prepared = node->prepare_service(with_secret("s3cret"));
  CHECK(prepared.connect(other.service.listen(unix_address()), in_seconds(60)) == "other");
  const std::uint32_t proposed = pool.instance();
  node->publish_service();
  CHECK(pool.instance() == proposed);
  CHECK(instance_of(alloc(pool, 1)[0]) == proposed);
  CHECK_NOTHROW(pool.free(before.data(), before.size()));
  node->drop_service();
  CHECK(pool.instance() == proposed);  // the application has seen it
}

TEST_CASE("a listen that fails does not fix the pool's instance id") {
  const Node other = make_node("other");
  const std::string taken = other.service.listen(fresh_name("unix:@"));
  const auto node = fresh_node();
  Service& service = node->start_service(with_secret("s3cret"));
  CHECK(code_of([&] { service.listen(taken); }) == ErrorCode::kState);
  CHECK(node->pool().instance() == 0);
  service.listen(fresh_name("unix:@"));
  CHECK(node->pool().instance() != 0);
}

}  // namespace
}  // namespace kvpool::testing
