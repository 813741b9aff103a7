// Links between two ends of one socket pair, and a handler that records its calls.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/net/sock_address.h"
#include "kvpool/net/sock_link.h"
#include "open_descriptors.h"
#include "soon.h"

namespace kvpool::testing {

inline constexpr std::int64_t kSecond = 1'000'000'000;

inline Bytes some_bytes(std::size_t count, unsigned seed = 1) {
  Bytes bytes(count);
  std::uint64_t word = seed;
  for (std::size_t i = 0; i < count; i += sizeof word) {
    word = word * 6364136223846793005 + 1442695040888963407;  // a linear congruential generator: Knuth, MMIX
    const std::uint64_t mixed = word ^ (word >> 32);
    std::memcpy(bytes.data() + i, &mixed, std::min(count - i, sizeof mixed));
  }
  return bytes;
}

inline constexpr std::uint16_t kShortVerb = 999;  // of calls with a body of 4 bytes at most

// Records what came. Places the payload of a data frame into `pieces`.
class Recorder : public LinkHandler {
 public:
  std::size_t body_bytes_max(FrameKind, std::uint16_t verb) const noexcept override {
    return verb == kShortVerb ? 4 : kBodyBytesMax;
  }
  void on_message(Message&& message) override {
    enter();
    if (throws) leave();
    if (answer) answer(message);
    if (keep_messages) {
      const std::lock_guard lock(mutex);
      messages.push_back(std::move(message));
    }
    leave();
  }
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override {
    enter();
    Placement placement;
    {
      const std::lock_guard lock(mutex);
      data_ids.push_back(id);
      data_bodies.emplace_back(body.begin(), body.end());
    }
    if (place) placement = place(id, payload_bytes);
    leave();
    return placement;
  }
  void on_placed(std::uint64_t token, bool intact) override {
    enter();
    {
      const std::lock_guard lock(mutex);
      placed.emplace_back(token, intact);
    }
    if (after_placed) after_placed();
    leave();
  }
  void on_closed(const Error& why) override {
    enter();
    {
      const std::lock_guard lock(mutex);
      why_closed.emplace(why);
      ++closed;
    }
    leave();
  }

  std::size_t message_count() {
    const std::lock_guard lock(mutex);
    return messages.size();
  }
  std::size_t placed_count() {
    const std::lock_guard lock(mutex);
    return placed.size();
  }
  int closed_count() {
    const std::lock_guard lock(mutex);
    return closed;
  }
  std::optional<Error> why() {
    const std::lock_guard lock(mutex);
    return why_closed;
  }

  std::function<void(const Message&)> answer;  // called for each message, first
  std::function<Placement(std::uint64_t id, std::uint64_t bytes)> place;
  std::function<void()> after_placed;
  bool throws = false;  // answer may throw
  bool keep_messages = true;

  std::mutex mutex;
  std::vector<Message> messages;
  std::vector<std::uint64_t> data_ids;
  std::vector<Bytes> data_bodies;
  std::vector<std::pair<std::uint64_t, bool>> placed;
  std::optional<Error> why_closed;
  int closed = 0;
  std::atomic<bool> overlapped{false};

 private:
  // Unsynchronised on purpose: ThreadSanitizer sees calls that overlap, or that come after the last.
  void enter() {
    if (inside_ || over_) overlapped = true;
    inside_ = true;
  }
  void leave() {
    inside_ = false;
    over_ = closed > 0;
  }
  bool inside_ = false;
  bool over_ = false;
};

// Admits every side that sends a metadata frame: for links without an endpoint.
class Admitting : public LinkMeeting {
 public:
  explicit Admitting(std::shared_ptr<LinkHandler> handler) : handler_(std::move(handler)) {}
  std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&&) override {
    link.keep_descriptors(header.flags);
    return handler_;
  }
  void on_closed(const Error& why) noexcept override { handler_->on_closed(why); }

 private:
  std::shared_ptr<LinkHandler> handler_;
};

