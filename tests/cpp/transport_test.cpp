// Transports that the tests make up: routes are made from the given list of transports, and none is known by name.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/peers/route_maker.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr Medium kMappedMedium = Medium::kDram;

// What the made-up transports are to do, and what was asked of them.
struct Script {
  std::string fails_to_start;    // if not empty, with this text
  std::string fails_to_connect;  // likewise
  bool fences = true;
  int file = -1;  // with which a peer can map DRAM
  std::vector<std::string> calls;
  std::vector<Grant*> granted;
};

Script& script() {
  static Script one;
  return one;
}

bool was_called(const std::string& call) { return std::ranges::find(script().calls, call) != script().calls.end(); }

struct ScriptGrant final : Grant {
  bool fence() noexcept override {
    script().calls.emplace_back("fence");
    return script().fences;
  }
};

class CarrierPigeons final : public Transport {
 public:
  std::shared_ptr<Grant> offer(const LocalMemory&, Offer& offer) override {
    script().calls.emplace_back("offer");
    offer.files[kMappedMedium] = script().file;
    auto grant = std::make_shared<ScriptGrant>();
    script().granted.push_back(grant.get());
    return grant;
  }
  void connect(const LocalMemory&, const PeerEnd& peer, Grant* grant, Routes& routes) override {
    script().calls.push_back("connect " + peer.metadata.name);
    CHECK(grant == script().granted.back());
    if (!script().fails_to_connect.empty()) throw Error(ErrorCode::kUnsupported, script().fails_to_connect);
    routes.push_back(std::make_shared<ScriptRoute>(/*one_sided=*/true));
  }
  Exposure exposure(const PeerEnd&) const override { return {.by_process = true, .until_fence = true}; }
  void let_go() noexcept override { script().calls.emplace_back("let go"); }
};

// Offers nothing, and has no way to anybody.
class Tunnels final : public Transport {
 public:
  void connect(const LocalMemory&, const PeerEnd&, Grant* grant, Routes&) override { CHECK(grant == nullptr); }
  Exposure exposure(const PeerEnd&) const override { return {.by_gpu = true}; }
};

std::unique_ptr<Transport> make_pigeons(const TransportSetup& setup) {
  CHECK(setup.incarnation == 21);
  if (!script().fails_to_start.empty()) throw Error(ErrorCode::kUnsupported, script().fails_to_start);
  return std::make_unique<CarrierPigeons>();
}
std::unique_ptr<Transport> make_tunnels(const TransportSetup&) { return std::make_unique<Tunnels>(); }
std::unique_ptr<Transport> make_unlucky(const TransportSetup&) {
  throw Error(ErrorCode::kUnsupported, "it has no luck");
}

constexpr TransportKind kPigeons{"pigeons", true, make_pigeons};
constexpr TransportKind kTunnels{"tunnels", true, make_tunnels};
constexpr TransportKind kUnluckyByDefault{"unlucky", true, make_unlucky};
constexpr TransportKind kPigeonsByName{"pigeons", false, make_pigeons};

class TransportTest {
 public:
  TransportTest() { script() = {}; }

 protected:
  RouteMaker make(std::vector<TransportKind> kinds, std::vector<std::string> names = {}) {
    kinds_ = std::move(kinds);
    ServiceOptions options;
    options.routes = std::move(names);
    return RouteMaker(options, LocalMemory{kit_.pool->layout(), kit_.pool->arenas()}, 21, executor_, {}, kinds_);
  }
  PeerMetadata peer(std::vector<std::string> routes) const {
    PeerMetadata peer;
    peer.name = "the peer";
    peer.routes = std::move(routes);
    return peer;
  }

  SessionKit kit_;
  Executor executor_;
  std::vector<TransportKind> kinds_;
  const std::shared_ptr<ScriptLink> link_ = std::make_shared<ScriptLink>();
};

