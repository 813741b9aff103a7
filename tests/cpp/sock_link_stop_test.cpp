// A reactor that stops while a driver waits for the role of the reader.
#include <doctest/doctest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "kvpool/base/clock.h"
#include "sock_fixture.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// Keeps a thread wherever it is, as a busy machine does, until release().
class HeldThread {
 public:
  explicit HeldThread(pthread_t thread) {
    held = false;
    released = false;
    struct sigaction action{};
    action.sa_handler = [](int) {
      held = true;
      while (!released) usleep(100);
    };
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR2, &action, &before_);
    pthread_kill(thread, SIGUSR2);
  }
  ~HeldThread() { release(); }
  HeldThread(const HeldThread&) = delete;
  HeldThread& operator=(const HeldThread&) = delete;

  bool wait_until_held() const {
    return soon([] { return held.load(); });
  }
  void release() { released = true; }
  // Call it when the thread has ended.
  void restore() { sigaction(SIGUSR2, &before_, nullptr); }

 private:
  static std::atomic<bool> held;
  static std::atomic<bool> released;
  struct sigaction before_{};
};

std::atomic<bool> HeldThread::held{false};
std::atomic<bool> HeldThread::released{false};

}  // namespace

// The reactor leaves what the link still has to do to a driver that waits for the role. This driver has what it waited
// for by the time that it runs, and no reactor is left to leave it to.
TEST_CASE("a link ends when its reactor has stopped before a waiting driver runs") {
  LinkPair pair(Wire::kUnix);
  SockLink& link = *pair.left.link;
  std::atomic<bool> reader_done{false};
  std::atomic<bool> waiter_done{false};
  std::atomic<bool> waiter_asked{false};
  std::thread reader([&] { link.drive(in_seconds(60), [&] { return reader_done.load(); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread waiter([&] {
    CHECK(link.drive(in_seconds(60), [&] {
      waiter_asked = true;
      return waiter_done.load();
    }));
  });
  REQUIRE(soon([&] { return waiter_asked.load(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it waits for its turn by now

  HeldThread held(waiter.native_handle());
  REQUIRE(held.wait_until_held());
  reader_done = true;
  link.wake();
  reader.join();
  link.close(Error(ErrorCode::kClosed, "the pool is closed"));
  pair.left_reactor->stop();
  WARN(pair.left.handler->closed_count() == 0);  // else it did not wait yet: the reactor has ended the link itself
  waiter_done = true;
  held.release();
  waiter.join();
  held.restore();
  CHECK(pair.left.handler->closed_count() == 1);
}
