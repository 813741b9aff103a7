// Many callers that do not know the secret, and a peer that does. Handshakes of these servers do not time out
// while a test lasts: a peer gets in only because strangers lose their places.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>

#include "endpoint_fixture.h"
#include "hand_server.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/connect/handshake_messages.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr std::size_t kPlaces = 4;
const EndpointOptions kCrowded{
    .secret = "sesame", .handshake_ns = 600 * kSecond, .prefer_unix_socket = false, .handshakes_max = kPlaces};

std::string address_for(bool tcp) { return tcp ? "tcp:127.0.0.1:0" : fresh_name("unix:@"); }

// A correct hello of a caller that has no proof to send.
Bytes hello(bool tcp) {
  return Handshake(Handshake::Role::kClient, "no idea", tcp ? Channel::kNetwork : Channel::kLocal).start();
}

bool is_over(const Descriptor& socket) {
  pollfd end{socket.get(), POLLRDHUP, 0};
  return poll(&end, 1, 0) == 1;
}

}  // namespace

TEST_CASE("strangers: silent ones and ones without a proof keep nobody out, and cost few descriptors") {
  for (const bool tcp : {true, false}) {
    CAPTURE(tcp);
    Member server("server", kCrowded);
    const std::string at = server.endpoint->listen(address_for(tcp));
    const int before = open_descriptors();
    std::vector<Descriptor> strangers;
    for (int i = 0; i < 300; ++i) {
      strangers.push_back(dial(parse_address(at), NoPatience()));
      if (i % 2 == 0) send_raw(strangers.back(), hello(tcp));
    }
    Member client("client", kCrowded);
    CHECK(client.endpoint->connect(at, in_seconds(60)) != nullptr);
    // Two queues; and the descriptors of the client and its reactor, on both sides.
    CHECK(soon([&] { return open_descriptors() <= before + 300 + static_cast<int>(2 * kPlaces) + 12; }));
    CHECK(
        soon([&] { return static_cast<std::size_t>(std::ranges::count_if(strangers, is_over)) >= 300 - 2 * kPlaces; }));
  }
}

TEST_CASE("strangers: a peer gets in although they come faster than it can") {
  for (const bool tcp : {true, false}) {
    CAPTURE(tcp);
    Member server(
        "server",
        {.secret = "sesame", .handshake_ns = 600 * kSecond, .prefer_unix_socket = false, .handshakes_max = 64});
    const std::string at = server.endpoint->listen(address_for(tcp));
    std::atomic<bool> over{false};
    std::thread flood([&] {
      std::vector<Descriptor> strangers(200);
      for (std::size_t i = 0; !over; ++i) {
        Descriptor& one = strangers[i % strangers.size()];
        one.reset();
        if (error_of([&] { one = dial(parse_address(at), NoPatience()); })) continue;
        if (i % 2 == 0) send_raw(one, hello(tcp));
      }
    });
    for (int round = 0; round < 5; ++round) {
      Member client("client", kCrowded);
      CHECK(client.endpoint->connect(at, in_seconds(60)) != nullptr);
    }
    over = true;
    flood.join();
  }
}

TEST_CASE("strangers: a caller that has proved that it knows the secret keeps its place until its time is over") {
  constexpr std::int64_t kHandshakeNs = 3 * kSecond;
  Member server("server", {.secret = "sesame",
                           .lease_ns = 600 * kSecond,
                           .handshake_ns = kHandshakeNs,
                           .prefer_unix_socket = false,
                           .handshakes_max = kPlaces});
  const std::int64_t begun_ns = monotonic_ns();
  const std::string at = server.endpoint->listen("tcp:127.0.0.1:0");
  const Descriptor slow =
      dial(parse_address(at), NoPatience());  // knows the secret, and takes its time with its metadata
  Handshake handshake(Handshake::Role::kClient, "sesame");
  send_raw(slow, handshake.start());
  while (!handshake.done()) {
    pollfd answer{slow.get(), POLLIN, 0};
    REQUIRE(poll(&answer, 1, 60000) == 1);
    Bytes out;
    handshake.advance(received_raw(slow), out);
    send_raw(slow, out);
  }
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(dial(parse_address(at), NoPatience()));
    if (i % 2 == 0) send_raw(strangers.back(), hello(/*tcp=*/true));
  }
  CHECK(soon([&] { return std::ranges::count_if(strangers, is_over) >= 100 - static_cast<int>(2 * kPlaces); }));
  const bool gone = is_over(slow);
  if (monotonic_ns() - begun_ns < kHandshakeNs) CHECK_FALSE(gone);
  CHECK(soon([&] { return is_over(slow); }));
}

TEST_CASE("strangers: a peer that lost its place to them before its proof calls again") {
  enum class Way : std::uint8_t { kResetAtOnce, kAfterItsHello, kAfterBothHellos };
  for (const Way way : {Way::kResetAtOnce, Way::kAfterItsHello, Way::kAfterBothHellos}) {
    CAPTURE(static_cast<int>(way));
    HandServer server;
    std::thread by_hand([&] {
      const int refusals = way == Way::kAfterBothHellos ? 10 : 4;  // a silent one is called only a few times
      for (int i = 0; i < refusals; ++i) {
        const Descriptor caller = server.accept();
        const linger at_once{1, 0};
        if (way == Way::kResetAtOnce) setsockopt(caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
        if (way == Way::kResetAtOnce) continue;
        std::byte said[44];
        REQUIRE(recv(caller.get(), said, sizeof(said), MSG_WAITALL) == sizeof(said));
        if (way == Way::kAfterItsHello) continue;
        Bytes out;
        Handshake(Handshake::Role::kServer, "sesame").advance(said, out);
        send_raw(caller, out);
      }
      server.meet();
      server.send(FrameKind::kCapabilities, write_body(ServerCapabilities{}));
      CHECK(server.receive().kind_is(FrameKind::kMetadata));
      server.send(FrameKind::kMetadata, write_metadata_body(metadata_of("by hand")));
    });
    Member client("client");
    CHECK(client.endpoint->connect(server.address(), in_seconds(60)) != nullptr);
    by_hand.join();
  }
}

TEST_CASE("strangers: a silent one gives up its descriptor when the process has no other left") {
  Member server("server", {.secret = "sesame", .handshake_ns = 600 * kSecond, .prefer_unix_socket = false});
  const std::string at = server.endpoint->listen(fresh_name("unix:@"));
  const Descriptor silent = dial(parse_address(at), NoPatience());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(is_over(silent));
  const Descriptor next = Descriptor::open([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{static_cast<rlim_t>(open_descriptors() + 4), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<int> taken;
  for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, at.data() + 6, at.size() - 6);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + at.size() - 5);
  CHECK(connect(next.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(soon([&] { return is_over(silent); }));
  CHECK_FALSE(is_over(next));
  for (const int fd : taken) close(fd);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
}
