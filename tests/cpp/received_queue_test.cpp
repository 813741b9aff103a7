// Items that peers sent for the application, and threads that wait for them.
#include "kvpool/peers/received_queue.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"
#include "silent_link.h"
#include "soon.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

std::int64_t in_a_minute() { return monotonic_ns() + 60'000'000'000; }

void push_one(ReceivedQueue& queue, const std::string& peer = "peer", std::size_t bytes = 0) {
  queue.reserve(peer, bytes);
  auto item = std::make_unique<Received>();
  item->peer = peer;
  item->private_bytes.resize(bytes);
  queue.push(std::move(item));
}

// Whether room was kept for one more.
bool keeps_room(ReceivedQueue& queue, const std::string& peer, std::size_t bytes = 0) {
  const auto refused = code_of([&] { queue.reserve(peer, bytes); });
  if (refused) CHECK(refused == ErrorCode::kBusy);
  return !refused;
}

// For so many items of the peer there was still room.
std::size_t fill(ReceivedQueue& queue, const std::string& peer, std::size_t bytes = 0) {
  std::size_t items = 0;
  while (items < 10'000 && keeps_room(queue, peer, bytes)) ++items;
  return items;
}

bool is_readable(int descriptor) {
  pollfd wanted{descriptor, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

TEST_CASE("a thread that waits for items learns why no more will come") {
  for (const bool fails : {false, true}) {
    CAPTURE(fails);
    ReceivedQueue queue(4);
    std::atomic<bool> waits{false};
    std::optional<ErrorCode> heard;
    std::thread waiter([&] {
      waits = true;
      heard = code_of([&] { queue.pop(in_a_minute()); });
    });
    sleep_while([&] { return !waits; });
    if (fails) {
      queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
    } else {
      queue.close();
    }
    waiter.join();
    const ErrorCode expected = fails ? ErrorCode::kDeviceLost : ErrorCode::kClosed;
    CHECK(heard == expected);
    CHECK(code_of([&] { queue.pop(0); }) == expected);
    CHECK(code_of([&] { queue.reserve("peer"); }) == expected);
  }
}

TEST_CASE("a thread that waits for items learns that the pool has failed") {
  const auto pool = std::make_shared<Pool>(small_options(4, 4));
  ServiceOptions options;
  options.secret = "s3cret";
  PeerNode node(pool, make_ranks);
  Service& service = node.start_service(options);
  std::atomic<bool> waits{false};
  std::optional<ErrorCode> heard;
  std::thread waiter([&] {
    waits = true;
    heard = code_of([&] { service.receive(in_a_minute()); });
  });
  sleep_while([&] { return !waits; });
  pool->fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  waiter.join();
  CHECK(heard == ErrorCode::kDeviceLost);
}

// A link whose reader sleeps until woken; on_drive stands for frames that arrive.
class ReadLink final : public SilentLink {
 public:
  void send(Message&&) override {}
  bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) override {
    drives.fetch_add(1);
    const int now = reading.fetch_add(1) + 1;
    if (now > reading_max) reading_max = now;
    if (on_drive) on_drive();
    const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline_ns)};
    std::unique_lock lock(mutex_);
    woken_.wait_until(lock, until, [&] { return ended_ || done(); });
    reading.fetch_sub(1);
    return done() || std::exchange(lies, false);
  }
  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_.notify_all();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    woken_.notify_all();
  }

  std::atomic<int> drives{0};
  std::atomic<int> reading{0};
  std::atomic<int> reading_max{0};
  bool lies = false;  // says once that there is something, as if another thread had taken it
  std::function<void()> on_drive;

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  bool ended_ = false;
};

TEST_CASE("a thread that waits for items reads the link of the peer that sent the last one") {
  ReceivedQueue queue(4);
  const auto link = std::make_shared<ReadLink>();
  std::string asked_for;
  const auto find_link = [&](const std::string& peer) {
    asked_for = peer;
    return link;
  };
  push_one(queue, "a");
  CHECK(queue.pop(in_a_minute(), find_link) != nullptr);
  CHECK(link->drives == 0);  // it had come already
  link->on_drive = [&] { push_one(queue, "a"); };
  CHECK(queue.pop(in_a_minute(), find_link) != nullptr);
  CHECK(asked_for == "a");
  CHECK(link->drives == 1);
  link->on_drive = {};
  CHECK(queue.pop(monotonic_ns() + 1'000'000, find_link) == nullptr);
  CHECK(link->drives == 2);
}

TEST_CASE("a thread that reads a link for items gets those of other peers, and learns of the end") {
  for (const int how : {0, 1, 2}) {
    CAPTURE(how);
    ReceivedQueue queue(4);
    const auto link = std::make_shared<ReadLink>();
    const auto find_link = [&](const std::string&) { return link; };
    push_one(queue, "a");
    CHECK(queue.pop(in_a_minute(), find_link) != nullptr);
    std::string got;
    std::optional<ErrorCode> heard;
    std::thread waiter([&] { heard = code_of([&] { got = queue.pop(in_a_minute(), find_link)->peer; }); });
    sleep_while([&] { return link->drives == 0; });
    if (how == 0) push_one(queue, "b");
    if (how == 1) queue.close();
    if (how == 2) queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
    waiter.join();
    CHECK(got == (how == 0 ? "b" : ""));
    CHECK(heard == (how == 0 ? std::optional<ErrorCode>() : how == 1 ? ErrorCode::kClosed : ErrorCode::kDeviceLost));
  }
}

