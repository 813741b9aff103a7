#include "kvpool/base/heartbeat.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <memory>

#include "child_process.h"
#include "kvpool/base/error.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::int64_t kMs = 1'000'000;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

template <class Holds>
bool soon(Holds&& holds) {
  for (int i = 0; i < 30'000; ++i) {
    if (holds()) return true;
    usleep(1000);
  }
  return false;
}

struct Page {
  Page() : descriptor(memfd_create("heartbeat-test", MFD_CLOEXEC)) {
    REQUIRE(descriptor >= 0);
    REQUIRE(ftruncate(descriptor, static_cast<off_t>(Heartbeat::kPageBytes)) == 0);
    words = static_cast<std::int64_t*>(
        mmap(nullptr, Heartbeat::kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
  }
  ~Page() {
    munmap(words, Heartbeat::kPageBytes);
    close(descriptor);
  }
  std::int64_t word(int index) const { return __atomic_load_n(words + index, __ATOMIC_ACQUIRE); }
  int descriptor;
  std::int64_t* words = nullptr;
};

}  // namespace

TEST_CASE("a heartbeat begins at once and repeats, and its last beat stays when it is stopped") {
  Page page;
  const std::int64_t before = now_ns();
  Heartbeat heartbeat(page.descriptor, kMs, 1'000'000 * kMs);
  const std::int64_t first = page.word(0);
  CHECK(first >= before);
  CHECK(first <= now_ns());
  CHECK(soon([&] { return page.word(0) > first; }));
  CHECK(heartbeat.fresh());
  heartbeat.stop();
  const std::int64_t last = page.word(0);
  usleep(20'000);
  CHECK(page.word(0) == last);
  CHECK(heartbeat.lapses() == 0);
  heartbeat.stop();
}

TEST_CASE("a process that was stopped for longer than its lease counts a lapse when it resumes") {
  if (!kChildMayStartThreads) return;
  Page page;
  constexpr std::int64_t kLease = 200 * kMs;
  const pid_t child = fork();
  if (child == 0) {
    const Heartbeat heartbeat(page.descriptor, 5 * kMs, kLease);
    for (;;) pause();
  }
  REQUIRE(soon([&] { return page.word(0) != 0; }));
  kill(child, SIGSTOP);
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  const std::int64_t lapses = page.word(1);  // a busy machine may have held it up before
  const std::int64_t last = page.word(0);
  REQUIRE(soon([&] { return now_ns() - last > kLease; }));
  CHECK(page.word(1) == lapses);
  kill(child, SIGCONT);
  CHECK(soon([&] { return page.word(0) > last; }));
  CHECK(page.word(1) > lapses);  // not later than the first beat can be seen
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
}

TEST_CASE("a heartbeat continues the count of lapses in its page") {
  Page page;
  page.words[1] = 7;
  const Heartbeat heartbeat(page.descriptor, kMs, 1'000'000 * kMs);
  CHECK(heartbeat.lapses() == 7);
}

TEST_CASE("a forked child has no heartbeat, and can end without it") {
  Page page;
  constexpr std::int64_t kLongerThanTheMachineRuns =
      1'000'000'000'000 * kMs;  // a time that it cannot read is no fresh beat
  auto heartbeat = std::make_unique<Heartbeat>(page.descriptor, kMs, kLongerThanTheMachineRuns);
  const int status = run_in_child([&] {
    if (heartbeat->beat_ns() != 0 || heartbeat->fresh()) return 1;
    heartbeat->stop();
    heartbeat.reset();
    return 0;
  });
  CHECK(status == 0);
  const std::int64_t last = page.word(0);
  CHECK(soon([&] { return page.word(0) > last; }));  // the parent's goes on
}

TEST_CASE("no heartbeat starts on a file that cannot be mapped") {
  const int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
  try {
    const Heartbeat heartbeat(descriptor, kMs, 10 * kMs);
    FAIL("it was made");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
  }
  close(descriptor);
}
