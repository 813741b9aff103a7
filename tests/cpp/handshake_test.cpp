#include "kvpool/net/connect/handshake.h"

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

using namespace kvpool;
using Role = Handshake::Role;

namespace {

constexpr std::size_t kHelloBytes = 44;
constexpr std::size_t kProofBytes = 32;

Nonce nonce_of(int value) {
  Nonce nonce;
  nonce.fill(static_cast<std::byte>(value));
  return nonce;
}

Handshake client_of(std::string secret, WireVersions versions = {}, int nonce = 1) {
  return {Role::kClient, std::move(secret), Channel::kNetwork, versions, nonce_of(nonce)};
}
Handshake server_of(std::string secret, WireVersions versions = {}, int nonce = 2) {
  return {Role::kServer, std::move(secret), Channel::kNetwork, versions, nonce_of(nonce)};
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(byte) >> 4];
    text += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return text;
}

// The result of one side's handshake.
struct Outcome {
  Bytes out;
  bool failed = false;
  ErrorCode code{};
  std::string text;
};

Outcome feed(Handshake& side, const Bytes& in) {
  Outcome outcome;
  try {
    const std::size_t taken = side.advance(in, outcome.out);
    CHECK(taken == in.size());
  } catch (const Error& error) {
    outcome.failed = true;
    outcome.code = error.code();
    outcome.text = error.what();
  }
  return outcome;
}

// All four messages, with a man in the middle who may change each.
struct Meeting {
  Outcome hello_at_server, hello_at_client, proof_at_server, proof_at_client;
  using Meddle = std::function<void(int message, Bytes& bytes)>;

  Meeting(Handshake& client, Handshake& server, const Meddle& meddle = [](int, Bytes&) {}) {
    Bytes bytes = client.start();
    meddle(0, bytes);
    hello_at_server = feed(server, bytes);
    meddle(1, hello_at_server.out);
    hello_at_client = feed(client, hello_at_server.out);
    if (hello_at_server.failed || hello_at_client.failed) return;
    meddle(2, hello_at_client.out);
    proof_at_server = feed(server, hello_at_client.out);
    meddle(3, proof_at_server.out);
    proof_at_client = feed(client, proof_at_server.out);
  }
};

}  // namespace

TEST_CASE("two sides that know the secret agree on a version and on a key for each direction") {
  Handshake client(Role::kClient, "a secret");
  Handshake server(Role::kServer, "a secret");
  CHECK(server.start().empty());
  const Meeting meeting(client, server);
  REQUIRE(client.done());
  REQUIRE(server.done());
  CHECK(meeting.hello_at_server.out.size() == kHelloBytes);
  CHECK(meeting.hello_at_client.out.size() == kProofBytes);
  CHECK(meeting.proof_at_server.out.size() == 1 + kProofBytes);
  CHECK(meeting.proof_at_client.out.empty());
  CHECK(client.version() == kWireVersionMax);
  CHECK(server.version() == kWireVersionMax);
  CHECK(client.keys().send == server.keys().receive);
  CHECK(client.keys().receive == server.keys().send);
  CHECK(client.keys().send != client.keys().receive);
}

TEST_CASE("bytes may arrive one by one, and those behind the handshake are left for the frames") {
  Handshake client = client_of("s");
  Handshake server = server_of("s");
  Bytes to_server = client.start();
  Bytes to_client;
  for (int round = 0; round < 2; ++round) {
    for (const std::byte byte : to_server) CHECK(server.advance(std::span(&byte, 1), to_client) == 1);
    to_server.clear();
    const std::size_t handshake_bytes = to_client.size();
    if (round == 1) to_client.resize(to_client.size() + 100);
    CHECK(client.advance(to_client, to_server) == handshake_bytes);
    to_client.clear();
  }
  CHECK(client.done());
  CHECK(server.done());
  CHECK(server.advance(Bytes(10), to_client) == 0);
}

TEST_CASE("an empty secret matches only an empty secret") {
  Handshake client = client_of("");
  Handshake server = server_of("");
  const Meeting meeting(client, server);
  CHECK(client.done());
  Handshake other_client = client_of("");
  Handshake other_server = server_of("x");
  const Meeting other_meeting(other_client, other_server);
  CHECK(other_meeting.proof_at_server.code == ErrorCode::kAuth);
}

