// What only Unix sockets can do: pass descriptors, and identify the peer's process.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <span>
#include <vector>

#include "kvpool/net/descriptor.h"

namespace kvpool {

// As recvmsg with MSG_DONTWAIT; descriptors that come along are appended to `out`. Throws Error kProtocol when there
// are more than a peer may send. `message` has no control buffer.
ssize_t receive_with_descriptors(int fd, msghdr& message, std::vector<Descriptor>& out);
// The same into one range of bytes; null `out`: from a socket that passes no descriptors, as recv().
ssize_t receive_now(int fd, std::span<std::byte> bytes, std::vector<Descriptor>* out);
// As sendmsg with MSG_DONTWAIT. The descriptors go with the first byte; the caller still owns them. Without
// descriptors: a plain sendmsg.
ssize_t send_with_descriptors(int fd, msghdr& message, std::span<const int> descriptors) noexcept;

struct UnixPeer {
  pid_t pid;  // in this process's PID namespace; 0 when the peer is not visible in it
  uid_t uid;
};
UnixPeer unix_peer(int fd) noexcept;

// Readable when the process at the other end has exited; empty where the kernel cannot tell. Call it before the
// handshake: without SO_PEERPIDFD the pid may have been reused before this call, and an answer of the peer after this
// call rules that out.
Descriptor pidfd_of_peer(int fd) noexcept;

}  // namespace kvpool
