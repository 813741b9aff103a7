// The ucx transport between two processes: the lanes that UCX chooses, and what happens when one of the two dies.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <stdexcept>
#include <thread>

#include "kvpool/base/clock.h"
#include "ucx_kit.h"

using namespace kvpool;
using namespace kvpool::testing;

#if defined(__SANITIZE_ADDRESS__)
// UCX asks whether it may read a peer by reading one variable of the call, the vector of ranges itself, over itself.
// AddressSanitizer looks at the vector after the call, and finds ranges of the peer's.
extern "C" const char* __asan_default_suppressions();  // NOLINT: the sanitizer's name
extern "C" const char* __asan_default_suppressions() { return "interceptor_via_lib:libuct_cma"; }  // NOLINT
#endif

namespace {

void send_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    if (n <= 0) throw std::runtime_error("the other process of the test is gone");
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void receive_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    if (n <= 0) throw std::runtime_error("the other process of the test is gone");
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

// A process that has a worker and does nothing: it is written to. Its memory is shared with the test, so that the test
// can look. Made before this process loads UCX.
class Target {
 public:
  Target(const SpanShape& shape, bool shared) : side_(shape, shape, shared) {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    std::fflush(nullptr);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) serve(pair[1]);
    ::close(pair[1]);
    socket_ = pair[0];
    std::uint64_t bytes = 0;
    receive_all(socket_, &bytes, sizeof(bytes));
    blob_.resize(bytes);
    receive_all(socket_, blob_.data(), bytes);
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  }
  ~Target() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    ::close(socket_);
    ::close(pidfd_);
  }
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  PeerMetadata metadata() const { return side_.metadata(blob_); }
  UcxSide& side() { return side_; }
  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_; }
  // The target's side of fencing: it closes its worker.
  void close_worker() {
    const char order = 'c';
    send_all(socket_, &order, 1);
    char done = 0;
    receive_all(socket_, &done, 1);
    CHECK(done == 1);
  }

 private:
  [[noreturn]] void serve(int socket) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      side_.start();
      const Bytes& blob = side_.worker().blob();
      const std::uint64_t bytes = blob.size();
      send_all(socket, &bytes, sizeof(bytes));
      send_all(socket, blob.data(), bytes);
      for (char order = 0; read(socket, &order, 1) == 1;) {
        const char closed = side_.worker().close() ? 1 : 0;
        send_all(socket, &closed, 1);
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "target: %s\n", error.what());
    }
    _exit(0);
  }

  UcxSide side_;
  pid_t pid_ = 0;
  int socket_ = -1;
  int pidfd_ = -1;
  Bytes blob_;
};

bool has_lane(const std::vector<std::string>& lanes, const std::string& transport, const std::string& use) {
  return std::any_of(lanes.begin(), lanes.end(), [&](const std::string& lane) {
    return lane.find(":" + transport + "/") != std::string::npos && lane.find(use) != std::string::npos;
  });
}

}  // namespace

TEST_CASE("UCX: shared memory and cma are used although peers may fail") {
  if (!alone("UCX: shared memory and cma are used although peers may fail")) return;
  const SpanShape shape = plain_shape(8, {4096});
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  a.start();
  const auto route = a.worker().make_route(target.metadata(), target.pidfd());
  write_blocks(*route, {{0, 0, 4096}}, blocks_of(Medium::kDram, 0, 8), blocks_of(Medium::kDram, 0, 8));
  const auto lanes = route->lanes();
  std::string all;
  for (const auto& lane : lanes) all += lane + "\n";
  INFO(all);
  if (describe_ucx(ucx_place()) < "UCX 1.17") {
    MESSAGE("skipped: UCX before 1.17 uses tcp here");
    return;
  }
  CHECK(has_lane(lanes, "cma", "rma_bw"));
  CHECK((has_lane(lanes, "posix", " am") || has_lane(lanes, "sysv", " am")));
}

TEST_CASE("UCX: two processes write exactly") {
  if (!alone("UCX: two processes write exactly")) return;
  Dice dice(fuzz_seeds().back());
  const SpanShape shape = random_shape(dice, 64, 20'000);
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  fill_random(dice, a.memory(), a.bytes());
  a.start();
  const auto route = a.worker().make_route(target.metadata(), target.pidfd());
  for (int round = 0; round < fuzz_length(20); ++round) {
    const auto from = random_blocks(dice, 64, 1 + dice.below(128));
    const auto to = random_blocks(dice, 64, from.size());
    const auto strips = random_strips(dice, 20'000, 20'000);
    std::vector<std::byte> expected(target.side().memory(), target.side().memory() + target.side().bytes());
    MediaSpans spans = target.side().spans();
    for (MediumSpan& span : spans) {
      for (Segment& segment : span.segments) segment.base = expected.data() + (segment.base - target.side().memory());
    }
    naive_write(a.spans(), spans, strips, from, to);
    write_blocks(*route, strips, from, to);
    REQUIRE(std::equal(expected.begin(), expected.end(), target.side().memory()));
  }
}

namespace {

void kill_in_the_middle(bool with_pidfd) {
  constexpr std::size_t kBlock = 1 << 20;
  const SpanShape shape = plain_shape(16, {kBlock});
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  a.start();
  const auto route = a.worker().make_route(target.metadata(), with_pidfd ? target.pidfd() : -1);
  const auto blocks = blocks_of(Medium::kHbm, 0, 16);
  write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    kill(target.pid(), SIGKILL);
  });
  const std::int64_t started = monotonic_ns();
  std::string text;
  const auto code = code_of(
      [&] {
        for (;;) write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks);
      },
      &text);
  killer.join();
  CHECK(code == ErrorCode::kPeerLost);
  CHECK(text.find("peer") != std::string::npos);
  CHECK(monotonic_ns() - started < 10'000'000'000);  // keepalive is 1 s, the deadline 20 s
  // It stays so, and at once.
  CHECK(code_of([&] { write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks); }) == ErrorCode::kPeerLost);
  CHECK(a.worker().close());
}

}  // namespace

