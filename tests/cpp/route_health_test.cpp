// Routes that fail: what they cost then, and which one serves instead.
#include "kvpool/routes/route_health.h"

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/routes/route_choice.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kStart = 1000 * kSecond;

// A write that begins at `began` fails with this, a millisecond later.
void fail(RouteHealth& health, ErrorCode code, std::int64_t began, const char* why = "broken") {
  health.failed(Error(code, why), began, began + 1'000'000);
}

// Until a route is no dearer than `times` its estimate.
std::int64_t time_until(const RouteHealth& health, std::int64_t now, double times) {
  std::int64_t waited = 0;
  while (health.factor(now + waited) > times) waited += kSecond / 100;
  return waited;
}

TEST_CASE("a route without failures costs the estimate") {
  RouteHealth health;
  CHECK(health.factor(kStart) == 1);
  CHECK(health.able());
  CHECK_FALSE(health.report());
  health.worked(kStart);
  CHECK(health.factor(kStart) == 1);
}

TEST_CASE("a failure raises a route's cost for a while") {
  RouteHealth health;
  fail(health, ErrorCode::kRouteFailed, kStart, "no way");
  CHECK(health.factor(kStart) > 1000);
  CHECK(health.able());
  REQUIRE(health.report());
  CHECK(health.report()->failures == 1);
  CHECK(health.report()->why == "no way");
  const std::int64_t once = time_until(health, kStart, 2);
  CHECK(once > kSecond);
  CHECK(once < 20 * kSecond);
  CHECK(health.factor(kStart + 1000 * kSecond) == doctest::Approx(1));
}

TEST_CASE("each further failure in a row fades half as fast, up to minutes") {
  RouteHealth health;
  std::int64_t now = kStart;
  std::int64_t before = 0;
  for (int i = 0; i < 12; ++i) {
    now += 10'000 * kSecond;
    fail(health, ErrorCode::kRouteFailed, now);
    const std::int64_t waited = time_until(health, now, 2);
    if (i > 0 && i < 7)
      CHECK(static_cast<double>(waited) == doctest::Approx(2.0 * static_cast<double>(before)).epsilon(0.02));
    if (i >= 7) CHECK(waited == before);
    before = waited;
  }
  CHECK(health.report()->failures == 12);
}

TEST_CASE("writes that fail together count as one failure") {
  RouteHealth once;
  RouteHealth together;
  fail(once, ErrorCode::kRouteFailed, kStart);
  for (int i = 0; i < 20; ++i) fail(together, ErrorCode::kRouteFailed, kStart);
  const std::int64_t later = kStart + kSecond;
  CHECK(together.factor(later) == doctest::Approx(once.factor(later)));
  CHECK(together.report()->failures == 20);
}

TEST_CASE("a successful write ends the penalty, unless it had begun before the failure") {
  RouteHealth health;
  fail(health, ErrorCode::kRouteFailed, kStart);
  health.worked(kStart - kSecond);
  CHECK(health.factor(kStart) > 1000);
  health.worked(kStart + kSecond);
  CHECK(health.factor(kStart + kSecond) == 1);
  CHECK_FALSE(health.report());
}

