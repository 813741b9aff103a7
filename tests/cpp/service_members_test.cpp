// A service among the members of a cluster: they are connected when a verb names them, and disconnected when they are
// reported dead.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "members_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

TEST_CASE("the first verb that names a member connects to it") {
  SUBCASE("transfer") {
    Pair pair;
    send_one(pair.a, pair.b);
    send_one(pair.b, pair.a);
    CHECK(pair.a.service.peers().size() == 1);
  }
  SUBCASE("transfer_batch") {
    Pair pair;
    const Addresses blocks = alloc(*pair.a.pool, 2);
    std::vector<TransferRequest> requests{request_to(pair.b, {blocks[0]}), request_to(pair.b, {blocks[1]})};
    for (const auto& transfer : pair.a.service.transfer_batch(std::move(requests))) finish(transfer);
  }
  SUBCASE("alloc") {
    Pair pair;
    CHECK(pair.a.service.alloc("b", 2, Medium::kHbm, true, in_seconds(60)).size() == 2);
  }
  SUBCASE("fetch, by the name or by the addresses") {
    for (const bool named : {true, false}) {
      Pair pair;
      FetchRequest request;
      request.from = alloc(*pair.b.pool, 2);
      stamp(*pair.b.pool, request.from, 40);
      if (named) request.peer = "b";
      request.deadline_ns = in_seconds(10);
      const auto fetch = pair.a.service.fetch(std::move(request));
      finish(fetch);
      CHECK(is_stamped(*pair.a.pool, fetch->addresses(), 40));
    }
  }
}

TEST_CASE("a fetch that names no peer needs exactly one owner, and a known one") {
  Pair pair;
  const auto fetch = [&](const Addresses& from) {
    FetchRequest request;
    request.from = from;
    request.deadline_ns = in_seconds(60);
    return code_of([&] { static_cast<void>(pair.a.service.fetch(std::move(request))); });
  };
  const Addresses there = alloc(*pair.b.pool, 1);
  const Addresses here = alloc(*pair.a.pool, 2);
  // Ids are random: the one that is b's but for a bit may be a's.
  const bool taken = (instance_of(there[0]) ^ 1U) == pair.a.pool->instance();
  const Address unknown = there[0] ^ (Address{taken ? 2U : 1U} << kInstanceShift);
  CHECK(fetch({}) == ErrorCode::kPeerLost);
  CHECK(fetch({there[0], unknown}) == ErrorCode::kArgument);
  CHECK(fetch({unknown}) == ErrorCode::kPeerLost);
  CHECK(fetch(here) == ErrorCode::kArgument);  // they are here already
}

TEST_CASE("a member's addresses are tried in order, and the error names those that were tried") {
  Pair pair;
  const std::string nowhere = unix_address();
  const std::string where = pair.members[1].addresses[0];
  pair.a.service.set_members({member_of(pair.b, {nowhere, "tcp:127.0.0.1:1"})});
  const Addresses blocks = alloc(*pair.a.pool, 1);
  const auto lost = error_of([&] { static_cast<void>(pair.a.service.transfer(request_to(pair.b, blocks))); });
  REQUIRE(lost);
  CHECK(lost->code() == ErrorCode::kPeerLost);
  CHECK(std::string(lost->what()).find("peer b cannot be reached (" + nowhere + ": nobody listens") == 0);
  CHECK(std::string(lost->what()).find("tcp:127.0.0.1:1: nobody listens") != std::string::npos);
  CHECK(blocks_in(*pair.a.pool, BlockState::kActive) == 1);

  // Somebody else answers there by now: it is not taken for b.
  Node c = make_node("c", {"shm"});
  pair.a.service.set_members({member_of(pair.b, {c.service.listen(unix_address())})});
  const std::string text = text_of([&] { static_cast<void>(pair.a.service.transfer(request_to(pair.b, blocks))); });
  CHECK(text.find("there is c now") != std::string::npos);

  pair.a.service.set_members({member_of(pair.b, {nowhere, where})});
  finish(pair.a.service.transfer(request_to(pair.b, blocks)));
}

