// What protects a connection: which frames have a MAC, and when two peers on one host go on over a Unix socket.
#include <doctest/doctest.h>
#include <poll.h>

#include "endpoint_fixture.h"
#include "hand_server.h"
#include "kvpool/net/connect/endpoint_state.h"
#include "kvpool/net/connect/handshake_messages.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

EndpointOptions with(bool trusted) {
  return {.secret = "sesame", .trusted_network = trusted, .prefer_unix_socket = false};
}

}  // namespace

TEST_CASE("a connection: on TCP frames have a MAC unless both sides declare the network trusted") {
  for (const bool server_trusts : {false, true}) {
    for (const bool client_trusts : {false, true}) {
      CAPTURE(server_trusts);
      CAPTURE(client_trusts);
      HandServer server;  // on loopback, which is a network as any other
      const bool both = server_trusts && client_trusts;
      const TagKind agreed = both ? TagKind::kChecksum : TagKind::kMac;
      std::thread by_hand([&] {
        server.meet();
        server.send(FrameKind::kCapabilities, write_body(ServerCapabilities{server_trusts, {}, {}}));
        const RawFrame metadata = server.receive();
        CHECK(metadata.kind_is(FrameKind::kMetadata));
        CHECK(metadata.has(TagKind::kMac, server.keys().receive));
        CHECK(((metadata.header.flags & kChecksumFlag) != 0) == client_trusts);
        server.send(FrameKind::kMetadata, write_metadata_body(metadata_of("by hand")));
        server.send(FrameKind::kCall, some_bytes(9), agreed);
        RawFrame sent = server.receive();
        while (!sent.kind_is(FrameKind::kCall)) sent = server.receive();
        CHECK(sent.has(agreed, server.keys().receive));
        CHECK(sent.has(TagKind::kChecksum, {}) == both);
      });
      Member client("client", with(client_trusts));
      const auto link = client.endpoint->connect(server.address(), in_seconds(60));
      CHECK(link->drive(in_seconds(60), [&] { return client.handlers[0]->message_count() == 1; }));
      link->send(message_of(FrameKind::kCall, 1, some_bytes(50)));
      by_hand.join();
    }
  }
}

TEST_CASE("a connection: a server says that it trusts the network when its settings do, and never of a Unix socket") {
  for (const bool trusted : {false, true}) {
    Member member("member", with(trusted));
    const auto endpoint_state = EndpointState::make(
        *member.reactor, with(trusted), [] { return Introduction{}; },
        [](const std::shared_ptr<Link>&, const PeerMetadata&, bool) { return nullptr; });
    CHECK(endpoint_state->trusts_network(/*tcp=*/true) == trusted);
    CHECK_FALSE(endpoint_state->trusts_network(/*tcp=*/false));
    CHECK(endpoint_state->capabilities(/*tcp=*/true).checksum == trusted);
    CHECK_FALSE(endpoint_state->capabilities(/*tcp=*/false).checksum);
    endpoint_state->close();
  }
}

TEST_CASE("capabilities: a byte other than 0 or 1 for the checksum is refused") {
  Bytes body = write_body(ServerCapabilities{.checksum = true, .socket_scope = "here", .local_socket = "socket"});
  CHECK(read_capabilities(body).checksum);
  body[0] = std::byte{2};
  CHECK_THROWS_AS(read_capabilities(body), Error);
}

TEST_CASE("a local socket: if it refuses the client, connect() says so and does not fall back to TCP") {
  for (const bool refuses : {true, false}) {
    CAPTURE(refuses);
    HandServer server;
    std::string name = fresh_name("@");
    SockAddress address = parse_address("unix:" + name);
    const Descriptor silent = listen_at(address);  // nothing accepts there
    if (refuses) name += "-is-not-there";
    std::thread by_hand([&] {
      server.meet();
      server.send(FrameKind::kCapabilities, write_body(ServerCapabilities{true, socket_scope(), name.substr(1)}));
      std::byte bytes[4096];
      std::size_t said = 0;
      for (ssize_t got = 1; got > 0; said += static_cast<std::size_t>(std::max<ssize_t>(got, 0))) {
        got = recv(server.socket().get(), bytes, sizeof(bytes), 0);
      }
      CHECK(said < 300);  // no metadata: at most a goodbye
    });
    Member client("client");
    const auto error = error_of([&] { client.endpoint->connect(server.address(), in_seconds(refuses ? 60 : 0.3)); });
    by_hand.join();
    REQUIRE(error);
    CHECK(error->code() == (refuses ? ErrorCode::kPeerLost : ErrorCode::kDeadline));
    const std::string text = error->what();
    for (const std::string& part : {server.address(), "unix:" + name, std::string("prefer_unix_socket")}) {
      CAPTURE(part);
      CHECK(text.find(part) != std::string::npos);
    }
    CHECK(error->fields().empty());
    CHECK(error->cause() == ErrorCause::kOther);  // it is not to be taken for an address without a listener
    CHECK(client.admitted() == 0);
  }
}

TEST_CASE("a local socket: a client ignores one that its settings exclude or that has another scope") {
  for (const bool wanted : {false, true}) {
    CAPTURE(wanted);
    HandServer server;
    std::thread by_hand([&] {
      server.meet();
      const std::string scope = wanted ? host_id() + "-1" : socket_scope();  // another network namespace, or this one
      server.send(FrameKind::kCapabilities, write_body(ServerCapabilities{false, scope, "kvpool-no-such-socket"}));
      CHECK(server.receive().kind_is(FrameKind::kMetadata));
      server.send(FrameKind::kMetadata, write_metadata_body(metadata_of("by hand")));
    });
    Member client("client", {.secret = "sesame", .prefer_unix_socket = wanted});
    const auto link = client.endpoint->connect(server.address(), in_seconds(60));
    by_hand.join();
    CHECK(link->describe().starts_with("tcp 127.0.0.1:"));
    CHECK(link->pidfd() == -1);
  }
}

TEST_CASE("a local socket: strangers at the TCP port and at the socket keep no peer out") {
  Member server("server", {.secret = "sesame", .handshake_ns = 600 * kSecond, .handshakes_max = 4});
  const std::string at = server.endpoint->listen("tcp:127.0.0.1:0");
  Member first("first");
  const auto met = first.endpoint->connect(at, in_seconds(60));
  const std::string local = "@" + first.peers[0].local_socket;
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 50; ++i) {
    strangers.push_back(dial(parse_address(at), NoPatience()));
    strangers.push_back(dial(parse_address("unix:" + local), NoPatience()));
  }
  Member client("client");
  CHECK(client.endpoint->connect(at, in_seconds(60))->describe() == "unix");
}
