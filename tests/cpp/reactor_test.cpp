#include "kvpool/net/reactor.h"

#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include "child_process.h"
#include "kvpool/base/clock.h"
#include "sock_fixture.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

struct Pipe {
  Pipe() { REQUIRE(pipe(ends) == 0); }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  void put() const { REQUIRE(write(ends[1], "x", 1) == 1); }
  void take() const {
    char byte = 0;
    CHECK(read(ends[0], &byte, 1) == 1);
  }
  int ends[2] = {-1, -1};
};

void run_and_wait(Reactor& reactor, const std::function<void()>& work) {
  std::atomic<bool> ran{false};
  reactor.post([&] {
    work();
    ran = true;
  });
  REQUIRE(soon([&] { return ran.load(); }));
}

}  // namespace

TEST_CASE("a reactor: a watched descriptor is reported until it is unwatched") {
  const auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  std::atomic<int> calls{0};
  const auto watch = reactor->watch(pipe.ends[0], [&](std::uint32_t events) {
    CHECK((events & EPOLLIN) != 0);
    CHECK(reactor->in_thread());
    pipe.take();
    ++calls;
  });
  CHECK_FALSE(reactor->in_thread());
  for (int i = 1; i <= 3; ++i) {
    pipe.put();
    REQUIRE(soon([&] { return calls == i; }));
  }
  reactor->want(watch, 0);
  pipe.put();
  run_and_wait(*reactor, [] {});
  CHECK(calls == 3);
  reactor->want(watch, EPOLLIN);
  REQUIRE(soon([&] { return calls == 4; }));
  reactor->unwatch(watch);
  pipe.put();
  run_and_wait(*reactor, [] {});
  CHECK(calls == 4);
  reactor->unwatch(watch);
}

TEST_CASE("a reactor: watches are added, changed and removed by several threads at once") {
  const auto reactor = std::make_unique<Reactor>("test");
  const Pipe kept;
  const auto watch = reactor->watch(kept.ends[0], [](std::uint32_t) {});
  std::atomic<bool> over{false};
  std::thread changing([&] {
    while (!over) reactor->want(watch, EPOLLIN);
  });
  const Pipe pipe;
  for (int i = 0; i < 300; ++i) reactor->unwatch(reactor->watch(pipe.ends[0], [](std::uint32_t) {}));
  over = true;
  changing.join();
  reactor->unwatch(watch);
}

TEST_CASE("a reactor: unwatch and cancel wait for a call that is under way, unless they run in it") {
  const auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  std::atomic<bool> inside{false};
  std::atomic<bool> finished{false};
  const auto slow = [&] {
    inside = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    finished = true;
  };
  const auto watch = reactor->watch(pipe.ends[0], [&](std::uint32_t) {
    pipe.take();
    slow();
  });
  pipe.put();
  REQUIRE(soon([&] { return inside.load(); }));
  reactor->unwatch(watch);
  CHECK(finished);

  inside = finished = false;
  const auto timer = reactor->at(0, slow);
  REQUIRE(soon([&] { return inside.load(); }));
  reactor->cancel(timer);
  CHECK(finished);

  std::atomic<int> calls{0};
  std::uint64_t own = 0;
  run_and_wait(*reactor, [&] {
    own = reactor->watch(pipe.ends[0], [&](std::uint32_t) {
      ++calls;
      reactor->unwatch(own);
    });
  });
  pipe.put();
  REQUIRE(soon([&] { return calls == 1; }));
  run_and_wait(*reactor, [] {});
  CHECK(calls == 1);
}

TEST_CASE("a reactor: the objects that a watch holds are freed with it") {
  const auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  auto held = std::make_shared<int>(1);
  const auto watch = reactor->watch(pipe.ends[0], [held](std::uint32_t) {});
  CHECK(held.use_count() == 2);
  reactor->unwatch(watch);
  CHECK(held.use_count() == 1);
  const auto timer = reactor->at(in_seconds(1000), [held] {});
  CHECK(held.use_count() == 2);
  reactor->cancel(timer);
  CHECK(held.use_count() == 1);
  reactor->at(in_seconds(1000), [held] {});
  reactor->stop();
  CHECK(held.use_count() == 1);
}

TEST_CASE("a reactor: timers run in the order of their times, never early") {
  const auto reactor = std::make_unique<Reactor>("test");
  std::mutex mutex;
  std::vector<int> order;
  std::atomic<bool> early{false};
  const std::int64_t base = monotonic_ns() + 30'000'000;
  for (const int i : {3, 1, 4, 0, 2}) {
    const std::int64_t at = base + i * 5'000'000;
    reactor->at(at, [&, i, at] {
      if (monotonic_ns() < at) early = true;
      const std::lock_guard lock(mutex);
      order.push_back(i);
    });
  }
  const auto cancelled = reactor->at(base, [&] { early = true; });
  reactor->cancel(cancelled);
  reactor->cancel(cancelled);
  REQUIRE(soon([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 5;
  }));
  CHECK(order == std::vector<int>{0, 1, 2, 3, 4});
  CHECK_FALSE(early);
  CHECK(monotonic_ns() - base < 5 * kSecond);
}