TEST_CASE("a wrong secret is an AuthError on both sides") {
  for (const auto& [mine, theirs] : {std::pair("a", "b"), std::pair("a", ""), std::pair("secret", "secret ")}) {
    Handshake client = client_of(mine);
    Handshake server = server_of(theirs);
    const Meeting meeting(client, server);
    REQUIRE(meeting.proof_at_server.failed);
    CHECK(meeting.proof_at_server.code == ErrorCode::kAuth);
    CHECK(meeting.proof_at_server.out.size() == 1);  // the verdict, and no proof to guess secrets from
    REQUIRE(meeting.proof_at_client.failed);
    CHECK(meeting.proof_at_client.code == ErrorCode::kAuth);
    CHECK_FALSE(client.done());
    CHECK_FALSE(server.done());
    CHECK(feed(server, Bytes(1)).failed);  // no second try
    CHECK(feed(client, Bytes(1)).failed);
  }
}

TEST_CASE("the highest common version is chosen, and without one both sides list their versions") {
  struct Case {
    WireVersions client, server;
    int version;
  };
  for (const Case& c : {Case{{1, 1}, {1, 1}, 1}, Case{{1, 5}, {1, 3}, 3}, Case{{2, 4}, {3, 65535}, 4},
                        Case{{1, 2}, {3, 4}, 0}, Case{{65535, 65535}, {1, 1}, 0}, Case{{7, 7}, {1, 9}, 7}}) {
    Handshake client = client_of("s", c.client);
    Handshake server = server_of("s", c.server);
    const Meeting meeting(client, server);
    CHECK(client.done() == (c.version != 0));
    CHECK(server.done() == (c.version != 0));
    if (c.version != 0) {
      CHECK(client.version() == c.version);
      CHECK(server.version() == c.version);
      continue;
    }
    for (const Outcome* outcome : {&meeting.hello_at_server, &meeting.hello_at_client}) {
      REQUIRE(outcome->failed);
      CHECK(outcome->code == ErrorCode::kProtocol);
      for (const int version : {c.client.min, c.client.max, c.server.min, c.server.max}) {
        CHECK(outcome->text.find(std::to_string(version)) != std::string::npos);
      }
    }
  }
}

TEST_CASE("a change of any byte on the way is detected, and no side gets keys") {
  const std::size_t lengths[] = {kHelloBytes, kHelloBytes, kProofBytes, 1 + kProofBytes};
  for (int message = 0; message < 4; ++message) {
    for (std::size_t at = 0; at < lengths[message]; ++at) {
      for (const std::byte flip : {std::byte{1}, std::byte{0x80}}) {
        Handshake client = client_of("s", {1, 300});
        Handshake server = server_of("s", {1, 300});
        const Meeting meeting(client, server, [&](int now, Bytes& bytes) {
          if (now == message) bytes.at(at) ^= flip;
        });
        CAPTURE(message);
        CAPTURE(at);
        REQUIRE_FALSE(client.done());
        REQUIRE((server.done() == (message == 3)));  // it has said its last word before the change
      }
    }
  }
}

TEST_CASE("an attacker in the middle cannot lower the protocol version") {
  const auto lower = [](Bytes& hello) { hello[8] = std::byte{1}; };  // version_max
  for (const bool both : {false, true}) {
    Handshake client = client_of("s", {1, 2});
    Handshake server = server_of("s", {1, 2});
    const Meeting meeting(client, server, [&](int now, Bytes& bytes) {
      if (now == 0 || (now == 1 && both)) lower(bytes);
    });
    CHECK_FALSE(client.done());
    CHECK_FALSE(server.done());
    // With both changed, the versions fit and only the proof gives the forgery away.
    if (both) CHECK(meeting.proof_at_server.code == ErrorCode::kAuth);
    if (!both) CHECK(meeting.hello_at_client.code == ErrorCode::kProtocol);
  }
}