TEST_CASE("the error for an unknown name lists the known names") {
  Pair pair;
  const auto lost =
      error_of([&] { static_cast<void>(pair.a.service.alloc("z", 1, Medium::kHbm, true, in_seconds(60))); });
  REQUIRE(lost);
  CHECK(lost->code() == ErrorCode::kPeerLost);
  CHECK(std::string(lost->what()) == "there is no peer called 'z'; this pool has none; members of its cluster: a, b");
  const auto self =
      error_of([&] { static_cast<void>(pair.a.service.alloc("a", 1, Medium::kHbm, true, in_seconds(60))); });
  CHECK((self && self->code() == ErrorCode::kPeerLost));
}

TEST_CASE("a connection that failed once is tried again by the next call") {
  Node a = make_node("a");
  Node b = make_node("b");
  const std::string where = unix_address();
  const ClusterMember there{"b", 7, b.service.incarnation(), {where}};
  a.service.set_members({there});
  for (int i = 0; i < 3; ++i) CHECK(code_of([&] { send_one(a, b); }) == ErrorCode::kPeerLost);
  b.service.listen(where);
  send_one(a, b);
  b.service.disconnect("a");
  CHECK(soon([&] { return a.service.peers().empty(); }));
  send_one(a, b);
}

TEST_CASE("many threads that name a member at once connect to it once") {
  constexpr int kThreads = 8;
  Pair pair;
  pair.b.service.begin_peer_events();
  std::barrier start(kThreads);
  std::atomic<int> met{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      met += pair.a.service.alloc("b", 1, Medium::kHbm, true, in_seconds(20)).size() == 1 ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(met == kThreads);
  int joined = 0;
  while (const auto event = pair.b.service.next_peer_event()) joined += event->kind == PeerEvent::Kind::kJoined ? 1 : 0;
  CHECK(joined == 1);
}

TEST_CASE("when both sides name each other at once, both are served") {
  for (int round = 0; round < 20; ++round) {
    Pair pair;
    std::barrier start(2);
    std::thread other([&] {
      start.arrive_and_wait();
      static_cast<void>(pair.b.service.alloc("a", 1, Medium::kHbm, true, in_seconds(20)));
    });
    start.arrive_and_wait();
    static_cast<void>(pair.a.service.alloc("b", 1, Medium::kHbm, true, in_seconds(20)));
    other.join();
    send_one(pair.a, pair.b);
  }
}

// A server that accepts connections, and says nothing.
struct Silent {
  Silent() : address(parse_address(unix_address())), socket(listen_at(address)) {}
  SockAddress address;
  Descriptor socket;
};

TEST_CASE("a member that does not answer is waited for until the verb's deadline") {
  Node a = make_node("a");
  const Silent silent;
  a.service.set_members({{"b", 7, 70, {format_address(silent.address)}}});
  const auto call = [&](const Waiting& waiting) {
    return code_of([&] { static_cast<void>(a.service.alloc("b", 1, Medium::kHbm, true, waiting)); });
  };
  CHECK(call(in_seconds(0.1)) == ErrorCode::kPeerLost);
  CHECK(call({in_seconds(60), [] { return true; }}) == ErrorCode::kCancelled);
}

TEST_CASE("a call stops waiting for a member that is reported dead") {
  for (const bool expelled : {true, false}) {
    Node a = make_node("a");
    const Silent silent;
    a.service.set_members({{"b", 7, 70, {format_address(silent.address)}}});
    std::atomic<bool> asked{false};
    std::thread caller([&] {
      const Waiting waiting(in_seconds(600), [&] {
        asked = true;
        return false;
      });
      std::string text;
      CHECK(code_of([&] { static_cast<void>(a.service.alloc("b", 1, Medium::kHbm, true, waiting)); }, &text) ==
            ErrorCode::kPeerLost);
      CHECK(text.find("gone") != std::string::npos);
    });
    CHECK(soon([&] { return asked.load(); }));  // it waits
    expelled ? a.service.expel(70, "its lease has run out") : a.service.set_members({});
    caller.join();
  }
}

TEST_CASE("a replaced incarnation is disconnected, and the new one connected") {
  Pair pair;
  send_one(pair.a, pair.b);
  const std::uint64_t before = pair.a.service.peers()[0].incarnation;
  Node newer = make_node("b", {"shm"});
  pair.a.service.set_members({listening(newer)});
  CHECK(soon([&] { return pair.a.service.peers().empty(); }));
  send_one(pair.a, newer);
  REQUIRE(pair.a.service.peers().size() == 1);
  CHECK(pair.a.service.peers()[0].incarnation != before);
  CHECK(pair.a.service.peers()[0].incarnation == newer.service.incarnation());
  // A late list names the old one: the current one stays.
  pair.a.service.set_members({listening(newer)});
  CHECK(pair.a.service.peers().size() == 1);
}

TEST_CASE("the blocks of a dead incarnation are freed, and it is let in again when it is named again") {
  for (const auto& routes : std::vector<std::vector<std::string>>{{"loopback"}, {"shm"}, {"sock"}}) {
    CAPTURE(routes[0]);
    Pair pair(routes);
    static_cast<void>(pair.b.service.alloc("a", 3, Medium::kHbm, true, in_seconds(60)));
    const Addresses blocks = alloc(*pair.a.pool, 1);
    TransferRequest request = request_to(pair.b, blocks);
    request.streamed = true;
    const auto open = pair.a.service.transfer(std::move(request));
    for (int i = 0; i < 2; ++i) pair.a.service.expel(pair.b.service.incarnation(), "its lease has run out");
    REQUIRE(open->wait(in_seconds(10)));
    std::string text;
    CHECK(code_of([&] { open->rethrow_if_failed(); }, &text) == ErrorCode::kPeerLost);
    CHECK(text.find("its lease has run out") != std::string::npos);
    CHECK(soon([&] { return blocks_in(*pair.a.pool, BlockState::kFree) == 31; }));
    CHECK(soon([&] { return blocks_in(*pair.b.pool, BlockState::kFree) == 32; }));
    // It does not know, and calls; the other does not call it.
    CHECK_FALSE(is_let_in(pair.b, pair.members[0].addresses[0]));
    CHECK(code_of([&] { send_one(pair.b, pair.a, 0.2); }) == ErrorCode::kPeerLost);
    CHECK(code_of([&] { send_one(pair.a, pair.b); }) == ErrorCode::kPeerLost);
    CHECK(pair.a.service.peers().empty());
    pair.tell(pair.members);
    send_one(pair.b, pair.a);
    send_one(pair.a, pair.b);
  }
}

TEST_CASE("a dropped peer learns so when it calls, and an unknown one does not") {
  Pair pair({"sock"});
  send_one(pair.a, pair.b);
  pair.a.service.expel(pair.b.service.incarnation(), "its record has run out");
  CHECK(soon([&] { return pair.a.service.peers().empty() && pair.b.service.peers().empty(); }));
  CHECK(pair.b.service.dropped_by().empty());
  CHECK_FALSE(is_let_in(pair.b, pair.members[0].addresses[0]));
  CHECK(pair.b.service.dropped_by().find("its record has run out") != std::string::npos);
  pair.b.service.fence("it was dropped");
  CHECK(pair.b.service.dropped_by().empty());
  pair.b.service.unfence();
  CHECK(pair.b.service.dropped_by().empty());

  Pair strangers({"sock"});
  strangers.a.service.expel(strangers.b.service.incarnation(), "its record has run out");
  CHECK_FALSE(is_let_in(strangers.b, strangers.members[0].addresses[0]));
  CHECK(strangers.b.service.dropped_by().empty());  // nothing was taken from it
}

}  // namespace
}  // namespace kvpool::testing
