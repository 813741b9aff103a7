// Two plain ways to send N pieces over TCP, without protocol, check or Python: gathered into one message, or piece by
// piece. What kvpool chooses is measured against the better of them. Built by tcp_ways.py.
//
//   'g'  all pieces in one stream, copied together before and apart again after
//   'p'  each piece behind its number, straight from and to its place
//
// Either ends with one byte back.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Addresses = std::vector<std::uint64_t>;

char* at(std::uint64_t address) { return reinterpret_cast<char*>(address); }

bool receive_all(int socket, void* to, std::uint64_t bytes) {
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = recv(socket, next, bytes, MSG_WAITALL);
    if (got <= 0) return false;
    next += got;
    bytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

bool send_all(int socket, iovec* pieces, int count) {
  while (count > 0) {
    ssize_t sent = writev(socket, pieces, count);
    if (sent <= 0) return false;
    for (; count > 0 && static_cast<std::size_t>(sent) >= pieces->iov_len; ++pieces, --count) {
      sent -= static_cast<ssize_t>(pieces->iov_len);
    }
    if (count > 0) {
      pieces->iov_base = static_cast<char*>(pieces->iov_base) + sent;
      pieces->iov_len -= static_cast<std::size_t>(sent);
    }
  }
  return true;
}

bool receive_gathered(int socket, const Addresses& to, std::uint64_t bytes, std::vector<char>& staging) {
  staging.resize(to.size() * bytes);
  if (!receive_all(socket, staging.data(), staging.size())) return false;
  for (std::size_t i = 0; i < to.size(); ++i) std::memcpy(at(to[i]), staging.data() + i * bytes, bytes);
  return true;
}

bool receive_pieces(int socket, const Addresses& to, std::uint64_t bytes) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::uint64_t number = 0;
    if (!receive_all(socket, &number, sizeof number) || number >= to.size()) return false;
    if (!receive_all(socket, at(to[number]), bytes)) return false;
  }
  return true;
}

void serve(int listener, const Addresses& to, std::uint64_t bytes) {
  const int socket = accept(listener, nullptr, nullptr);
  close(listener);
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  std::vector<char> staging;
  char way = 0;
  while (receive_all(socket, &way, 1)) {
    const bool whole = way == 'g' ? receive_gathered(socket, to, bytes, staging) : receive_pieces(socket, to, bytes);
    if (!whole || send(socket, &way, 1, MSG_NOSIGNAL) != 1) break;
  }
  close(socket);
}

}  // namespace

extern "C" {

// Serves one connection in a separate thread, which ends with the connection. Returns the port, or 0.
std::uint64_t serve_tcp(const std::uint64_t* to, std::uint64_t count, std::uint64_t bytes) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, generic, &length) != 0) {
    close(listener);
    return 0;
  }
  std::thread(serve, listener, Addresses(to, to + count), bytes).detach();
  return ntohs(address.sin_port);
}

// Returns a socket, or -1.
int connect_tcp(std::uint64_t port) {
  const int connected = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  setsockopt(connected, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (connect(connected, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    close(connected);
    return -1;
  }
  return connected;
}

int send_gathered(int socket, const std::uint64_t* from, std::uint64_t count, std::uint64_t bytes) {
  static std::vector<char> staging;
  staging.resize(count * bytes);
  for (std::uint64_t i = 0; i < count; ++i) std::memcpy(staging.data() + i * bytes, at(from[i]), bytes);
  char way = 'g';
  iovec pieces[] = {{&way, 1}, {staging.data(), staging.size()}};
  return send_all(socket, pieces, 2) && receive_all(socket, &way, 1) ? 0 : -1;
}

int send_pieces(int socket, const std::uint64_t* from, std::uint64_t count, std::uint64_t bytes) {
  char way = 'p';
  iovec first{&way, 1};
  if (!send_all(socket, &first, 1)) return -1;
  for (std::uint64_t i = 0; i < count; ++i) {
    iovec pieces[] = {{&i, sizeof i}, {at(from[i]), bytes}};
    if (!send_all(socket, pieces, 2)) return -1;
  }
  return receive_all(socket, &way, 1) ? 0 : -1;
}

void close_tcp(int socket) { close(socket); }

}  // extern "C"
