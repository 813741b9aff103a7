// A peer that knows the secret, and sends whatever a test has forged.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/connect/handshake.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "kvpool/net/frame_reader.h"
#include "kvpool/net/frame_tag.h"
#include "kvpool/transfer/messages.h"
#include "raw_peer.h"
#include "service_kit.h"

namespace kvpool::testing::services {

inline constexpr std::uint32_t kStranger = 77;

class Nobody final : public Patience {
 public:
  void check() const override {}
};

inline PeerMetadata metadata_like(const Pool& pool, std::uint64_t incarnation) {
  PeerMetadata metadata;
  metadata.name = "stranger";
  metadata.instance = kStranger;
  metadata.incarnation = incarnation;
  metadata.pid = 4321;
  metadata.host = "another host";
  metadata.block_tokens = pool.layout().block_tokens;
  metadata.piece_bytes.assign(pool.layout().piece_bytes.begin(), pool.layout().piece_bytes.end());
  metadata.routes = {"sock"};
  const std::uint64_t bytes = pool.layout().block_bytes();
  metadata.media[Medium::kHbm] = {8, 0, {{0x100000, bytes, bytes}}};
  return metadata;
}

// One connection of the stranger: all frames have a MAC, in both directions.
class Stranger final : public FrameSink {
 public:
  Stranger(const std::string& address, const Pool& like, std::uint64_t incarnation)
      : socket_(dial(parse_address(address), Nobody())) {
    Handshake handshake(Handshake::Role::kClient, "s3cret");
    say(handshake.start());
    for (Bytes out; !handshake.done(); say(std::exchange(out, {}))) {
      std::byte bytes[33];  // no message of the server is shorter, or the two that follow each other: nothing is lost
      pollfd ready{socket_.get(), POLLIN, 0};
      poll(&ready, 1, 10'000);
      const ssize_t got = recv(socket_.get(), bytes, sizeof(bytes), 0);
      if (got <= 0) return;  // refused
      const auto taken = handshake.advance({bytes, static_cast<std::size_t>(got)}, out);
      early_.assign(bytes + taken, bytes + got);
    }
    forge_ = std::make_unique<FrameForge>(TagKind::kMac, handshake.keys().send);
    reader_ = std::make_unique<FrameReader>(socket_.get(), TagKind::kMac, handshake.keys().receive, false, *this);
    reader_->put_early(early_, {});
    forge_->add(FrameKind::kMetadata, 0, write_metadata_body(metadata_like(like, incarnation)));
    say(forge_->take());
    for (const std::int64_t until = in_seconds(10); !admitted_ && open_ && monotonic_ns() < until; listen()) {
      pollfd ready{socket_.get(), POLLIN, 0};
      poll(&ready, 1, 100);
    }
  }

  bool admitted() const { return admitted_ && open_; }
  FrameForge& forge() { return *forge_; }
  // Returns when the victim has handled all of it, or has left.
  void flush() {
    forge_->add(FrameKind::kPing);
    say(forge_->take());
    for (++pings_; open_ && pongs_ < pings_; listen()) {
      pollfd ready{socket_.get(), POLLIN, 0};
      poll(&ready, 1, 1000);
    }
  }
  // Sends the forged frames. Returns whether the victim disconnects.
  bool is_left() {
    say(forge_->take());
    for (const std::int64_t until = in_seconds(10); open_ && monotonic_ns() < until; listen()) {
      pollfd ready{socket_.get(), POLLIN, 0};
      poll(&ready, 1, 100);
    }
    return !open_;
  }
  // Reads the answers: the blocks that it was given.
  void listen() {
    try {
      while (open_) {
        while (reader_->step()) {
        }
        const auto filled = reader_->fill();
        if (filled == FrameReader::Filled::kNothing) return;
        if (filled == FrameReader::Filled::kEnd) open_ = false;
      }
    } catch (const Error&) {
      open_ = false;
    }
  }

  Addresses given;  // lent or reserved, perhaps no more
  Addresses lent;   // likewise

 private:
  void on_frame(const FrameHeader& header, Bytes&& body) override {
    const auto kind = static_cast<FrameKind>(header.kind);
    if (kind == FrameKind::kMetadata) admitted_ = true;
    if (kind == FrameKind::kReject || kind == FrameKind::kBye) open_ = false;
    Addresses more;
    if (kind == FrameKind::kPong) ++pongs_;
    const bool answer = kind == FrameKind::kAnswer;
    if (answer && header.verb == kLendVerb.number) more = lent = read_addresses(body);
    if (answer && header.verb == kReserveVerb.number) more = read_reserved(body).addresses;
    given.insert(given.end(), more.begin(), more.end());
  }
  Placement on_data_frame(const FrameHeader&, std::span<const std::byte>) override { return {}; }
  void on_placed_frame(std::uint64_t, bool) override {}

  void say(const Bytes& bytes) {
    for (std::size_t sent = 0; open_ && sent < bytes.size();) {
      const ssize_t got = send(socket_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (got > 0) {
        sent += static_cast<std::size_t>(got);
        continue;
      }
      if (errno != EAGAIN) open_ = false;
      if (reader_ != nullptr) listen();  // or both wait for room
      pollfd room{socket_.get(), POLLOUT, 0};
      poll(&room, 1, 100);
    }
  }

  Descriptor socket_;
  Bytes early_;
  bool open_ = true;
  bool admitted_ = false;
  std::uint64_t pings_ = 0;
  std::uint64_t pongs_ = 0;
  std::unique_ptr<FrameForge> forge_;
  std::unique_ptr<FrameReader> reader_;
};

}  // namespace kvpool::testing::services
