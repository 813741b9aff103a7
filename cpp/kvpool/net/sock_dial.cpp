// Resolving names, listening and connecting.
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/signals_blocked.h"
#include "kvpool/net/connection_error.h"
#include "kvpool/net/reactor.h"
#include "kvpool/net/sock_address.h"

namespace kvpool {
namespace {

constexpr int kBacklog = 4096;  // the kernel takes net.core.somaxconn if that is less
constexpr int kPollMs = 50;
constexpr int kRetryMs = 2;
constexpr std::int64_t kRetryNs = 2'000'000;
constexpr std::int64_t kListenNs = 10'000'000'000;  // for the resolver, when a name is listened at

struct AnySockaddr {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string text_of(int error) { return std::generic_category().message(error); }

AnySockaddr unix_sockaddr(const std::string& path) {
  AnySockaddr result;
  auto& address = reinterpret_cast<sockaddr_un&>(result.storage);
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const bool abstract = path.starts_with('@');
  if (abstract) address.sun_path[0] = '\0';
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + (abstract ? 0 : 1));
  return result;
}

// ---- names

// getaddrinfo has no deadline, so a separate thread runs it and ends when the resolver gives up. The thread shares its
// result with the callers that still wait.
struct Lookup {
  std::mutex mutex;
  std::condition_variable found;
  bool done = false;
  int error = 0;
  std::vector<AnySockaddr> addresses;
};

std::vector<AnySockaddr> addresses_of(const addrinfo* list) {
  std::vector<AnySockaddr> addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    AnySockaddr& address = addresses.emplace_back();
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.length = entry->ai_addrlen;
  }
  // Of "every interface" the socket that takes both families comes first.
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const AnySockaddr& address) { return address.storage.ss_family == AF_INET6; });
  return addresses;
}

void look_up(Lookup& lookup, const std::string& host, const std::string& port, int flags) noexcept {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  int error = getaddrinfo(host == "*" ? nullptr : host.c_str(), port.c_str(), &hints, &list);
  std::vector<AnySockaddr> addresses;
  try {
    addresses = addresses_of(list);
  } catch (const std::bad_alloc&) {
    error = EAI_MEMORY;
  }
  if (list != nullptr) freeaddrinfo(list);
  const std::lock_guard lock(lookup.mutex);
  lookup.error = error;
  lookup.addresses = std::move(addresses);
  lookup.done = true;
  lookup.found.notify_all();
}

std::vector<AnySockaddr> resolve(const SockAddress& address, int flags, const Patience& patience) {
  const auto lookup = std::make_shared<Lookup>();
  const std::string port = std::to_string(address.port);
  look_up(*lookup, address.host, port, flags | AI_NUMERICHOST);  // asks no resolver
  if (lookup->error == EAI_NONAME) {
    lookup->done = false;
    try {
      const SignalsBlocked blocked;
      std::thread([lookup, host = address.host, port, flags] { look_up(*lookup, host, port, flags); }).detach();
    } catch (const std::system_error&) {
      throw Error(ErrorCode::kState, "the kernel gives no thread to resolve \"" + address.host + "\"");
    }
    std::unique_lock lock(lookup->mutex);
    while (!lookup->found.wait_for(lock, std::chrono::milliseconds(kPollMs), [&] { return lookup->done; })) {
      patience.check();
    }
  }
  if (lookup->error != 0 || lookup->addresses.empty()) {
    throw Error(ErrorCode::kArgument, "the host of " + format_address(address) + " is not known: " +
                                          (lookup->error != 0 ? gai_strerror(lookup->error) : "it has no address"));
  }
  return lookup->addresses;
}

// ---- listening

class Until final : public Patience {
 public:
  explicit Until(std::int64_t deadline_ns) noexcept : deadline_ns_(deadline_ns) {}
  void check() const override {
    if (monotonic_ns() >= deadline_ns_) throw Error(ErrorCode::kDeadline, "the resolver of host names does not answer");
  }

 private:
  std::int64_t deadline_ns_;
};

[[noreturn]] void fail_listen(const SockAddress& address, int error) {
  const bool taken = error == EADDRINUSE || error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
  throw Error(taken ? ErrorCode::kState : ErrorCode::kArgument,
              "cannot listen at " + format_address(address) + ": " + text_of(error), {{"errno", error}});
}

