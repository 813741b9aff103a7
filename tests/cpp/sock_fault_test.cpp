// What a link does when its peer or the network misbehaves.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>

#include "child_process.h"
#include "fuzz_seeds.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/keepalive.h"
#include "kvpool/net/reactor.h"
#include "raw_peer.h"
#include "sock_fixture.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr std::size_t kSpan = 300;

// A conversation with every kind of frame in it, as a peer on the right would send it.
Bytes conversation(Wire wire) {
  FrameForge forge(wire, /*left=*/false);
  forge.add(FrameKind::kMetadata);
  forge.add(FrameKind::kCall, 1, some_bytes(20));
  forge.add(FrameKind::kData, 2, some_bytes(24), some_bytes(kSpan));
  forge.add(FrameKind::kPing);
  forge.add(FrameKind::kFlush, 3, some_bytes(50));
  return forge.take();
}

struct Victim {
  explicit Victim(Wire wire) : reactor(std::make_unique<Reactor>("victim")) {
    auto [mine, theirs] = socket_pair(wire);
    peer = std::move(theirs);
    end.handler->place = [this](std::uint64_t id, std::uint64_t bytes) {
      return Placement{{{target.data(), bytes}}, id};
    };
    start(end, *reactor, parts_of(std::move(mine), wire, true, std::size_t{1} << 20));
  }
  ~Victim() {
    end.link->close(Error(ErrorCode::kClosed, "the test is over"));
    reactor->stop();
    CHECK(end.handler->closed == 1);
    CHECK_FALSE(end.handler->overlapped);
  }
  Bytes target = Bytes(std::size_t{1} << 20);
  std::unique_ptr<Reactor> reactor;
  End end;
  Descriptor peer;
};

const Wire kWires[] = {Wire::kUnix, Wire::kTcpChecksum, Wire::kTcpMac};

}  // namespace

TEST_CASE("a link: a connection that ends at any byte does no harm") {
  for (const Wire wire : kWires) {
    CAPTURE(name_of(wire));
    const Bytes bytes = conversation(wire);
    for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
      CAPTURE(cut);
      Victim victim(wire);
      send_raw(victim.peer, {bytes.data(), cut});
      victim.peer.reset();
      const auto& handler = *victim.end.handler;
      REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
      CHECK(victim.end.handler->why()->code() == ErrorCode::kPeerLost);
      // Every payload that a place was asked for was reported, once.
      REQUIRE(handler.placed.size() == handler.data_ids.size());
      if (cut == bytes.size()) {
        REQUIRE(handler.placed.size() == 1);
        CHECK(handler.placed[0] == std::pair<std::uint64_t, bool>(2, true));
        CHECK(handler.messages.size() == 2);
      }
    }
  }
}

TEST_CASE("a link: bytes may arrive one at a time") {
  for (const Wire wire : kWires) {
    CAPTURE(name_of(wire));
    const Bytes bytes = conversation(wire);
    Victim victim(wire);
    for (const std::byte& byte : bytes) send_raw(victim.peer, {&byte, 1});
    REQUIRE(soon([&] { return victim.end.handler->message_count() == 2; }));
    CHECK(victim.end.handler->messages[1].body == some_bytes(50));
    CHECK(std::equal(victim.target.begin(), victim.target.begin() + kSpan, some_bytes(kSpan).begin()));
  }
}

TEST_CASE("a link: every flipped bit on a TCP connection is detected, and closes it") {
  for (const Wire wire : {Wire::kTcpChecksum, Wire::kTcpMac}) {
    CAPTURE(name_of(wire));
    const Bytes bytes = conversation(wire);
    const std::size_t metadata = 32 + kTagBytes;
    for (std::size_t at = metadata; at < bytes.size(); at += wire == Wire::kTcpMac ? 1 : 3) {
      CAPTURE(at);
      Bytes flipped = bytes;
      flipped[at] ^= static_cast<std::byte>(1U << at % 8);
      Victim victim(wire);
      send_raw(victim.peer, flipped);
      shutdown(victim.peer.get(), SHUT_WR);
      REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
      const auto& handler = *victim.end.handler;
      REQUIRE(handler.placed.size() == handler.data_ids.size());
      // Payloads that are handed over are as they were sent, or are reported as damaged.
      for (const Message& message : handler.messages) {
        CHECK(message.body == some_bytes(message.kind == FrameKind::kCall ? 20 : 50));
      }
      CHECK(handler.messages.size() < 2);
      for (const auto& [token, intact] : handler.placed) {
        if (intact) CHECK(std::equal(victim.target.begin(), victim.target.begin() + kSpan, some_bytes(kSpan).begin()));
      }
    }
  }
}