enum class Wire : std::uint8_t { kUnix, kTcpChecksum, kTcpMac };
inline const char* name_of(Wire wire) {
  return wire == Wire::kUnix ? "unix" : wire == Wire::kTcpChecksum ? "tcp with checksums" : "tcp with MACs";
}
inline TagKind tag_of(Wire wire) {
  return wire == Wire::kUnix ? TagKind::kNone : wire == Wire::kTcpChecksum ? TagKind::kChecksum : TagKind::kMac;
}

// Two connected nonblocking sockets.
inline std::pair<Descriptor, Descriptor> socket_pair(Wire wire) {
  int ends[2] = {-1, -1};
  if (wire == Wire::kUnix) {
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  } else {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(listener >= 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(listen(listener, 1) == 0);
    REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(connect(ends[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
    ends[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    REQUIRE(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
    ::close(listener);
  }
  std::pair<Descriptor, Descriptor> pair{Descriptor::open([&] { return ends[0]; }),
                                         Descriptor::open([&] { return ends[1]; })};
  // Nothing here has a lease. With a lease of a second, TCP gives a connection up if its reader is busy for two: under
  // ThreadSanitizer, a handler that answers with content is.
  for (const Descriptor* end : {&pair.first, &pair.second}) tune_socket(*end, wire != Wire::kUnix, 600 * kSecond);
  return pair;
}

inline SessionKeys keys_of(bool left) {
  Key to_right{};
  Key to_left{};
  to_right.fill(std::byte{7});
  to_left.fill(std::byte{9});
  return left ? SessionKeys{to_right, to_left} : SessionKeys{to_left, to_right};
}

inline SockLinkParts parts_of(Descriptor socket, Wire wire, bool left, std::size_t queue_bytes_max) {
  SockLinkParts parts;
  parts.socket = std::move(socket);
  parts.keys = keys_of(left);
  parts.tag = tag_of(wire);
  parts.passes_descriptors = wire == Wire::kUnix;
  parts.queue_bytes_max = queue_bytes_max;
  parts.description = name_of(wire);
  return parts;
}

struct End {
  std::shared_ptr<Recorder> handler = std::make_shared<Recorder>();
  std::shared_ptr<SockLink> link;
};

// Makes a link on the socket and has it admitted as soon as the peer's metadata frame comes; sends one, too.
inline void start(End& end, Reactor& reactor, SockLinkParts parts) {
  end.link = SockLink::make(reactor, std::move(parts), std::make_shared<Admitting>(end.handler));
  FrameHeader metadata{};
  metadata.kind = static_cast<std::uint8_t>(FrameKind::kMetadata);
  REQUIRE(end.link->writer().hold());
  end.link->writer().release(metadata, {}, {}, false);
}

struct LinkPair {
  explicit LinkPair(Wire wire, std::size_t queue_bytes_max = std::size_t{64} << 20)
      : left_reactor(std::make_unique<Reactor>("left")), right_reactor(std::make_unique<Reactor>("right")) {
    auto [a, b] = socket_pair(wire);
    start(left, *left_reactor, parts_of(std::move(a), wire, true, queue_bytes_max));
    start(right, *right_reactor, parts_of(std::move(b), wire, false, queue_bytes_max));
  }
  ~LinkPair() {
    left.link->close(Error(ErrorCode::kClosed, "the test is over"));
    right.link->close(Error(ErrorCode::kClosed, "the test is over"));
    left_reactor->stop();
    right_reactor->stop();
    CHECK(left.handler->closed == 1);
    CHECK(right.handler->closed == 1);
    CHECK_FALSE(left.handler->overlapped);
    CHECK_FALSE(right.handler->overlapped);
  }
  std::unique_ptr<Reactor> left_reactor;
  std::unique_ptr<Reactor> right_reactor;
  End left;
  End right;
};

inline Message message_of(FrameKind kind, std::uint64_t id, Bytes body = {}, std::uint16_t verb = 0) {
  return Message{kind, verb, id, std::move(body)};
}

}  // namespace kvpool::testing
