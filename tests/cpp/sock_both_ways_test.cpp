// Two sides that write to each other over one socket at once, more than it takes. A handler of what arrives must not
// wait for room: both sides would, and neither would read.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <new>
#include <thread>
#include <vector>

#include "failing_alloc.h"
#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

constexpr std::size_t kFrameBytes = std::size_t{256} << 10;

// Two ends of which each answers every request with content, in the thread that read it. No socket takes all of them.
struct Repliers {
  static constexpr std::uint64_t kRequests = 64;

  explicit Repliers(Wire wire) : pair(wire) {
    for (std::size_t side = 0; side < 2; ++side) {
      Link* const link = end(side).link.get();
      end(side).handler->answer = [this, link, side](const Message& message) {
        if (message.kind != FrameKind::kCall) return;
        const auto seed = static_cast<unsigned>(message.id);
        Bytes content = some_bytes(kFrameBytes, seed);  // gone when send_data has returned
        const iovec pieces[] = {{content.data(), 1000}, {content.data() + 1000, kFrameBytes - 1000}};
        try {
          link->send_data(message.id, some_bytes(40, seed), pieces, in_seconds(20), nullptr);
          link->send(message_of(FrameKind::kAnswer, message.id));
        } catch (const Error&) {
          ++failures[side];
        }
      };
      end(side).handler->place = [this, side](std::uint64_t token, std::uint64_t bytes) {
        return Placement{{{sinks[side].data(), bytes}}, token};
      };
      end(side).handler->after_placed = [this, side] {
        const auto& ids = end(side).handler->data_ids;
        if (sinks[side] != some_bytes(kFrameBytes, static_cast<unsigned>(ids.back()))) ++failures[side];
        ++arrived[side];
      };
    }
  }
  End& end(std::size_t side) { return side == 0 ? pair.left : pair.right; }

  Bytes sinks[2] = {Bytes(kFrameBytes), Bytes(kFrameBytes)};  // outlive the links, which may be placing to the last
  std::atomic<std::uint64_t> arrived[2] = {};
  std::atomic<int> failures[2] = {};
  LinkPair pair;
};

}  // namespace

TEST_CASE("a link: a handler may answer with content, and both sides go on reading") {
  for (const Wire wire : {Wire::kUnix, Wire::kTcpChecksum, Wire::kTcpMac}) {
    for (const bool driven : {true, false}) {
      CAPTURE(name_of(wire));
      CAPTURE(driven);
      Repliers both(wire);
      for (std::uint64_t id = 1; id <= Repliers::kRequests; ++id) {
        for (std::size_t side = 0; side < 2; ++side) both.end(side).link->send(message_of(FrameKind::kCall, id));
      }
      std::vector<std::thread> drivers;
      for (std::size_t side = 0; driven && side < 2; ++side) {
        drivers.emplace_back([&both, side] {
          both.end(side).link->drive(in_seconds(30), [&] {
            return both.arrived[side] == Repliers::kRequests || both.end(side).handler->closed_count() > 0;
          });
        });
      }
      for (std::thread& driver : drivers) driver.join();
      for (std::size_t side = 0; side < 2; ++side) {
        CAPTURE(side);
        const auto& handler = both.end(side).handler;
        // Each one's last word comes behind the last content.
        CHECK(soon([&] { return handler->closed_count() > 0 || handler->message_count() == 2 * Repliers::kRequests; }));
        const std::optional<Error> why = handler->why();
        CHECK_MESSAGE(!why, "closed: " << (why ? why->what() : ""));
        CHECK(both.arrived[side] == Repliers::kRequests);
        CHECK(both.failures[side] == 0);
        const std::lock_guard lock(handler->mutex);
        for (std::uint64_t i = 0; i < handler->data_ids.size(); ++i) {
          REQUIRE(handler->data_ids[i] == i + 1);
          REQUIRE(handler->data_bodies[i] == some_bytes(40, static_cast<unsigned>(i + 1)));
        }
      }
    }
  }
}

