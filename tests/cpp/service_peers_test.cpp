// Peers that come and go: in what order they connect, and what they leave.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "endpoint_fixture.h"
#include "kvpool/peers/retained_memory.h"
#include "kvpool/transfer/messages.h"
#include "service_kit.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

void check_connected(Node& a, Node& b) {
  CHECK(soon([&] { return a.service.peers().size() == 1 && b.service.peers().size() == 1; }));
  for (const auto& [from, to] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    const Addresses blocks = alloc(*from->pool, 1);
    finish(from->service.transfer(request_to(*to, blocks)));
    from->pool->free(blocks.data(), blocks.size());
    const auto item = to->service.receive(in_seconds(60));
    REQUIRE(item != nullptr);
    to->pool->free(item->addresses.data(), item->addresses.size());
  }
}

TEST_CASE("when both sides connect at once, each learns the other's name and one connection stays") {
  constexpr int kRounds = 40;
  constexpr int kCallers = 3;  // of each side
  for (int round = 0; round < kRounds; ++round) {
    Node a = make_node("a", {"shm"});
    Node b = make_node("b", {"shm"});
    const std::string where_a = a.service.listen(round % 4 == 0 ? "tcp:127.0.0.1:0" : unix_address());
    const std::string where_b = b.service.listen(unix_address());
    std::barrier start(2 * kCallers);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 2 * kCallers; ++i) {
      callers.emplace_back([&, i] {
        Node& self = i % 2 == 0 ? a : b;
        start.arrive_and_wait();
        const auto error = error_of([&] {
          const std::string name = self.service.connect(i % 2 == 0 ? where_b : where_a, in_seconds(10));
          if (name != (i % 2 == 0 ? "b" : "a")) ++wrong;
          // And it is there, to stay: neither of the two connections is about to be dropped for the other.
          const Addresses lent = self.service.alloc(name, 1, Medium::kHbm, true, in_seconds(10));
          self.service.free(lent.data(), lent.size(), in_seconds(10));
        });
        if (error) {
          ++wrong;
          MESSAGE(self.name << ": " << std::string(error->what()));
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(wrong == 0);
    check_connected(a, b);
  }
}

TEST_CASE("connecting to a connected peer changes nothing, and returns its name") {
  Node a = make_node("a");
  Node b = make_node("b");
  const std::string where_a = a.service.listen(unix_address());
  const std::string where_b = b.service.listen(unix_address());
  CHECK(a.service.connect(where_b, in_seconds(60)) == "b");
  const Addresses lent = a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(60));
  for (int i = 0; i < 3; ++i) {
    CHECK(a.service.connect(where_b, in_seconds(60)) == "b");
    CHECK(b.service.connect(where_a, in_seconds(60)) == "a");
  }
  CHECK(blocks_in(*b.pool, BlockState::kLent) == 2);
  a.service.free(lent.data(), lent.size(), in_seconds(60));
  check_connected(a, b);
}

TEST_CASE("a connect waits for a listener, unless told not to") {
  Node a = make_node("a");
  Node b = make_node("b");
  const std::string where = unix_address();
  for (const std::string& nowhere :
       {where, std::string("tcp:127.0.0.1:1"), std::string("unix:/tmp/kvpool-nowhere/x")}) {
    const auto at_once = error_of([&] { a.service.connect(nowhere, in_seconds(60), /*wait_for_listener=*/false); });
    REQUIRE(at_once);
    CHECK(at_once->code() == ErrorCode::kPeerLost);
    const auto late = error_of([&] { a.service.connect(nowhere, in_seconds(0.1)); });
    REQUIRE(late);
    CHECK(late->code() == ErrorCode::kPeerLost);
    CHECK(std::string(late->what()).find("nobody listened at " + nowhere + " during ") == 0);
  }
  std::atomic<bool> calling{false};
  std::thread caller([&] {
    calling = true;
    CHECK(a.service.connect(where, in_seconds(30)) == "b");
  });
  CHECK(soon([&] { return calling.load(); }));
  usleep(20'000);
  b.service.listen(where);
  caller.join();
  check_connected(a, b);
}

TEST_CASE("errors that waiting cannot cure are thrown at once") {
  Node a = make_node("a", {}, 16, [](ServiceOptions& options) { options.secret = "another"; });
  Node b = make_node("b");
  const std::string where = b.service.listen(unix_address());
  CHECK(error_of([&] { a.service.connect(where, in_seconds(60)); })->code() == ErrorCode::kAuth);
  Node c = make_node("c", {}, 16, [](ServiceOptions& options) { options.model = "another"; });
  CHECK(error_of([&] { c.service.connect(where, in_seconds(60)); })->code() == ErrorCode::kLayoutMismatch);
}

TEST_CASE("a caller may give up at any point of its wait") {
  Node a = make_node("a");
  const auto given_up = [] { return true; };
  CHECK(error_of([&] { a.service.connect(unix_address(), {in_seconds(60), given_up}); })->code() ==
        ErrorCode::kCancelled);
  // A server that accepts the connection, and says nothing.
  SockAddress address = parse_address(unix_address());
  const Descriptor silent = listen_at(address);
  CHECK(error_of([&] { a.service.connect(format_address(address), {in_seconds(60), given_up}); })->code() ==
        ErrorCode::kCancelled);
}

// A peer as seen on the wire, with metadata that fits the nodes here.
struct RawPeer : Member {
  RawPeer(const std::string& name, std::uint64_t incarnation) : Member(name, {.secret = "s3cret"}) {
    metadata.instance = 77;
    metadata.incarnation = incarnation;
    metadata.block_tokens = kPage;
    metadata.piece_bytes = {64, 64};
    metadata.routes = {"shm", "sock"};
  }
};

TEST_CASE("blocks that a connection had lent are free when its peer has made another one") {
  Node a = make_node("a", {"shm", "sock"});
  RawPeer b("b", UINT64_MAX);  // so that a's connection is the one that stays
  const auto link = b.endpoint->connect(a.service.listen(unix_address()), in_seconds(10));
  link->send(message_of(FrameKind::kCall, 1, write_body(LendBody{4, Medium::kHbm, true}), kLendVerb.number));
  REQUIRE(soon([&] { return blocks_in(*a.pool, BlockState::kLent) == 4; }));
  CHECK(a.service.connect(b.endpoint->listen(unix_address()), in_seconds(10)) == "b");
  CHECK(all_free_soon(*a.pool));
  CHECK(a.service.peers().size() == 1);
  CHECK(soon([&] { return b.handlers[0]->closed_count() == 1; }));
}

// A connection that a peer has made and that this side has admitted may come to nothing: the peer has not admitted it
// yet. connect() used to return its name at once.
TEST_CASE("a caller whose peer calls at the same time waits for that connection, or calls again") {
  Node a = make_node("a", {"sock"});
  RawPeer b("b", 77);
  std::atomic<bool> refuses{false};
  std::atomic<int> refused{0};
  b.on_admit = [&](Link&) {
    if (!refuses) return;
    ++refused;
    throw Error(ErrorCode::kState, "b and a are connected already").because(ErrorCause::kConnectedAlready, 77);
  };
  const auto link = b.endpoint->connect(a.service.listen(unix_address()), in_seconds(10));
  REQUIRE(soon([&] { return a.service.peers().size() == 1; }));
  refuses = true;
  std::atomic<bool> met{false};
  std::thread caller([&, where = b.endpoint->listen(unix_address())] {
    const auto error = error_of([&] { CHECK(a.service.connect(where, in_seconds(30)) == "b"); });
    CHECK_MESSAGE(!error, std::string(error ? error->what() : ""));
    met = true;
  });
  CHECK(soon([&] { return refused >= 3; }));  // it asks again and again
  CHECK_FALSE(met);
  SUBCASE("the peer says something: the connection stays") { link->send(message_of(FrameKind::kCancel, 1)); }
  SUBCASE("the peer drops the connection, and lets this side in") {
    refuses = false;
    link->close(Error(ErrorCode::kState, "for another one"));
  }
  caller.join();
  CHECK(met);
  CHECK(a.service.peers().size() == 1);
  CHECK((b.admitted() == 1) == refuses);
}

// As a peer does that connects to this side while it accepts it: the answer does not come any more.
TEST_CASE("a connection that ends before the peer has answered is tried again") {
  Node a = make_node("a", {"sock"});
  RawPeer b("b", 77);
  std::atomic<int> calls{0};
  b.on_admit = [&](Link& link) {
    if (++calls <= 2) link.close(Error(ErrorCode::kPeerLost, "a has connected again"));
  };
  const std::string where = b.endpoint->listen(unix_address());
  const auto error = error_of([&] { CHECK(a.service.connect(where, in_seconds(30)) == "b"); });
  CHECK_MESSAGE(!error, std::string(error ? error->what() : ""));
  CHECK(calls == 3);
  // But it is, when the time is over, or when there is a reason.
  RawPeer c("c", 78);
  c.metadata.instance = 78;
  c.on_admit = [](Link& link) { link.close(Error(ErrorCode::kPeerLost, "never")); };
  const auto late = error_of([&] { a.service.connect(c.endpoint->listen(unix_address()), in_seconds(0.2)); });
  REQUIRE(late);
  CHECK((late->code() == ErrorCode::kPeerLost || late->code() == ErrorCode::kDeadline));
  RawPeer d("d", 79);
  d.metadata.instance = 79;
  d.refuse = Error(ErrorCode::kPeerLost, "closing");
  const auto told = error_of([&] { a.service.connect(d.endpoint->listen(unix_address()), in_seconds(30)); });
  REQUIRE(told);
  CHECK(std::string(told->what()) == "closing");
}

TEST_CASE("the application is told of peers that come and go, and of those that are here") {
  Node a = make_node("a");
  Node b = make_node("b");
  const std::string where = a.service.listen(unix_address());
  b.service.connect(where, in_seconds(60));
  CHECK_FALSE(a.service.next_peer_event().has_value());
  a.service.begin_peer_events();
  const auto next = [&] {
    std::optional<PeerEvent> event;
    CHECK(soon([&] { return (event = a.service.next_peer_event()).has_value(); }));
    return event ? *event : PeerEvent{};
  };
  const PeerEvent here = next();
  CHECK((here.name == "b" && here.kind == PeerEvent::Kind::kJoined && !here.why));
  CHECK(here.instance == b.pool->instance());
  b.service.disconnect("a");
  const PeerEvent gone = next();
  CHECK((gone.name == "b" && gone.kind == PeerEvent::Kind::kLost && gone.incarnation == here.incarnation));
  REQUIRE(gone.why);
  CHECK(gone.why->code() == ErrorCode::kPeerLost);
  CHECK(b.service.connect(where, in_seconds(60)) == "a");
  CHECK(next().kind == PeerEvent::Kind::kJoined);
  {
    Node newer = make_node("b");  // a process that was restarted, and the old one not noticed
    newer.service.connect(where, in_seconds(60));
    const PeerEvent old = next();
    CHECK((old.kind == PeerEvent::Kind::kLost && old.incarnation == here.incarnation && old.why.has_value()));
    const PeerEvent fresh = next();
    CHECK((fresh.kind == PeerEvent::Kind::kJoined && fresh.name == "b" && fresh.incarnation != here.incarnation));
  }
  CHECK(next().kind == PeerEvent::Kind::kLost);
  a.service.end_peer_events();
  a.pool->close();
  CHECK_THROWS_AS(a.service.next_peer_event(), Error);
}

TEST_CASE("a closed pool keeps no memory for peers of any kind, or for handles that are still held") {
  for (const auto& routes : std::vector<std::vector<std::string>>{{"loopback"}, {"shm"}, {"cma"}, {"sock"}}) {
    CAPTURE(routes[0]);
    Node a = make_node("a", routes);
    Node b = make_node("b", routes);
    if (const auto unusable = error_of([&] { a.service.connect(b.service.listen(unix_address()), in_seconds(60)); })) {
      MESSAGE("not on this machine: " << std::string(unusable->what()));
      continue;
    }
    const Addresses from = alloc(*a.pool, 2);
    const auto there = a.service.transfer(request_to(b, from));
    finish(there);
    const auto item = b.service.receive(in_seconds(60));
    TransferRequest request = request_to(b, from);
    request.streamed = true;
    const auto open = a.service.transfer(std::move(request));
    static_cast<void>(b.service.alloc("a", 2, Medium::kDram, true, in_seconds(60)));
    const std::weak_ptr<Arena> arena_a = a.pool->arena(Medium::kHbm);
    const std::weak_ptr<Arena> arena_b = b.pool->arena(Medium::kHbm);
    a.pool->close();
    CHECK(soon([&] { return arena_a.expired(); }));  // a peer of this process releases it when it is told
    CHECK(soon([&] { return b.service.peers().empty(); }));
    b.pool->close();
    CHECK(arena_b.expired());
    CHECK(RetainedMemory::count() == 0);
    CHECK(open->done());
    CHECK(there->stats().route == routes[0]);
  }
}

}  // namespace
}  // namespace kvpool::testing