TEST_CASE("a link: frames that no correct peer sends close it") {
  struct Wrong {
    const char* what;
    std::function<void(FrameForge&)> forge;
  };
  const Wrong wrongs[] = {
      {"an unknown kind", [](FrameForge& f) { f.add_header(std::uint8_t{99}); }},
      {"kind 0", [](FrameForge& f) { f.add_header(std::uint8_t{0}); }},
      {"a second metadata", [](FrameForge& f) { f.add(FrameKind::kMetadata); }},
      {"capabilities", [](FrameForge& f) { f.add(FrameKind::kCapabilities); }},
      {"a payload of a message", [](FrameForge& f) { f.add(FrameKind::kCall, 1, {}, some_bytes(8)); }},
      {"data without a payload", [](FrameForge& f) { f.add(FrameKind::kData, 1, some_bytes(24)); }},
      {"a body of a ping", [](FrameForge& f) { f.add(FrameKind::kPing, 1, some_bytes(8)); }},
      {"a huge body",
       [](FrameForge& f) {
         f.header.body_bytes = kBodyBytesMax + 1;
         f.add_header(FrameKind::kCall);
       }},
      {"the hugest body",
       [](FrameForge& f) {
         f.header.body_bytes = UINT32_MAX;
         f.add_header(FrameKind::kCall);
       }},
      {"a body that its verb does not have, and of which nothing has come yet",
       [](FrameForge& f) {
         f.header.verb = kShortVerb;
         f.header.body_bytes = 5;
         f.add_header(FrameKind::kCall);
       }},
      {"a huge payload",
       [](FrameForge& f) {
         f.header.payload_bytes = kPayloadBytesMax + 1;
         f.add_header(FrameKind::kData);
       }},
      {"the hugest payload",
       [](FrameForge& f) {
         f.header.payload_bytes = UINT32_MAX;
         f.add_header(FrameKind::kData);
       }},
      {"a verb in a frame that has none",
       [](FrameForge& f) {
         f.header.verb = 1;
         f.add_header(FrameKind::kFlush);
       }},
      {"a lifetime of what is no call",
       [](FrameForge& f) {
         f.header.lifetime_ms = 1;
         f.add_header(FrameKind::kAnswer);
       }},
      {"a cancellation that says more", [](FrameForge& f) { f.add(FrameKind::kCancel, 1, some_bytes(8)); }},
      {"a leave that says more", [](FrameForge& f) { f.add(FrameKind::kLeave, 0, some_bytes(8)); }},
      {"a frame again",
       [](FrameForge& f) {
         f.sequence -= 1;
         f.add(FrameKind::kCall);
       }},
      {"a frame left out",
       [](FrameForge& f) {
         f.sequence += 1;
         f.add(FrameKind::kCall);
       }},
      {"a long farewell", [](FrameForge& f) { f.add(FrameKind::kBye, 0, some_bytes(5000)); }},
  };
  for (const Wire wire : kWires) {
    for (const Wrong& wrong : wrongs) {
      CAPTURE(name_of(wire));
      CAPTURE(wrong.what);
      Victim victim(wire);
      FrameForge forge(wire, false);
      forge.add(FrameKind::kMetadata);
      wrong.forge(forge);
      send_raw(victim.peer, forge.take());
      REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
      CHECK(victim.end.handler->why()->code() == ErrorCode::kProtocol);
      CHECK(victim.end.handler->messages.empty());
    }
  }
}