TEST_CASE("UCX: a peer that is killed in the middle of a write is lost") {
  if (alone("UCX: a peer that is killed in the middle of a write is lost")) {
    kill_in_the_middle(true);
  }
}

TEST_CASE("UCX: a killed peer is noticed without its pidfd") {
  if (alone("UCX: a killed peer is noticed without its pidfd")) kill_in_the_middle(false);
}

TEST_CASE("UCX: a peer that is killed is lost over tcp") {
  if (alone("UCX: a peer that is killed is lost over tcp", {"UCX_TLS=tcp"})) kill_in_the_middle(false);
}

TEST_CASE("UCX: a write to a stopped peer ends by its deadline and nothing of it is under way") {
  if (!alone("UCX: a write to a stopped peer ends by its deadline and nothing of it is under way", {"UCX_TLS=tcp"}))
    return;
  constexpr std::size_t kBlock = 1 << 20;
  const SpanShape shape = plain_shape(64, {kBlock});
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  a.start();
  const auto route = a.worker().make_route(target.metadata(), target.pidfd());
  const auto blocks = blocks_of(Medium::kHbm, 0, 64);
  write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks);
  kill(target.pid(), SIGSTOP);
  waitpid(target.pid(), nullptr, WUNTRACED);
  const std::int64_t started = monotonic_ns();
  std::string text;
  const auto code = code_of([&] { write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks, in_ms(200)); }, &text);
  CHECK(monotonic_ns() - started < 15'000'000'000);  // not the next deadline, of 20 s
  // What lies in the sockets cannot be called back: the peer is lost, not just late.
  CHECK(code == ErrorCode::kPeerLost);
  CHECK(text.find("deadline") != std::string::npos);
  // UCX reads our memory no more: the whole of it may go.
  route->close();
  a.stop();
  mprotect(a.memory(), a.bytes(), PROT_NONE);
  kill(target.pid(), SIGCONT);
  // The receiver's proof: with its worker closed, what waited in the sockets is not written any more.
  target.close_worker();
  std::vector<std::byte> before(target.side().memory(), target.side().memory() + target.side().bytes());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(std::equal(before.begin(), before.end(), target.side().memory()));
}

TEST_CASE("UCX: a cancelled write ends and the route goes on") {
  if (!alone("UCX: a cancelled write ends and the route goes on")) return;
  constexpr std::size_t kBlock = 1 << 20;
  const SpanShape shape = plain_shape(32, {kBlock});
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  a.start();
  const auto route = a.worker().make_route(target.metadata(), target.pidfd());
  const auto blocks = blocks_of(Medium::kHbm, 0, 32);
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    cancelled = true;
  });
  const auto write = [&] {
    for (;;) write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks, in_ms(20'000), &cancelled);
  };
  CHECK(code_of(write) == ErrorCode::kCancelled);
  canceller.join();
  CHECK(code_of([&] { write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks, monotonic_ns()); }) ==
        ErrorCode::kDeadline);
  CHECK(write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks).bytes == 32 * kBlock);
}

TEST_CASE("UCX: what a sender goes on writing does not arrive after the receiver closed its worker") {
  if (!alone("UCX: what a sender goes on writing does not arrive after the receiver closed its worker",
             {"UCX_TLS=tcp"})) {
    return;
  }
  constexpr std::size_t kBlock = 64 << 10;
  const SpanShape shape = plain_shape(64, {kBlock});
  Target target(shape, true);
  UcxSide a(shape, shape, true);
  a.start();
  const auto route = a.worker().make_route(target.metadata(), target.pidfd());
  const auto blocks = blocks_of(Medium::kHbm, 0, 64);
  std::thread sender([&] {
    CHECK(code_of([&] {
            for (int stamp = 0;; ++stamp) {
              std::memset(a.memory(), stamp & 0xFF, 64 * kBlock);
              write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks);
            }
          }) == ErrorCode::kPeerLost);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  target.close_worker();
  std::vector<std::byte> before(target.side().memory(), target.side().memory() + target.side().bytes());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(std::equal(before.begin(), before.end(), target.side().memory()));
  sender.join();
}
