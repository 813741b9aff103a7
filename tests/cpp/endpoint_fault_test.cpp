// Peers and callers that misbehave, and what they leave.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "child_process.h"
#include "endpoint_fixture.h"
#include "fuzz_seeds.h"
#include "kvpool/base/clock.h"
#include "raw_peer.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST_CASE("an endpoint: the error is kPeerLost without a listener, and kDeadline with a silent one") {
  Member client("client");
  CHECK(error_of([&] { client.endpoint->connect(fresh_name("unix:@"), in_seconds(5)); })->code() ==
        ErrorCode::kPeerLost);
  CHECK(error_of([&] { client.endpoint->connect(fresh_name("unix:/tmp/"), in_seconds(5)); })->code() ==
        ErrorCode::kPeerLost);
  CHECK(error_of([&] { client.endpoint->connect("tcp:127.0.0.1:1", in_seconds(5)); })->code() == ErrorCode::kPeerLost);
  // A listener that never accepts.
  const std::string name = fresh_name("@");
  SockAddress address{.tcp = false, .path = name, .host = {}, .port = 0};
  Descriptor silent = listen_at(address);
  const std::int64_t begun = monotonic_ns();
  CHECK(error_of([&] { client.endpoint->connect("unix:" + name, in_seconds(0.2)); })->code() == ErrorCode::kDeadline);
  CHECK(monotonic_ns() - begun < 5 * kSecond);
  // One that closes every connection at once, and one that sends what no kvpool would.
  std::atomic<bool> over{false};
  std::atomic<bool> says_http{false};
  std::thread closer([&] {
    pollfd caller{silent.get(), POLLIN, 0};
    while (!over) {
      if (poll(&caller, 1, 10) != 1) continue;
      const int accepted = accept4(silent.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (says_http) {
        [[maybe_unused]] const auto sent = send(accepted, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      close(accepted);
    }
  });
  CHECK(error_of([&] { client.endpoint->connect("unix:" + name, in_seconds(60)); })->code() == ErrorCode::kPeerLost);
  says_http = true;
  CHECK(error_of([&] { client.endpoint->connect("unix:" + name, in_seconds(60)); })->code() == ErrorCode::kProtocol);
  over = true;
  closer.join();
}

TEST_CASE("an endpoint: the end of the peer's process is noticed") {
  if (!test::kChildMayStartThreads) return;
  const std::string address = fresh_name("unix:@");
  int ready[2];
  REQUIRE(pipe2(ready, O_CLOEXEC) == 0);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    Member server("server");
    server.endpoint->listen(address);
    [[maybe_unused]] const auto written = write(ready[1], "x", 1);
    pause();
    _exit(1);
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  Member client("client");
  const auto link = client.endpoint->connect(address, in_seconds(10));
  REQUIRE(link->pidfd() >= 0);
  pollfd gone{link->pidfd(), POLLIN, 0};
  CHECK(poll(&gone, 1, 0) == 0);
  kill(child, SIGKILL);
  CHECK(poll(&gone, 1, 10000) == 1);
  REQUIRE(soon([&] { return client.handlers[0]->closed_count() == 1; }));
  CHECK(client.handlers[0]->why()->code() == ErrorCode::kPeerLost);
  CHECK(link->pidfd() >= 0);  // still the proof that it is gone
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST_CASE("an endpoint: many connect at once, more than may be in a handshake at a time") {
  for (const char* address : {"unix", "tcp:127.0.0.1:0"}) {
    Member server("server", {.secret = "sesame", .handshakes_max = 3});
    const std::string at = server.endpoint->listen(std::string(address) == "unix" ? fresh_name("unix:@") : address);
    Member client("client");
    std::vector<std::thread> threads;
    threads.reserve(24);
    std::atomic<int> met{0};
    for (int i = 0; i < 24; ++i) {
      threads.emplace_back([&] { met += client.endpoint->connect(at, in_seconds(30)) != nullptr ? 1 : 0; });
    }
    for (auto& thread : threads) thread.join();
    CHECK(met == 24);
    CHECK(server.admitted() == 24);
  }
}

TEST_CASE("an endpoint: garbage from strangers harms nobody") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("stranger", seed);
    Dice dice(seed);
    const int before = open_descriptors();
    {
      Member server("server");
      const std::string name = fresh_name("@");
      server.endpoint->listen("unix:" + name);
      const SockAddress address{.tcp = false, .path = name, .host = {}, .port = 0};
      const int file = memfd_create("kvpool-test", MFD_CLOEXEC);
      for (int round = 0; round < fuzz_length(60); ++round) {
        const Descriptor socket = dial(address, NoPatience());
        Bytes bytes = Handshake(Handshake::Role::kClient, "wrong").start();
        const Bytes more = some_bytes(dice.below(200), dice.below(99));
        bytes.insert(bytes.end(), more.begin(), more.end());
        for (std::uint32_t flips = dice.below(4); flips > 0; --flips)
          dice.pick(bytes) ^= static_cast<std::byte>(1U << dice.below(8));
        bytes.resize(dice.below(bytes.size() + 1));
        send_raw(socket, bytes, dice.one_in(4) ? std::vector<int>{file} : std::vector<int>{});
        if (dice.one_in(3)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      Member client("client");
      CHECK(client.endpoint->connect("unix:" + name, in_seconds(10)) != nullptr);
      CHECK(server.admitted() == 1);
      close(file);
    }
    CHECK(open_descriptors() == before);
  }
}

TEST_CASE("an endpoint: without spare descriptors it pauses, and serves again when there are some") {
  Member server("server");
  const std::string at = server.endpoint->listen(fresh_name("unix:@"));
  Member client("client");
  // The messages that a client needs before the server has to accept.
  Descriptor caller = dial(parse_address(at), NoPatience());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::vector<int> taken;
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{static_cast<rlim_t>(open_descriptors() + 8), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  Descriptor second = Descriptor::open([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, at.data() + 6, at.size() - 6);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + at.size() - 5);
  CHECK(connect(second.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  const std::uint64_t woke = server.reactor->wakeups();
  const std::int64_t begun_ns = monotonic_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  // Two for each try, and one every 100 ms; this thread may have slept for longer.
  const std::uint64_t woken = server.reactor->wakeups() - woke;
  CHECK(woken <= 4 * static_cast<std::uint64_t>((monotonic_ns() - begun_ns) / 100'000'000));
  for (const int fd : taken) close(fd);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(client.endpoint->connect(at, in_seconds(10)) != nullptr);
}

TEST_CASE("an endpoint: closing it ends handshakes under way, and leaves links alone") {
  Member server("server");
  const std::string at = server.endpoint->listen(fresh_name("unix:@"));
  Member client("client");
  const auto link = client.endpoint->connect(at, in_seconds(10));
  SockAddress address{.tcp = false, .path = fresh_name("@"), .host = {}, .port = 0};
  const Descriptor silent = listen_at(address);
  std::thread waiting([&] {
    const auto error = error_of([&] { client.endpoint->connect(format_address(address), in_seconds(30)); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kClosed);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  client.endpoint->close();
  client.endpoint->close();
  waiting.join();
  server.endpoint->close();
  CHECK(error_of([&] { client.endpoint->connect(at, in_seconds(1)); })->code() == ErrorCode::kClosed);
  CHECK(error_of([&] { server.endpoint->listen(fresh_name("unix:@")); })->code() == ErrorCode::kClosed);
  Member late("late");
  CHECK(error_of([&] { late.endpoint->connect(at, in_seconds(5)); })->code() == ErrorCode::kPeerLost);
  link->send(message_of(FrameKind::kCall, 1));
  CHECK(soon([&] { return server.handlers[0]->message_count() == 1; }));
}

TEST_CASE("an endpoint: connections leave nothing behind") {
  const int before = open_descriptors();
  for (int round = 0; round < 10; ++round) {
    Member server("server", {.secret = "sesame"});
    Member client("client", {.secret = round % 3 == 0 ? "wrong" : "sesame"});
    if (round % 3 == 1) server.refuse.emplace(ErrorCode::kBusy, "full");
    const std::string at = server.endpoint->listen(round % 2 == 0 ? fresh_name("unix:@") : "tcp:127.0.0.1:0");
    error_of([&] { client.endpoint->connect(at, in_seconds(10)); });
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("an endpoint: closing it waits for an admission that is under way, and none follows") {
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> closed{false};
    std::atomic<bool> late{false};
    Member server("server");
    server.on_admit = [&](Link&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (closed) late = true;
    };
    const std::string at = server.endpoint->listen(fresh_name("unix:@"));
    Member client("client");
    std::thread caller([&] { error_of([&] { client.endpoint->connect(at, in_seconds(10)); }); });
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    server.endpoint->close();
    closed = true;
    caller.join();
    CHECK_FALSE(late);
  }
}
