// A server by hand: it takes part in the handshake, and then sends what a test wants.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <cstring>
#include <string>
#include <utility>

#include "kvpool/net/connect/handshake.h"
#include "kvpool/net/frame_tag.h"
#include "kvpool/net/sock_address.h"
#include "raw_peer.h"

namespace kvpool::testing {

// One frame as it went over the wire.
struct RawFrame {
  FrameHeader header{};
  Bytes body;
  Tag tag{};

  bool kind_is(FrameKind kind) const { return header.kind == static_cast<std::uint8_t>(kind); }
  // That the tag is the MAC, or the checksum, of this frame.
  bool has(TagKind kind, const Key& key) const {
    FrameTag expected(kind, key);
    expected.begin();
    expected.update(&header, sizeof(header));
    expected.update(body.data(), body.size());
    return expected.finish() == tag;
  }
};

class HandServer {
 public:
  explicit HandServer(const std::string& at = "tcp:127.0.0.1:0")
      : address_(parse_address(at)), listener_(listen_at(address_)) {}

  std::string address() const { return format_address(address_); }
  // A caller; of none for ten seconds, no socket.
  Descriptor accept() const {
    pollfd caller{listener_.get(), POLLIN, 0};
    poll(&caller, 1, 10000);
    return Descriptor::open([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC); });
  }
  // Accepts a caller, and proves that it knows the secret.
  void meet(const std::string& secret = "sesame") {
    socket_ = accept();
    Handshake handshake(Handshake::Role::kServer, secret);
    std::byte bytes[4096];
    while (!handshake.done()) {
      const ssize_t got = recv(socket_.get(), bytes, sizeof(bytes), 0);
      REQUIRE(got > 0);
      Bytes out;
      handshake.advance({bytes, static_cast<std::size_t>(got)}, out);
      send_raw(socket_, out);
    }
    keys_ = handshake.keys();
  }
  void send(FrameKind kind, const Bytes& body, TagKind tag_kind = TagKind::kMac) {
    FrameHeader header{};
    header.kind = static_cast<std::uint8_t>(kind);
    header.sequence = ++sequence_;
    header.body_bytes = static_cast<std::uint32_t>(body.size());
    FrameTag tag(tag_kind, keys_.send);
    tag.begin();
    tag.update(&header, sizeof(header));
    tag.update(body.data(), body.size());
    const Tag sum = tag.finish();
    Bytes all(sizeof(header) + body.size() + sum.size());
    std::memcpy(all.data(), &header, sizeof(header));
    std::copy(body.begin(), body.end(), all.begin() + sizeof(header));
    std::copy(sum.begin(), sum.end(), all.end() - static_cast<std::ptrdiff_t>(sum.size()));
    send_raw(socket_, all);
  }
  RawFrame receive() {
    RawFrame frame;
    take(&frame.header, sizeof(frame.header));
    frame.body.resize(frame.header.body_bytes);
    take(frame.body.data(), frame.body.size());
    take(frame.tag.data(), frame.tag.size());
    return frame;
  }
  const SessionKeys& keys() const { return keys_; }
  const Descriptor& socket() const { return socket_; }
  void hang_up() { socket_.reset(); }

 private:
  void take(void* to, std::size_t bytes) {
    REQUIRE(recv(socket_.get(), to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
  }

  SockAddress address_;
  Descriptor listener_;
  Descriptor socket_;
  SessionKeys keys_{};
  std::uint64_t sequence_ = 0;
};

}  // namespace kvpool::testing
