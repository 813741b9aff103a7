// Addresses of endpoints, and the sockets behind them.
//
//   unix:/path   unix:@name (abstract)   tcp:HOST:PORT   tcp:[IPv6]:PORT   tcp:*:PORT (every interface; to listen only)
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/net/descriptor.h"

namespace kvpool {

struct SockAddress {
  bool tcp = false;
  std::string path;  // of a Unix socket; "@name" is abstract
  std::string host;  // "*", a name, or a numeric address without brackets
  std::uint16_t port = 0;
};

// Throws kArgument with a text that says what addresses look like.
SockAddress parse_address(const std::string& text);
std::string format_address(const SockAddress& address);

// A listening socket, nonblocking. On TCP, address.port becomes the port that was given. A socket file that a dead
// listener left is replaced. Throws kState (in use), kArgument (no such interface or folder), kDeadline (no answer from
// the resolver).
Descriptor listen_at(SockAddress& address);

// Identifies the file of a Unix socket, so that a process removes only the file that it made.
struct SocketFile {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;  // 0: no file
  bool operator==(const SocketFile&) const = default;
};
SocketFile socket_file(const SockAddress& address) noexcept;
void remove_socket_file(const SockAddress& address, const SocketFile& file) noexcept;

// Decides how long a call waits.
class Patience {
 public:
  virtual ~Patience() = default;
  virtual void check() const = 0;  // throws when waiting on is pointless
  // Waits until the descriptor has one of the events, for a short while at most. Then check().
  void wait(int fd, short events) const;
  void pause(std::int64_t ns) const;
};
// A connected socket, nonblocking. Throws kPeerLost (nothing listens there), kArgument, and what the patience throws.
Descriptor dial(const SockAddress& address, const Patience& patience);

// Sends small messages without delay, and ends a connection that the other host no longer acknowledges.
void tune_socket(const Descriptor& socket, bool tcp, std::int64_t lease_ns) noexcept;
std::string describe_peer(const Descriptor& socket);  // "unix", "tcp 10.0.0.2:4000"

}  // namespace kvpool
