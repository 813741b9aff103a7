#include "kvpool/net/sock_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::size_t kPathBytesMax = sizeof(sockaddr_un{}.sun_path) - 1;
constexpr int kUnixBufferBytes = 1 << 20;

[[noreturn]] void fail(const std::string& text, const std::string& what) {
  throw Error(ErrorCode::kArgument,
              "\"" + text + "\" is no address: " + what +
                  ". Addresses look like unix:/path, unix:@name, tcp:HOST:PORT or tcp:[IPv6]:PORT");
}

SockAddress parse_unix(const std::string& text, const std::string& rest) {
  const bool abstract = rest.starts_with('@');
  if (!abstract && !rest.starts_with('/')) fail(text, "a path begins with /, an abstract name with @");
  if (rest.size() < 2) fail(text, "the name is empty");
  if (rest.size() > kPathBytesMax) {
    fail(text,
         "a path has at most " + std::to_string(kPathBytesMax) + " bytes, and this one " + std::to_string(rest.size()));
  }
  if (rest.find('\0') != std::string::npos) fail(text, "it contains a zero byte");
  return {.tcp = false, .path = rest, .host = {}, .port = 0};
}

SockAddress parse_tcp(const std::string& text, const std::string& rest) {
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos) fail(text, "the port is missing");
  std::string host = rest.substr(0, colon);
  const std::string digits = rest.substr(colon + 1);
  unsigned port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port > UINT16_MAX) {
    fail(text, "the port is a number from 0 to 65535");
  }
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
    in6_addr ignored{};
    const std::string numeric = host.substr(0, host.find('%'));
    if (inet_pton(AF_INET6, numeric.c_str(), &ignored) != 1) fail(text, "between the brackets is no IPv6 address");
  } else if (host.find_first_of(":[]") != std::string::npos) {
    fail(text, "an IPv6 address stands in brackets");
  }
  if (host.empty()) fail(text, "the host is missing; every interface is *");
  if (host.find_first_of(std::string(" \t\r\n\0", 5)) != std::string::npos) fail(text, "the host contains blanks");
  return {.tcp = true, .path = {}, .host = std::move(host), .port = static_cast<std::uint16_t>(port)};
}

}  // namespace

SockAddress parse_address(const std::string& text) {
  if (text.starts_with("unix:")) return parse_unix(text, text.substr(5));
  if (text.starts_with("tcp:")) return parse_tcp(text, text.substr(4));
  fail(text, "it begins with neither unix: nor tcp:");
}

std::string format_address(const SockAddress& address) {
  if (!address.tcp) return "unix:" + address.path;
  const bool brackets = address.host.find(':') != std::string::npos;
  return "tcp:" + (brackets ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

void tune_socket(const Descriptor& socket, bool tcp, std::int64_t lease_ns) noexcept {
  if (!tcp) {
    // The default holds a few dozen large messages only; the kernel caps what we ask for.
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kUnixBufferBytes, sizeof(kUnixBufferBytes));
    return;
  }
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A backstop for the lease, which counts what is received: twice, because a peer that is slow but lives keeps its
  // link.
  const auto ms = static_cast<unsigned>(std::clamp<std::int64_t>(lease_ns / 500'000, 100, 3'600'000));
  setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
}

std::string describe_peer(const Descriptor& socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) return "closed";
  if (peer.ss_family == AF_UNIX) return "unix";
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&peer), length, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  const std::string name = host;
  return "tcp " + (name.find(':') != std::string::npos ? "[" + name + "]" : name) + ":" + port;
}

}  // namespace kvpool
