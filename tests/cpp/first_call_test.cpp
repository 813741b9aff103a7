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

TEST_CASE("a service that was prepared for a call which failed leaves no trace, and another takes its place") {
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