TEST_CASE("a thread whose link ends goes on waiting for items of other peers") {
  ReceivedQueue queue(4);
  const auto link = std::make_shared<ReadLink>();
  push_one(queue, "a");
  CHECK(queue.pop(in_a_minute()) != nullptr);
  std::string got;
  std::thread waiter([&] { got = queue.pop(in_a_minute(), [&](const std::string&) { return link; })->peer; });
  sleep_while([&] { return link->drives == 0; });
  link->end();
  push_one(queue, "b");
  waiter.join();
  CHECK(got == "b");
}

TEST_CASE("of several threads that wait for items, one reads a link, and each gets an item") {
  ReceivedQueue queue(16);
  const auto link = std::make_shared<ReadLink>();
  const auto find_link = [&](const std::string&) { return link; };
  push_one(queue, "a");
  CHECK(queue.pop(in_a_minute(), find_link) != nullptr);
  std::atomic<int> got{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      if (queue.pop(in_a_minute(), find_link) != nullptr) got.fetch_add(1);
    });
  }
  sleep_while([&] { return link->drives == 0; });
  for (int i = 0; i < 4; ++i) push_one(queue, "b");
  for (std::thread& waiter : waiters) waiter.join();
  CHECK(got == 4);
  CHECK(link->reading_max == 1);
}

TEST_CASE("a thread whose item another one has taken reads the link again") {
  ReceivedQueue queue(4);
  const auto link = std::make_shared<ReadLink>();
  push_one(queue, "a");
  CHECK(queue.pop(in_a_minute()) != nullptr);
  link->lies = true;
  link->end();
  link->on_drive = [&] {
    if (link->drives == 2) push_one(queue, "b");
  };
  CHECK(queue.pop(in_a_minute(), [&](const std::string&) { return link; })->peer == "b");
  CHECK(link->drives == 2);
}

TEST_CASE("items that came before the pool failed can still be taken, and the first reason counts") {
  ReceivedQueue queue(4);
  const int descriptor = queue.descriptor();
  CHECK_FALSE(is_readable(descriptor));
  push_one(queue);
  queue.reserve("peer");  // promised to a peer that is in the middle of a transfer
  queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  queue.fail(Error(ErrorCode::kPeerLost, "a rank is gone"));
  auto promised = std::make_unique<Received>();
  promised->peer = "peer";
  queue.push(std::move(promised));
  CHECK(queue.pop(in_a_minute()) != nullptr);
  CHECK(queue.pop(in_a_minute()) != nullptr);
  CHECK(code_of([&] { queue.pop(in_a_minute()); }) == ErrorCode::kDeviceLost);
  queue.close();
  CHECK(code_of([&] { queue.pop(in_a_minute()); }) == ErrorCode::kDeviceLost);
}

TEST_CASE("a single peer may fill the queue, and every other peer still has its share") {
  ReceivedQueue queue(64);
  for (int i = 0; i < 64; ++i) push_one(queue, "a");
  CHECK(fill(queue, "a") == 0);
  CHECK(fill(queue, "b") == 4);
  CHECK(fill(queue, "c") == 4);
  for (int i = 0; i < 64; ++i) CHECK(queue.pop(0)->peer == "a");
  CHECK(fill(queue, "a") == 56);  // with the items of b and c
}

TEST_CASE("in a queue for few items every peer has room for one") {
  ReceivedQueue queue(2);
  CHECK(fill(queue, "a") == 2);
  CHECK(fill(queue, "b") == 1);
  CHECK(fill(queue, "c") == 1);
  queue.unreserve("c");
  CHECK(fill(queue, "c") == 1);
}

TEST_CASE("a single peer may fill the queue with bytes, and every other peer still has its share") {
  ReceivedQueue queue(4096);
  constexpr std::size_t kItem = ReceivedQueue::kBytesMax / ReceivedQueue::kShares / 2;
  CHECK(fill(queue, "a", kItem) == 2 * ReceivedQueue::kShares);
  CHECK(fill(queue, "b", kItem) == 2);
  CHECK(fill(queue, "c", ReceivedQueue::kBytesMax / ReceivedQueue::kShares + 1) == 1);  // one always is
  queue.unreserve("b", kItem);
  CHECK(fill(queue, "b", kItem) == 1);
}

TEST_CASE("taking an item makes room for as many bytes as it had") {
  ReceivedQueue queue(4096);
  push_one(queue, "a", 1000);
  CHECK(fill(queue, "a", ReceivedQueue::kBytesMax) == 0);
  CHECK(queue.pop(0) != nullptr);
  CHECK(fill(queue, "a", ReceivedQueue::kBytesMax) == 1);
}

TEST_CASE("running out of memory while room is reserved takes no room") {
  const int threw = fail_each_allocation([](auto&& fail) {
    ReceivedQueue queue(1);
    const std::string peer = "a peer whose name is too long to lie in its string";
    if (fail([&] { queue.reserve(peer); })) CHECK(fill(queue, peer) == 1);
  });
  CHECK(threw > 1);
}

TEST_CASE("the descriptor stays readable once nothing more comes, so that a poller learns why") {
  for (const bool fails : {false, true}) {
    for (const bool asked_before : {false, true}) {
      ReceivedQueue queue(4);
      if (asked_before) static_cast<void>(queue.descriptor());
      push_one(queue);
      if (fails) {
        queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
      } else {
        queue.close();
      }
      CHECK(is_readable(queue.descriptor()));
      CHECK(queue.pop(0) != nullptr);
      CHECK(is_readable(queue.descriptor()));
    }
  }
}

}  // namespace
}  // namespace kvpool::testing