TEST_CASE("a relay between a network and a Unix socket gains nothing from either side") {
  const auto side = [](Role role, Channel channel) {
    return Handshake(role, "s", channel, {}, nonce_of(static_cast<int>(role)));
  };
  for (const Channel channel : {Channel::kNetwork, Channel::kLocal}) {
    Handshake client = side(Role::kClient, channel);
    Handshake server = side(Role::kServer, channel);
    const Meeting meeting(client, server);
    CHECK(client.done());
    CHECK(server.done());
  }
  for (const bool forged : {false, true}) {
    Handshake client = side(Role::kClient, Channel::kNetwork);
    Handshake server = side(Role::kServer, Channel::kLocal);
    const Meeting meeting(client, server, [&](int message, Bytes& bytes) {
      if (forged && message < 2) bytes[5] = static_cast<std::byte>(message == 0 ? Channel::kLocal : Channel::kNetwork);
    });
    CHECK_FALSE(client.done());
    CHECK_FALSE(server.done());
    // Not even if he shows each side what it expects: then the proof gives it away.
    if (forged) CHECK(meeting.proof_at_server.code == ErrorCode::kAuth);
    if (!forged) CHECK(meeting.hello_at_server.code == ErrorCode::kProtocol);
    if (!forged) CHECK(meeting.hello_at_client.code == ErrorCode::kProtocol);  // and is told why
  }
}

TEST_CASE("a proof cannot be reflected") {
  // The attacker knows no secret. He plays the server for a client and answers with the client's own words.
  Handshake client = client_of("s");
  CHECK(feed(client, client.start()).code == ErrorCode::kProtocol);

  // He calls a server while a client of the same cluster calls him, and uses the client's nonce and then its proof as
  // his own server's proof.
  Handshake victim = client_of("s");
  Bytes hello = victim.start();
  hello[4] = std::byte{2};  // role: server
  hello[10] = std::byte{kWireVersionMax};
  const Outcome proof = feed(victim, hello);
  REQUIRE(proof.out.size() == kProofBytes);
  Bytes answer{std::byte{1}};
  answer.insert(answer.end(), proof.out.begin(), proof.out.end());
  const Outcome end = feed(victim, answer);
  CHECK(end.code == ErrorCode::kAuth);
  CHECK_FALSE(victim.done());

  // The other way round: a client that repeats the server's messages.
  Handshake server = server_of("s");
  Handshake caller = client_of("s", {}, 2);
  const Outcome heard = feed(server, caller.start());
  Bytes echo(heard.out.begin(), heard.out.begin() + kProofBytes);
  CHECK(feed(server, echo).code == ErrorCode::kAuth);
}

TEST_CASE("a recorded client is refused by the next server, though it knew the secret") {
  Handshake client = client_of("s");
  Handshake server = server_of("s");
  const Bytes hello = client.start();
  const Outcome answer = feed(server, hello);
  const Outcome proof = feed(client, answer.out);
  feed(server, proof.out);
  REQUIRE(server.done());

  Handshake next = server_of("s", {}, 3);
  CHECK_FALSE(feed(next, hello).failed);
  CHECK(feed(next, proof.out).code == ErrorCode::kAuth);
}

TEST_CASE("a recorded server is refused by the next client, though it knew the secret") {
  Handshake client = client_of("s");
  Handshake server = server_of("s");
  const Meeting meeting(client, server);
  REQUIRE(client.done());
  Handshake next = client_of("s", {}, 4);
  next.start();
  CHECK_FALSE(feed(next, meeting.hello_at_server.out).failed);
  CHECK(feed(next, meeting.proof_at_server.out).code == ErrorCode::kAuth);
}

TEST_CASE("keys differ as soon as one of the two nonces does") {
  std::set<Key> keys;
  for (int client_nonce = 1; client_nonce <= 3; ++client_nonce) {
    for (int server_nonce = 1; server_nonce <= 3; ++server_nonce) {  // also where both are the same
      Handshake client = client_of("s", {}, client_nonce);
      Handshake server = server_of("s", {}, server_nonce);
      const Meeting meeting(client, server);
      REQUIRE(client.done());
      keys.insert(client.keys().send);
      keys.insert(client.keys().receive);
    }
  }
  CHECK(keys.size() == 18);
  Handshake client = client_of("another secret");
  Handshake server = server_of("another secret");
  const Meeting meeting(client, server);
  keys.insert(client.keys().send);
  CHECK(keys.size() == 19);
}