TEST_CASE("a link: only peer metadata is accepted before the peer is admitted") {
  for (const FrameKind kind : {FrameKind::kCall, FrameKind::kData, FrameKind::kAnswer}) {
    Victim victim(Wire::kUnix);
    FrameForge forge(Wire::kUnix, false);
    forge.add(kind, 1, some_bytes(10), kind == FrameKind::kData ? some_bytes(10) : Bytes{});
    send_raw(victim.peer, forge.take());
    REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
    CHECK(victim.end.handler->why()->code() == ErrorCode::kProtocol);
  }
}

TEST_CASE("a link: a farewell and a refusal are passed on, whatever they contain") {
  Dice dice(42);
  for (int round = 0; round < 40; ++round) {
    Victim victim(Wire::kUnix);
    FrameForge forge(Wire::kUnix, false);
    forge.add(FrameKind::kMetadata);
    Bytes body(dice.below(60));
    for (auto& byte : body) byte = static_cast<std::byte>(dice.any());
    forge.add(round % 2 == 0 ? FrameKind::kBye : FrameKind::kReject, 0, body);
    send_raw(victim.peer, forge.take());
    REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
    for (const char c : std::string(victim.end.handler->why()->what())) {
      CHECK((static_cast<unsigned char>(c) >= 0x20 && c != 0x7f));
    }
  }
  Victim victim(Wire::kUnix);
  FrameForge forge(Wire::kUnix, false);
  forge.add(FrameKind::kReject, 0, write_reject(Error(ErrorCode::kLayoutMismatch, "other blocks")));
  send_raw(victim.peer, forge.take());
  REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
  CHECK(victim.end.handler->why()->code() == ErrorCode::kLayoutMismatch);
  CHECK(std::string(victim.end.handler->why()->what()) == "other blocks");
}

TEST_CASE("a link: unexpected descriptors are closed, and so is the link") {
  const int file = memfd_create("kvpool-test", MFD_CLOEXEC);
  REQUIRE(file >= 0);
  const int before = open_descriptors();
  struct Try {
    int count;
    std::uint8_t flags;
    bool fits;
  };
  for (const auto& [count, flags, fits] :
       {Try{0, 0, true}, Try{1, 1, true}, Try{3, 13, true}, Try{4, 15, true}, Try{1, 0, false}, Try{0, 1, false},
        Try{2, 7, false}, Try{5, 15, false}, Try{64, 15, false}, Try{0, 32, false}, Try{1, 129, false}}) {
    CAPTURE(count);
    CAPTURE(static_cast<int>(flags));
    {
      Victim victim(Wire::kUnix);
      FrameForge forge(Wire::kUnix, false);
      forge.header.flags = flags;
      forge.add(FrameKind::kMetadata);
      send_raw(victim.peer, forge.take(), std::vector<int>(static_cast<std::size_t>(count), file));
      if (fits) {
        forge.header.flags = 0;
        forge.add(FrameKind::kCall, 1);
        send_raw(victim.peer, forge.take());
        REQUIRE(soon([&] { return victim.end.handler->message_count() == 1; }));
        for (std::size_t i = 0; i < 5; ++i) CHECK((victim.end.link->descriptor(i) >= 0) == ((flags >> i & 1U) != 0));
        // After the meeting none may come at all.
        forge.add(FrameKind::kCall, 2);
        send_raw(victim.peer, forge.take(), {file});
      }
      REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
      CHECK(victim.end.handler->why()->code() == ErrorCode::kProtocol);
    }
    CHECK(open_descriptors() == before);
  }
  close(file);
}