TEST_CASE("a link: content sent by a handler is queued up to the limit for messages") {
  const auto reactor = std::make_unique<Reactor>("left");
  auto [mine, theirs] = socket_pair(Wire::kUnix);
  End end;
  std::atomic<int> sent{0};
  std::optional<ErrorCode> refused;
  std::atomic<bool> over{false};
  std::atomic<bool> queued{false};
  SockLink* link = nullptr;
  end.handler->answer = [&](const Message&) {
    const Bytes content(kFrameBytes);
    const iovec piece{const_cast<std::byte*>(content.data()), content.size()};
    try {
      for (; sent < 1000; ++sent) link->send_data(1, {}, {&piece, 1}, in_seconds(30), nullptr);
    } catch (const Error& error) {
      refused = error.code();
    }
    queued = link->would_queue();
    over = true;
  };
  start(end, *reactor, parts_of(std::move(mine), Wire::kUnix, true, std::size_t{2} << 20));
  link = end.link.get();
  CHECK_FALSE(link->would_queue());  // in a thread that may wait
  // Its peer reads nothing from now on.
  End other;
  const auto theirs_reactor = std::make_unique<Reactor>("right");
  std::atomic<bool> read_on{false};
  std::atomic<int> frames{0};
  other.handler->answer = [&](const Message&) {
    while (!read_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  other.handler->place = [&](std::uint64_t token, std::uint64_t) {
    ++frames;
    return Placement{{}, token};
  };
  start(other, *theirs_reactor, parts_of(std::move(theirs), Wire::kUnix, false, std::size_t{2} << 20));
  link->send(message_of(FrameKind::kCall, 1));
  other.link->send(message_of(FrameKind::kCall, 1));
  REQUIRE(soon([&] { return over.load(); }));
  CHECK(refused == ErrorCode::kBusy);
  CHECK(queued);
  CHECK(sent >= 4);
  CHECK(sent < 100);
  read_on = true;
  CHECK(soon([&] { return frames == sent; }));  // and accepted content arrives
  for (End* one : {&end, &other}) one->link->close(Error(ErrorCode::kClosed, "the test is over"));
  reactor->stop();
  theirs_reactor->stop();
}

TEST_CASE("a link: a frame without memory for the rest of it is given up, and the link goes on") {
  int ran_out = 0;
  for (std::uint64_t n = 1, more = 1; more != 0; ++n) {
    CAPTURE(n);
    const Bytes content = some_bytes(std::size_t{2} << 20);  // outlives the links, as the sink
    Bytes sink(content.size());
    std::atomic<int> outcome{0};  // 1: sent, 2: no memory
    std::atomic<bool> reached{false};
    LinkPair pair(Wire::kUnix);
    pair.right.handler->answer = [&](const Message&) {  // it reads nothing meanwhile
      while (outcome == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    pair.right.handler->place = [&](std::uint64_t token, std::uint64_t bytes) {
      return Placement{{{sink.data(), bytes}}, token};
    };
    pair.left.handler->answer = [&](const Message&) {
      const iovec piece{const_cast<std::byte*>(content.data()), content.size()};
      const FailNthAllocation failure(n);
      int ended = 1;
      try {
        pair.left.link->send_data(7, {}, {&piece, 1}, in_seconds(30), nullptr);
      } catch (const std::bad_alloc&) {
        ended = 2;
      }
      reached = failure.failed_one();
      outcome = ended;
    };
    pair.left.link->send(message_of(FrameKind::kCall, 1));
    pair.right.link->send(message_of(FrameKind::kCall, 2));
    REQUIRE(soon([&] { return outcome != 0; }));
    if (outcome == 2) {
      ++ran_out;
      pair.left.link->send(message_of(FrameKind::kCall, 3));
      CHECK(soon([&] { return pair.right.handler->message_count() == 2; }));
      for (const auto& [token, intact] : pair.right.handler->placed) CHECK_FALSE(intact);
      CHECK(pair.left.handler->closed_count() == 0);
    } else {
      CHECK(soon([&] { return pair.right.handler->placed_count() == 1; }));
      CHECK(pair.right.handler->placed[0].second);
      CHECK(sink == content);
    }
    more = reached ? 1 : 0;
  }
  CHECK(ran_out > 0);
}

TEST_CASE("two pools that send to each other by sock from several threads at once both finish") {
  constexpr int kThreads = 13;  // on each side, one of them for the large ones
  constexpr int kRounds = 8;
  constexpr std::size_t kSmall = 4;  // blocks of 64 KiB: written by the thread that reads the answer
  constexpr std::size_t kLarge = 8;
  for (const bool tcp : {false, true}) {
    CAPTURE(tcp);
    const auto make = [](const std::string& name) {
      PoolOptions options = small_options(640, 0);
      options.layout.piece_bytes.assign(2, 32 << 10);
      ServiceOptions service;
      service.name = name;
      service.secret = "s3cret";
      service.routes = {"sock"};
      service.prefer_unix_socket = false;
      return start_node(options, service);
    };
    Node a = make("a");
    Node b = make("b");
    b.service.connect(a.service.listen(tcp ? "tcp:127.0.0.1:0" : unix_address()), in_seconds(60));
    REQUIRE(soon([&] { return a.service.peers().size() == 1; }));
    std::atomic<int> failures{0};
    const auto send = [&](Node& from, const Node& to, const Addresses& blocks) {
      TransferRequest request = request_to(to, blocks);
      request.deadline_ns = in_seconds(20);
      const auto transfer = from.service.transfer(std::move(request));
      transfer->wait(in_seconds(40));
      if (error_of([&] { transfer->rethrow_if_failed(); })) ++failures;
    };
    std::barrier begin(2 * kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < 2 * kThreads; ++i) {
      threads.emplace_back([&, i] {
        Node& from = i % 2 == 0 ? a : b;
        const Node& to = i % 2 == 0 ? b : a;
        if (error_of([&] {
              const Addresses blocks = alloc(*from.pool, i < 2 ? kLarge : kSmall);
              stamp(*from.pool, blocks, 1);
              begin.arrive_and_wait();
              for (int round = 0; round < kRounds; ++round) send(from, to, blocks);
              from.pool->free(blocks.data(), blocks.size());
            })) {
          ++failures;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(failures == 0);
    for (Node* node : {&a, &b}) {
      int items = 0;
      while (const auto item = node->service.receive(0)) {
        ++items;
        CHECK(is_stamped(*node->pool, item->addresses, 1));
      }
      CHECK(items == kThreads * kRounds);
    }
  }
}

}  // namespace kvpool::testing