Descriptor make_socket(int family) {
  return Descriptor::open([family] { return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

// Returns an errno, 0 when it listens.
int try_listen(const Descriptor& made, const AnySockaddr& at) noexcept {
  if (!made || bind(made.get(), at.get(), at.length) != 0 || listen(made.get(), kBacklog) != 0) return errno;
  return 0;
}

Descriptor listen_tcp(SockAddress& address) {
  int error = EADDRNOTAVAIL;
  for (const AnySockaddr& at : resolve(address, AI_PASSIVE, Until(monotonic_ns() + kListenNs))) {
    Descriptor made = make_socket(at.storage.ss_family);
    const int on = 1;
    const int off = 0;
    if (made) setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (made && address.host == "*" && at.storage.ss_family == AF_INET6) {
      setsockopt(made.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    error = try_listen(made, at);
    if (error != 0) continue;
    AnySockaddr bound;
    bound.length = sizeof(bound.storage);
    if (getsockname(made.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) == 0) {
      address.port =
          ntohs(bound.storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound.storage).sin6_port
                                                    : reinterpret_cast<const sockaddr_in&>(bound.storage).sin_port);
    }
    return made;
  }
  fail_listen(address, error);
}

// Held while a socket file is looked at and replaced, so that two processes do not both take the place of a dead third.
// Another holder that keeps it for long is not waited for.
Descriptor lock_folder_of(const std::string& path) {
  const std::string folder = path.substr(0, std::max<std::size_t>(path.rfind('/'), 1));
  Descriptor opened = Descriptor::open([&] { return open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  for (int tries = 0; opened && tries < 500 && flock(opened.get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
    poll(nullptr, 0, kRetryMs);
  }
  return opened;
}

// A socket file without a listener was left by a killed process.
void remove_stale_file(const SockAddress& address, const AnySockaddr& at) {
  struct stat status{};
  if (lstat(address.path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) {
    throw Error(ErrorCode::kState,
                "cannot listen at " + format_address(address) + ": there is a file that is no socket");
  }
  const Descriptor probe = make_socket(AF_UNIX);
  if (probe && connect(probe.get(), at.get(), at.length) != 0 && errno == ECONNREFUSED) unlink(address.path.c_str());
}

Descriptor listen_unix(const SockAddress& address) {
  const AnySockaddr at = unix_sockaddr(address.path);
  const bool file = !address.path.starts_with('@');
  Descriptor folder;
  if (file) {
    folder = lock_folder_of(address.path);
    remove_stale_file(address, at);
  }
  Descriptor made = make_socket(AF_UNIX);
  const int error = try_listen(made, at);
  if (error != 0) fail_listen(address, error);
  return made;
}

// ---- connecting

[[noreturn]] void fail_connect(const SockAddress& address, int error) {
  if (error == ECONNREFUSED || error == ENOENT) {
    throw Error(ErrorCode::kPeerLost, "nobody listens at " + format_address(address), {{"errno", error}})
        .because(ErrorCause::kNobodyListens);
  }
  if (error != EMFILE && error != ENFILE) throw connection_error("cannot connect to " + format_address(address), error);
  throw Error(ErrorCode::kState, "cannot connect to " + format_address(address) + ": " + text_of(error),
              {{"errno", error}});
}

// Returns an errno, 0 when it is connected.
int try_connect(const Descriptor& made, const AnySockaddr& to, const Patience& patience) {
  while (connect(made.get(), to.get(), to.length) != 0) {
    if (errno == EINTR) continue;
    if (errno == EISCONN) return 0;
    if (errno == EINPROGRESS || errno == EALREADY) {
      patience.wait(made.get(), POLLOUT);
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return error;
    } else if (errno == EAGAIN && to.storage.ss_family == AF_UNIX) {
      patience.pause(kRetryNs);  // its backlog is full
    } else {
      return errno;
    }
  }
  return 0;
}

}  // namespace

void Patience::wait(int fd, short events) const {
  check();
  pollfd watched{fd, events, 0};
  poll(&watched, 1, kPollMs);
}

void Patience::pause(std::int64_t ns) const {
  check();
  usleep(static_cast<useconds_t>(ns / 1000));
}

Descriptor listen_at(SockAddress& address) { return address.tcp ? listen_tcp(address) : listen_unix(address); }

SocketFile socket_file(const SockAddress& address) noexcept {
  struct stat file{};
  if (address.tcp || address.path.starts_with('@') || lstat(address.path.c_str(), &file) != 0) return {};
  return {static_cast<std::uint64_t>(file.st_dev), static_cast<std::uint64_t>(file.st_ino)};
}

void remove_socket_file(const SockAddress& address, const SocketFile& file) noexcept {
  if (file.inode != 0 && socket_file(address) == file) unlink(address.path.c_str());
}

Descriptor dial(const SockAddress& address, const Patience& patience) {
  if (!address.tcp) {
    Descriptor made = make_socket(AF_UNIX);
    const int error = made ? try_connect(made, unix_sockaddr(address.path), patience) : errno;
    if (error != 0) fail_connect(address, error);
    return made;
  }
  if (address.host == "*") {
    throw Error(ErrorCode::kArgument, "cannot connect to every interface: name the host instead of *");
  }
  int error = ECONNREFUSED;
  for (const AnySockaddr& to : resolve(address, 0, patience)) {
    Descriptor made = make_socket(to.storage.ss_family);
    error = made ? try_connect(made, to, patience) : errno;
    if (error == 0) return made;
  }
  fail_connect(address, error);
}

}  // namespace kvpool