TEST_CASE("a link: a peer that is silent for the lease is lost; one that answers is not") {
  constexpr std::int64_t kLease = 300'000'000;
  const auto asked_more_than_once = [kLease](Wire wire) {
    Victim victim(wire);
    FrameForge forge(wire, false);
    forge.add(FrameKind::kMetadata);
    send_raw(victim.peer, forge.take());
    const auto keepalive = std::make_shared<LinkKeepalive>(*victim.reactor, kLease);
    const std::int64_t begun = monotonic_ns();
    keepalive->add(victim.end.link);
    REQUIRE(soon([&] { return victim.end.handler->closed_count() == 1; }));
    CHECK(victim.end.handler->why()->code() == ErrorCode::kPeerLost);
    CHECK(std::string(victim.end.handler->why()->what()).find("silent for") != std::string::npos);
    CHECK(monotonic_ns() - begun >= kLease / 2);
    return received_raw(victim.peer).size() >= 3 * 32;
  };
  for (const Wire wire : {Wire::kUnix, Wire::kTcpMac}) {
    // It is asked for a sign of life, unless a busy machine delays that for too long.
    bool asked = false;
    for (int i = 0; i < 10 && !asked; ++i) asked = asked_more_than_once(wire);
    CHECK(asked);
  }
  constexpr std::int64_t kLonger = 4'000'000'000;  // a busy machine may delay answers for some time
  LinkPair pair(Wire::kUnix);
  const auto left = std::make_shared<LinkKeepalive>(*pair.left_reactor, kLonger);
  const auto right = std::make_shared<LinkKeepalive>(*pair.right_reactor, kLonger);
  left->add(pair.left.link);
  right->add(pair.right.link);
  std::this_thread::sleep_for(std::chrono::nanoseconds(3 * kLonger / 2));
  CHECK(pair.left.handler->closed_count() == 0);
  CHECK(pair.right.handler->closed_count() == 0);
}

TEST_CASE("a link: two idle links rarely wake their reactors") {
  constexpr std::int64_t kLease = 3'000'000'000;
  LinkPair pair(Wire::kUnix);
  const auto left = std::make_shared<LinkKeepalive>(*pair.left_reactor, kLease);
  const auto right = std::make_shared<LinkKeepalive>(*pair.right_reactor, kLease);
  left->add(pair.left.link);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  right->add(pair.right.link);
  const std::uint64_t before_left = pair.left_reactor->wakeups();
  const std::uint64_t before_right = pair.right_reactor->wakeups();
  std::this_thread::sleep_for(std::chrono::milliseconds(3000));
  const auto left_woke = pair.left_reactor->wakeups() - before_left;
  const auto right_woke = pair.right_reactor->wakeups() - before_right;
  std::printf("wake-ups in 3 s of a quiet link: %d and %d\n", static_cast<int>(left_woke),
              static_cast<int>(right_woke));
  CHECK(left_woke <= 3 * 5);
  CHECK(right_woke <= 3 * 5);
}

TEST_CASE("a link: a forked child keeps no part of it open") {
  LinkPair pair(Wire::kUnix);
  pair.left.link->send(message_of(FrameKind::kCall, 1));
  REQUIRE(soon([&] { return pair.right.handler->message_count() == 1; }));
  int hold[2];
  REQUIRE(pipe(hold) == 0);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    bool fine = !pair.left.link->drive(in_seconds(10), [] { return false; });
    pair.left.link->close(Error(ErrorCode::kClosed, "not mine"));
    pair.left.link->wake();
    try {
      pair.left.link->send(message_of(FrameKind::kCall, 2));
      fine = false;
    } catch (const Error& error) {
      fine = fine && error.code() == ErrorCode::kFork;
    }
    pair.left.link.reset();
    char byte = 0;
    close(hold[1]);
    [[maybe_unused]] const auto got = read(hold[0], &byte, 1);  // lives on until the parent has seen enough
    _exit(fine ? 0 : 1);
  }
  // The parent's end is closed: the peer sees it at once, though the child lives.
  pair.left.link->close(Error(ErrorCode::kClosed, "over"));
  CHECK(soon([&] { return pair.right.handler->closed_count() == 1; }));
  close(hold[0]);
  close(hold[1]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a link: its reactor may stop first") {
  for (const bool driven : {false, true}) {
    LinkPair pair(Wire::kUnix);
    std::thread driver;
    if (driven) {
      driver = std::thread([&] { CHECK_FALSE(pair.left.link->drive(in_seconds(30), [] { return false; })); });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    pair.left_reactor->stop();
    if (driven) driver.join();
    CHECK(pair.left.handler->closed_count() == 1);
    CHECK(soon([&] { return pair.right.handler->closed_count() == 1; }));
  }
}

TEST_CASE("a link: links that come and go leave nothing behind") {
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    LinkPair pair(kWires[i % 3]);
    pair.left.link->send(message_of(FrameKind::kCall, 1));
    pair.left.link->drive(in_seconds(0.001), [] { return false; });
  }
  CHECK(open_descriptors() == before);
}
