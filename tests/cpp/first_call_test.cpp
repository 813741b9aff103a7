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

std::shared_ptr<Pool> fresh_pool() { return std::make_shared<Pool>(small_options(8, 8)); }

TEST_CASE("a service that was prepared for a call which failed leaves no trace, and another takes its place") {
  const Node other = make_node("other");
  const std::string at = other.service.listen("tcp:127.0.0.1:0");
  const auto pool = fresh_pool();
  CHECK(code_of([&] { pool->publish_service(); }) == ErrorCode::kState);
  const int before = open_descriptors();
  for (int round = 0; round < 3; ++round) {
    Service& prepared = pool->prepare_service(with_secret("wrong"));
    CHECK(pool->prepared_service() == &prepared);
    CHECK(pool->service() == nullptr);  // no verb sees it
    CHECK(code_of([&] { pool->prepare_service(with_secret("s3cret")); }) == ErrorCode::kState);
    CHECK(code_of([&] { prepared.connect(at, in_seconds(60)); }) == ErrorCode::kAuth);
    pool->drop_service();
    CHECK(pool->prepared_service() == nullptr);
    CHECK(pool->instance() == 0);
  }
  CHECK(soon([&] { return open_descriptors() <= before; }));
  Service& right = pool->prepare_service(with_secret("s3cret"));
  CHECK(right.connect(at, in_seconds(60)) == "other");
  pool->publish_service();
  CHECK(pool->service() == &right);
  CHECK(pool->instance() != 0);
}

TEST_CASE("a listen that fails does not fix the pool's instance id") {
  const Node other = make_node("other");
  const std::string taken = other.service.listen(fresh_name("unix:@"));
  const auto pool = fresh_pool();
  Service& service = pool->start_service(with_secret("s3cret"));
  CHECK(code_of([&] { service.listen(taken); }) == ErrorCode::kState);
  CHECK(pool->instance() == 0);
  service.listen(fresh_name("unix:@"));
  CHECK(pool->instance() != 0);
}

}  // namespace
}  // namespace kvpool::testing