TEST_CASE_FIXTURE(TransportTest, "a pool goes by transports that it knows from a list alone") {
  const RouteMaker routes = make({kTunnels, kPigeons});
  script().file = 5;
  Introduction own = routes.introduce();
  CHECK(own.metadata.routes == std::vector<std::string>{"tunnels", "pigeons"});
  CHECK(own.descriptors == std::vector<int>{5});
  CHECK(own.metadata.media[kMappedMedium].mapped_bytes == kit_.pool->arena(Medium::kDram)->mapped_bytes());
  CHECK(own.metadata.media[Medium::kHbm].mapped_bytes == 0);
  link_->attached = own.attachment;

  const auto made = routes.make(peer({"pigeons", "tunnels"}), link_);
  REQUIRE(made.size() == 1);
  CHECK(std::string(made[0]->name()) == "script");
  CHECK(was_called("connect the peer"));
}

TEST_CASE_FIXTURE(TransportTest, "a transport that one side alone names takes no part") {
  const RouteMaker routes = make({kTunnels, kPigeons});
  link_->attached = routes.introduce().attachment;
  const PeerMetadata other = peer({"tunnels", "balloons"});
  CHECK(code_of([&] { routes.make(other, link_); }) == ErrorCode::kUnsupported);
  CHECK_FALSE(was_called("connect the peer"));
  CHECK_FALSE(routes.exposure(other, link_).until_fence);
  CHECK(routes.exposure(other, link_).by_gpu);
}

TEST_CASE_FIXTURE(TransportTest, "what a peer can write is what all transports expose together") {
  const RouteMaker routes = make({kTunnels, kPigeons});
  const Exposure both = routes.exposure(peer({"pigeons", "tunnels"}), link_);
  CHECK(both.by_process);
  CHECK(both.by_gpu);
  CHECK(both.until_fence);
  CHECK_FALSE(both.by_address);
  CHECK_FALSE(both.by_handle);
  CHECK_FALSE(routes.exposure(peer({}), link_).any());
}

TEST_CASE_FIXTURE(TransportTest, "a link is fenced when every grant is, also after the transports are gone") {
  {
    RouteMaker routes = make({kTunnels, kPigeons});
    link_->attached = routes.introduce().attachment;
    routes.let_go();
    CHECK(was_called("let go"));
  }
  script().fences = false;
  CHECK_FALSE(RouteMaker::fence(*link_));
  script().fences = true;
  CHECK(RouteMaker::fence(*link_));
  link_->attached = nullptr;
  CHECK(RouteMaker::fence(*link_));
}

TEST_CASE_FIXTURE(TransportTest, "a transport used by default that cannot be had is left out, with a note") {
  const RouteMaker routes = make({kUnluckyByDefault, kPigeons});
  CHECK(routes.introduce().metadata.routes == std::vector<std::string>{"pigeons"});
  CHECK(routes.notes() == std::vector<std::string>{"the route unlucky is left out: it has no luck"});
  // Unless there is no other.
  CHECK(text_of([&] { make({kUnluckyByDefault, kPigeons}, {"unlucky"}); }) == "it has no luck");
}

TEST_CASE_FIXTURE(TransportTest, "a named transport fails with its own cause, even if others were left out before") {
  script().fails_to_start = "there is no bird";
  CHECK(text_of([&] { make({kUnluckyByDefault, kTunnels, kPigeonsByName}, {"unlucky", "tunnels", "pigeons"}); }) ==
        "there is no bird");
  CHECK_NOTHROW(make({kUnluckyByDefault, kTunnels, kPigeonsByName}));
}

TEST_CASE_FIXTURE(TransportTest, "peers that find no way hear why of each transport that has tried") {
  const RouteMaker routes = make({kTunnels, kPigeons});
  link_->attached = routes.introduce().attachment;
  script().fails_to_connect = "it rains";
  CHECK(text_of([&] { routes.make(peer({"pigeons", "tunnels"}), link_); }) ==
        "there is no way to write into the memory of peer the peer: pigeons: it rains");
}

TEST_CASE_FIXTURE(TransportTest, "a name that is not in the list is refused with those that are") {
  CHECK(text_of([&] { make({kTunnels, kPigeons}, {"pigeons", "balloons"}); }) ==
        "there is no route 'balloons'; routes are tunnels, pigeons");
}

}  // namespace
}  // namespace kvpool::testing