TEST_CASE("a reactor: the posts of many threads all run, each thread's in order") {
  const auto reactor = std::make_unique<Reactor>("test");
  std::map<int, int> last;
  int wrong = 0;
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 1; i <= 2000; ++i) {
        reactor->post([&, thread, i] {
          wrong += last[thread] == i - 1 ? 0 : 1;
          last[thread] = i;
          ++ran;
        });
      }
    });
  }
  for (auto& thread : threads) thread.join();
  REQUIRE(soon([&] { return ran == 8000; }));
  reactor->stop();
  CHECK(wrong == 0);
}

TEST_CASE("a reactor: callbacks that throw do no harm") {
  const auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  std::atomic<int> calls{0};
  reactor->watch(pipe.ends[0], [&](std::uint32_t) {
    ++calls;
    throw std::bad_alloc();
  });
  pipe.put();  // and stays there: a watch that throws is not called again and again
  reactor->post([] { throw Error(ErrorCode::kState, "no"); });
  reactor->at(0, [] { throw std::runtime_error("no"); });
  run_and_wait(*reactor, [] {});
  REQUIRE(soon([&] { return calls == 1; }));
  run_and_wait(*reactor, [] {});
  CHECK(calls == 1);
}

TEST_CASE("a reactor: stopping runs what was posted, notifies the watches, and accepts nothing more") {
  auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  std::atomic<int> posted{0};
  std::atomic<int> told{0};
  reactor->watch(pipe.ends[0], [&](std::uint32_t events) {
    CHECK((events & EPOLLHUP) != 0);
    CHECK_FALSE(reactor->running());
    ++told;
  });
  for (int i = 0; i < 100; ++i) reactor->post([&] { reactor->post([&] { ++posted; }); });
  CHECK(reactor->running());
  reactor->stop();
  reactor->stop();
  CHECK(posted == 100);
  CHECK(told == 1);
  const auto closed = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kClosed;
    }
    return false;
  };
  CHECK(closed([&] { reactor->post([] {}); }));
  CHECK(closed([&] { reactor->at(0, [] {}); }));
  CHECK(closed([&] { reactor->watch(pipe.ends[1], [](std::uint32_t) {}); }));
  reactor->unwatch(1);
  reactor->cancel(1);
  reactor->want(1, EPOLLIN);
}

TEST_CASE("a reactor: a stopped one keeps no descriptor, even if a thread was just waking it") {
  const int before = open_descriptors();
  for (int round = 0; round < 20; ++round) {
    auto reactor = std::make_unique<Reactor>("test");
    std::atomic<bool> over{false};
    std::vector<std::thread> posters;
    for (int i = 0; i < 3; ++i) {
      posters.emplace_back([&] {
        while (!over) {
          try {
            reactor->post([] {});
          } catch (const Error& error) {
            REQUIRE(error.code() == ErrorCode::kClosed);
          }
          std::this_thread::yield();
        }
      });
    }
    run_and_wait(*reactor, [] {});
    reactor->stop();
    over = true;
    for (std::thread& poster : posters) poster.join();
    REQUIRE(open_descriptors() == before);
    reactor->unwatch(1);
    reactor->want(1, EPOLLIN);
  }
}

TEST_CASE("a reactor: its thread receives no signals") {
  const auto reactor = std::make_unique<Reactor>("test");
  run_and_wait(*reactor, [] {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD, SIGPIPE})
      CHECK(sigismember(&blocked, number) == 1);
  });
  sigset_t mine;
  pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  CHECK(sigismember(&mine, SIGTERM) == 0);
}

TEST_CASE("a reactor: it sleeps while nothing happens, and timers close together are one wake-up") {
  const auto reactor = std::make_unique<Reactor>("test");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::uint64_t before = reactor->wakeups();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(reactor->wakeups() - before <= 1);
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) reactor->at(monotonic_ns() + 200'000'000 + i * 100'000, [&] { ++ran; });
  REQUIRE(soon([&] { return ran == 100; }));
  CHECK(reactor->wakeups() - before <= 10);
}

TEST_CASE("a reactor: a forked child has no descriptor of it, and can only drop it") {
  auto reactor = std::make_unique<Reactor>("test");
  const Pipe pipe;
  const auto watch = reactor->watch(pipe.ends[0], [](std::uint32_t) {});
  const int before = open_descriptors();
  const int status = test::run_in_child([&] {
    if (open_descriptors() != before - 2) return 1;  // epoll and eventfd
    if (reactor->running()) return 2;
    try {
      reactor->post([] {});
      return 3;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kFork) return 4;
    }
    reactor->unwatch(watch);
    reactor->cancel(1);
    reactor->stop();
    reactor.reset();
    return 0;
  });
  CHECK(status == 0);
  run_and_wait(*reactor, [] {});
}

TEST_CASE("a reactor: it leaves no descriptor or thread behind") {
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) std::make_unique<Reactor>("test")->post([] {});
  CHECK(open_descriptors() == before);
}
