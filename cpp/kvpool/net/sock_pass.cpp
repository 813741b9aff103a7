#include "kvpool/net/sock_pass.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include "kvpool/base/error.h"
#include "kvpool/net/connect/handshake_messages.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace kvpool {
namespace {

// One more than may come, so that too many are noticed.
union ControlBuffer {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int) * (kDescriptorsMax + 1))];
};

std::size_t adopt_all(msghdr& message, Descriptor (&got)[kDescriptorsMax + 1]) noexcept {
  std::size_t count = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t here = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < here; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (count <= kDescriptorsMax) {
        got[count++] = Descriptor::adopt(fd);
      } else {
        close(fd);
      }
    }
  }
  return count;
}

}  // namespace

ssize_t receive_with_descriptors(int fd, msghdr& message, std::vector<Descriptor>& out) {
  out.reserve(kDescriptorsMax);  // before there is something to lose
  ControlBuffer control;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  Descriptor got[kDescriptorsMax + 1];
  std::size_t count = 0;
  ssize_t bytes = 0;
  {
    const std::lock_guard lock(Descriptor::fork_lock());
    bytes = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes >= 0) count = adopt_all(message, got);
  }
  if (bytes >= 0 && ((message.msg_flags & MSG_CTRUNC) != 0 || out.size() + count > kDescriptorsMax)) {
    throw Error(ErrorCode::kProtocol, "the peer passes more than " + std::to_string(kDescriptorsMax) + " descriptors");
  }
  for (std::size_t i = 0; i < count; ++i) out.push_back(std::move(got[i]));
  return bytes;
}

ssize_t receive_now(int fd, std::span<std::byte> bytes, std::vector<Descriptor>* out) {
  if (out == nullptr) return recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  return receive_with_descriptors(fd, message, *out);
}

ssize_t send_with_descriptors(int fd, msghdr& message, std::span<const int> descriptors) noexcept {
  ControlBuffer control;
  if (!descriptors.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

UnixPeer unix_peer(int fd) noexcept {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return {0, static_cast<uid_t>(-1)};
  return {peer.pid, peer.uid};
}

Descriptor pidfd_of_peer(int fd) noexcept {
  return Descriptor::open([fd] {
    int pidfd = -1;
    socklen_t length = sizeof(pidfd);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) return pidfd;  // close-on-exec by itself
    const pid_t pid = unix_peer(fd).pid;
    return pid > 0 ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1;
  });
}

}  // namespace kvpool