TEST_CASE("a route that cannot do a write stays ruled out, unless such a write succeeds") {
  RouteHealth health;
  fail(health, ErrorCode::kUnsupported, kStart);
  CHECK_FALSE(health.able());
  CHECK(health.factor(kStart + 100'000 * kSecond) > 1000);
  CHECK_FALSE(health.report()->able);
  health.worked(kStart + kSecond);
  CHECK(health.able());
  CHECK(health.factor(kStart + kSecond) == 1);
}

TEST_CASE("failures that the route did not cause change nothing") {
  RouteHealth health;
  for (std::size_t i = 0; i < kErrorCodes; ++i) {
    const auto code = static_cast<ErrorCode>(i);
    const bool own =
        code == ErrorCode::kRouteFailed || code == ErrorCode::kUnsupported || code == ErrorCode::kOutOfMemory;
    CHECK(is_the_routes_own(code) == own);
    if (!own) fail(health, code, kStart);
  }
  CHECK_FALSE(health.report());
  CHECK(health.factor(kStart) == 1);
}

TEST_CASE("threads may report failures and successes and read the cost at once") {
  RouteHealth health;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&health, t] {
      for (int i = 1; i < 2000; ++i) {
        const std::int64_t now = kStart + i * kSecond;
        if ((i + t) % 3 == 0) {
          fail(health, ErrorCode::kRouteFailed, now);
        } else {
          health.worked(now);
        }
        if (!(health.factor(now) >= 1)) std::abort();
        static_cast<void>(health.report());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  health.worked(kStart + 10'000 * kSecond);
  CHECK(health.factor(kStart + 10'000 * kSecond) == 1);
}

// ---- the choice

// Has the given cost, and fails on request.
class PricedRoute final : public Route {
 public:
  PricedRoute(const char* name, double us, bool suits = true) : name_(name), us_(us), suits_(suits) {}
  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override { return {}; }
  bool suits(const MediaSet&, const MediaSet&) const noexcept override { return suits_; }
  double estimate_us(const MediaSet&, const MediaSet&, const WriteSize&, std::int64_t) const noexcept override {
    return us_;
  }
  WriteOutcome write(const WriteRequest&) override {
    ++writes;
    if (fails_with) throw Error(*fails_with, std::string(name_) + " is broken");
    return {1, 1};
  }
  void close() noexcept override {}

  std::optional<ErrorCode> fails_with;
  int writes = 0;

 private:
  const char* const name_;
  const double us_;
  const bool suits_;
};

struct Routes {
  std::shared_ptr<PricedRoute> nccl = std::make_shared<PricedRoute>("nccl", 100);
  std::shared_ptr<PricedRoute> sock = std::make_shared<PricedRoute>("sock", 900);
  std::shared_ptr<PricedRoute> other = std::make_shared<PricedRoute>("other", 1, false);
  std::vector<std::shared_ptr<Route>> all{nccl, sock, other};

  std::string chosen(std::int64_t now, const std::string& name = "") const {
    return cheapest_route(all, name, {1, 1}, {true, false}, {true, false}, now)->name();
  }
};

TEST_CASE("after a failure another route serves, and the one that failed is tried again later") {
  Routes routes;
  CHECK(routes.chosen(kStart) == "nccl");
  fail(routes.nccl->health(), ErrorCode::kRouteFailed, kStart);
  CHECK(routes.chosen(kStart) == "sock");
  CHECK(routes.chosen(kStart + kSecond) == "sock");
  CHECK(routes.chosen(kStart + 20 * kSecond) == "nccl");
  CHECK(routes.chosen(kStart, "nccl") == "nccl");  // on request it is used
  // It fails again: longer than before.
  fail(routes.nccl->health(), ErrorCode::kRouteFailed, kStart + 20 * kSecond);
  std::int64_t again = 20 * kSecond;
  while (routes.chosen(kStart + again) == "sock") again += kSecond / 10;
  CHECK(again > 22 * kSecond);
  routes.nccl->health().worked(kStart + again);
  CHECK(routes.chosen(kStart + again) == "nccl");
}

TEST_CASE("a route that cannot reach a peer is chosen only when no other is left") {
  Routes routes;
  fail(routes.nccl->health(), ErrorCode::kUnsupported, kStart);
  CHECK(routes.chosen(kStart + 100'000 * kSecond) == "sock");
  fail(routes.sock->health(), ErrorCode::kUnsupported, kStart);
  CHECK(routes.chosen(kStart + 100'000 * kSecond) == "other");  // not made for it, but not broken
  routes.all = {routes.nccl};
  CHECK(routes.chosen(kStart) == "nccl");
}

TEST_CASE("a write reports its outcome to the route's health, and throws the route's error") {
  PricedRoute route("nccl", 1);
  route.fails_with = ErrorCode::kRouteFailed;
  CHECK(code_of([&] { write_by(route, {}); }) == ErrorCode::kRouteFailed);
  REQUIRE(route.health().report());
  CHECK(route.health().report()->why == "nccl is broken");
  for (const ErrorCode code : {ErrorCode::kPeerLost, ErrorCode::kDeadline, ErrorCode::kCancelled}) {
    route.fails_with = code;
    CHECK(code_of([&] { write_by(route, {}); }) == code);
  }
  CHECK(route.health().report()->failures == 1);
  route.fails_with.reset();
  CHECK(write_by(route, {}).calls == 1);
  CHECK_FALSE(route.health().report());
  CHECK(route.writes == 5);
}

TEST_CASE("an odd answer of the CUDA driver does not rule out a route for good; one that it cannot do it does") {
  struct Odd final : Route {
    const char* name() const noexcept override { return "odd"; }
    RouteTraits traits() const noexcept override { return {}; }
    double estimate_us(const MediaSet&, const MediaSet&, const WriteSize&, std::int64_t) const noexcept override {
      return 1;
    }
    WriteOutcome write(const WriteRequest&) override { throw Error(why); }
    void close() noexcept override {}
    Error why{ErrorCode::kUnsupported, "by its own word"};
  };
  for (const int result : {1, 304, 999}) {  // an argument, the operating system, unknown
    CAPTURE(result);
    Odd route;
    route.why = Error(ErrorCode::kUnsupported, "odd", {{"driver_code", result}}).because(ErrorCause::kMayPass);
    const auto error = error_of([&] { write_by(route, {}); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kRouteFailed);
    CHECK(error->fields() == route.why.fields());
    CHECK(route.health().able());
    REQUIRE(route.health().report());
    CHECK(route.health().report()->why == "odd");
  }
  for (const int result : {217, 801}) {
    CAPTURE(result);
    Odd route;
    route.why = Error(ErrorCode::kUnsupported, "never", {{"driver_code", result}});
    CHECK(code_of([&] { write_by(route, {}); }) == ErrorCode::kUnsupported);
    CHECK_FALSE(route.health().able());
  }
  Odd route;
  CHECK(code_of([&] { write_by(route, {}); }) == ErrorCode::kUnsupported);
  CHECK_FALSE(route.health().able());
}

TEST_CASE("a route that learns which media it cannot reach keeps its cost for the others") {
  class Learning final : public Route {
   public:
    const char* name() const noexcept override { return "learning"; }
    RouteTraits traits() const noexcept override { return {}; }
    bool reaches(Medium medium) const noexcept override { return medium == Medium::kHbm || !refused_; }
    double estimate_us(const MediaSet&, const MediaSet&, const WriteSize&, std::int64_t) const noexcept override {
      return 1;
    }
    WriteOutcome write(const WriteRequest&) override {
      refused_ = true;
      throw Error(ErrorCode::kUnsupported, "that memory cannot be mapped");
    }
    void close() noexcept override {}

   private:
    bool refused_ = false;
  };
  Learning route;
  const Address to = make_address(1, Medium::kDram, 0, 0);
  WriteRequest request;
  request.from = request.to = {&to, 1};
  CHECK(code_of([&] { write_by(route, request); }) == ErrorCode::kUnsupported);
  CHECK(route.health().able());
  CHECK_FALSE(route.health().report());
}

}  // namespace
}  // namespace kvpool::testing
