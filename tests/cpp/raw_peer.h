// A peer that sends what no kvpool would: frames made by hand, on a bare socket.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <vector>

#include "kvpool/net/frame_tag.h"
#include "sock_fixture.h"

namespace kvpool::testing {

// Writes frames as the left or the right end of a fixture's pair does. `header` is what the next frame starts from.
class FrameForge {
 public:
  FrameForge(Wire wire, bool left) : FrameForge(tag_of(wire), keys_of(left).send) {}
  FrameForge(TagKind tag, const Key& key) : tag_(tag, key) {}

  void add(FrameKind kind, std::uint64_t id = 0, const Bytes& body = {}, const Bytes& payload = {},
           PayloadEnd end = PayloadEnd::kWhole) {
    header.id = id;
    header.body_bytes = static_cast<std::uint32_t>(body.size());
    header.payload_bytes = static_cast<std::uint32_t>(payload.size());
    tag_.begin();
    const std::size_t begun = out_.size();
    add_header(kind);
    out_.insert(out_.end(), body.begin(), body.end());
    tag_.update(out_.data() + begun, out_.size() - begun);
    const Tag first = tag_.finish();
    add_tag(first);
    if (payload.empty()) return;
    out_.insert(out_.end(), payload.begin(), payload.end());
    out_.push_back(static_cast<std::byte>(end));
    tag_.update(payload.data(), payload.size());
    tag_.update(&end, sizeof(end));
    add_tag(end == PayloadEnd::kGivenUp ? tag_.given_up(first) : tag_.finish());
  }
  void add_header(FrameKind kind) { add_header(static_cast<std::uint8_t>(kind)); }
  void add_header(std::uint8_t kind) {
    header.kind = kind;
    header.sequence = ++sequence;
    const auto* bytes = reinterpret_cast<const std::byte*>(&header);
    out_.insert(out_.end(), bytes, bytes + sizeof(header));
    header = FrameHeader{};
  }
  Bytes take() { return std::exchange(out_, {}); }

  FrameHeader header{};
  std::uint64_t sequence = 0;

 private:
  void add_tag(const Tag& tag) {
    out_.insert(out_.end(), tag.begin(), tag.begin() + static_cast<std::ptrdiff_t>(tag_.bytes()));
  }

  FrameTag tag_;
  Bytes out_;
};

// Sends all of it, unless the other end is closed. The descriptors go with the first byte.
inline void send_raw(const Descriptor& socket, std::span<const std::byte> bytes,
                     const std::vector<int>& descriptors = {}) {
  char control[CMSG_SPACE(sizeof(int) * 64)] = {};
  for (std::size_t sent = 0; sent < bytes.size();) {
    iovec piece{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (sent == 0 && !descriptors.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
      cmsghdr* part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
      std::memcpy(CMSG_DATA(part), descriptors.data(), sizeof(int) * descriptors.size());
    }
    const ssize_t got = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
    if (got > 0) {
      sent += static_cast<std::size_t>(got);
    } else if (errno == EAGAIN) {
      pollfd room{socket.get(), POLLOUT, 0};
      poll(&room, 1, 100);
    } else if (errno != EINTR) {
      return;
    }
  }
}

// All that has arrived, without waiting for more.
inline Bytes received_raw(const Descriptor& socket) {
  Bytes all;
  std::byte bytes[4096];
  while (true) {
    const ssize_t got = recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got <= 0) return all;
    all.insert(all.end(), bytes, bytes + got);
  }
}

}  // namespace kvpool::testing