TEST_CASE("nonces come from the kernel, a new one for every handshake") {
  std::set<Bytes> hellos;
  for (int i = 0; i < 100; ++i) hellos.insert(Handshake(Role::kClient, "s").start());
  CHECK(hellos.size() == 100);
}

TEST_CASE("a peer that is not kvpool is recognised by its first bytes") {
  for (const std::string_view text : {"G", "GET / HTTP/1.1\r\n", "KVPM", "\x16\x03\x01", "SSH-2.0-OpenSSH_9.2"}) {
    Bytes bytes;
    WireWriter(bytes).raw(text.data(), text.size());
    for (Handshake side : {client_of("s"), server_of("s")}) {
      const Outcome outcome = feed(side, bytes);
      CHECK(outcome.failed);
      CHECK(outcome.code == ErrorCode::kProtocol);
      CHECK(outcome.out.empty());  // nothing is said to strangers
    }
  }
  Handshake server = server_of("s");
  Bytes out;
  const Bytes beginning{std::byte{'K'}, std::byte{'V'}};
  CHECK(server.advance(beginning, out) == 2);  // not yet
}

TEST_CASE("two clients or two servers refuse each other") {
  Handshake one = client_of("s");
  Handshake two = client_of("s", {}, 2);
  CHECK(feed(one, two.start()).code == ErrorCode::kProtocol);
  Handshake server = server_of("s");
  Handshake other = server_of("s", {}, 3);
  const Outcome answer = feed(server, client_of("s").start());
  CHECK(feed(other, answer.out).code == ErrorCode::kProtocol);
}

TEST_CASE("senseless versions are refused") {
  const auto with = [](std::uint16_t min, std::uint16_t max, std::uint16_t version) {
    Bytes hello = client_of("s").start();
    std::memcpy(&hello[6], &min, 2);
    std::memcpy(&hello[8], &max, 2);
    std::memcpy(&hello[10], &version, 2);
    Handshake server = server_of("s");
    return feed(server, hello).code;
  };
  CHECK(with(0, 1, 0) == ErrorCode::kProtocol);
  CHECK(with(0, 0, 0) == ErrorCode::kProtocol);
  CHECK(with(2, 1, 0) == ErrorCode::kProtocol);
  CHECK(with(1, 1, 1) == ErrorCode::kProtocol);
}

// Computed by another implementation of docs/wire.md, in Python.
TEST_CASE("the bytes of a handshake are those of docs/wire.md") {
  Handshake client = client_of("a secret");
  Handshake server = server_of("a secret");
  std::vector<Bytes> messages;
  const Meeting meeting(client, server, [&](int, Bytes& bytes) { messages.push_back(bytes); });
  Bytes expected;
  WireWriter writer(expected);
  writer.raw("KVPL", 4).number(std::uint8_t{1}).number(std::uint8_t{1});
  writer.number(std::uint16_t{4}).number(std::uint16_t{4});
  writer.number(std::uint16_t{0}).raw(nonce_of(1).data(), 32);
  CHECK(messages.at(0) == expected);
  CHECK(hex(messages.at(1)) ==
        "4b56504c02010400040004000202020202020202020202020202020202020202020202020202020202020202");
  CHECK(hex(messages.at(2)) == "3e97d4c96a0011822ad6fc45a6fac7e8bb2db0124861c16c8354463a8b0a15dd");
  CHECK(hex(messages.at(3)) == "0167f0708177f705cbb4d6736ad26cf36f882ded83bfb42f8a8fec62d620366b37");
  CHECK(hex(client.keys().send) == "b80ce814e4f75c174b9a85ce5c502d41dbeb01a0ae24ee71683deb04173ea7b2");
  CHECK(hex(client.keys().receive) == "e933997811dc0ee98058cc5982fe9a807c1c403db66e15af224c4332434da933");
}
