#include "kvpool/net/connect/listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/connect/endpoint_state.h"
#include "kvpool/net/connect/server_handshake.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

constexpr int kAcceptsAtOnce = 32;             // then the reactor turns to others
constexpr std::int64_t kRestNs = 100'000'000;  // after the kernel refused a descriptor
constexpr std::size_t kDescriptorShare = 16;   // a queue holds at most this part of the process's descriptors
constexpr std::size_t kQueueMin = 4;

// Sources of different kinds never share a number: no peer has a multicast address (ff00::/8).
constexpr std::uint64_t kIpv4 = 0xffff'0000'0000'0000;
constexpr std::uint64_t kUser = 0xfffe'0000'0000'0000;

std::size_t queue_limit(std::size_t wanted) noexcept {
  rlimit descriptors{};
  if (getrlimit(RLIMIT_NOFILE, &descriptors) != 0 || descriptors.rlim_cur == RLIM_INFINITY) return wanted;
  return std::min(wanted, std::max<std::size_t>(descriptors.rlim_cur / kDescriptorShare, kQueueMin));
}

bool no_room(int error) noexcept { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

// accept4() allocates a descriptor before it checks whether a caller is waiting.
bool is_readable(const Descriptor& socket) noexcept {
  pollfd callers{socket.get(), POLLIN, 0};
  return poll(&callers, 1, 0) == 1;
}

// Who may be expected to stand behind several connections: an IPv4 address, an IPv6 network of 64 bits, or a user.
std::uint64_t source_of(const Descriptor& socket, const sockaddr_storage& from) noexcept {
  if (from.ss_family == AF_INET) {
    return kIpv4 | ntohl(reinterpret_cast<const sockaddr_in&>(from).sin_addr.s_addr);
  }
  if (from.ss_family != AF_INET6) return kUser | unix_peer(socket.get()).uid;
  const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(from).sin6_addr;
  std::uint64_t network = 0;
  for (int i = 0; i < 8; ++i) network = network << 8 | address.s6_addr[i];
  if (!IN6_IS_ADDR_V4MAPPED(&address)) return network;
  std::uint32_t ipv4 = 0;
  for (int i = 12; i < 16; ++i) ipv4 = ipv4 << 8 | address.s6_addr[i];
  return kIpv4 | ipv4;
}

}  // namespace

std::shared_ptr<Listener> Listener::start(std::shared_ptr<EndpointState> endpoint_state, const SockAddress& address,
                                          Descriptor socket) {
  auto listener = std::make_shared<Listener>(std::move(endpoint_state), address, std::move(socket));
  const std::lock_guard lock(listener->mutex_);  // a caller may come before watch() has returned
  listener->watch_ = listener->endpoint_state_->reactor.watch(listener->socket_.get(),
                                                              [listener](std::uint32_t) { listener->on_caller(); });
  return listener;
}

Listener::Listener(std::shared_ptr<EndpointState> endpoint_state, const SockAddress& address, Descriptor socket)
    : endpoint_state_(std::move(endpoint_state)),
      address_(address),
      file_(socket_file(address)),
      socket_(std::move(socket)),
      silent_(queue_limit(endpoint_state_->options.handshakes_max)),
      greeted_(queue_limit(endpoint_state_->options.handshakes_max)),
      proved_max_(queue_limit(endpoint_state_->options.handshakes_max)) {}

void Listener::close() noexcept {
  endpoint_state_->reactor.unwatch(watch_);  // from here on nobody is let in by it
  if (socket_) remove_socket_file(address_, file_);
  socket_.reset();
  while (true) {
    std::shared_ptr<ServerHandshake> server_handshake;
    {
      const std::lock_guard lock(mutex_);
      if (callers_.empty()) break;
      server_handshake = take(callers_.begin()->first);
    }
    server_handshake->abandon(Error(ErrorCode::kClosed, "the pool was closed"));
  }
}

// ---- accepting

void Listener::on_caller() noexcept {
  for (int i = 0; i < kAcceptsAtOnce && !endpoint_state_->closed(); ++i) {
    sockaddr_storage from{};
    socklen_t length = sizeof(from);
    Descriptor socket = Descriptor::open([&] {
      return accept4(socket_.get(), reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    });
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (no_room(errno) && is_readable(socket_) && !send_one_away()) rest();
      return;
    }
    const std::uint64_t source = source_of(socket, from);
    if (!welcome(std::move(socket), source)) return rest();
  }
}

bool Listener::welcome(Descriptor socket, std::uint64_t source) noexcept {
  try {
    endpoint_state_->check_user(socket, address_.tcp);
    const std::uint64_t id = ++last_id_;
    const auto server_handshake =
        std::make_shared<ServerHandshake>(endpoint_state_, shared_from_this(), id, std::move(socket), address_.tcp);
    if (const auto evicted = add(id, server_handshake, source)) evicted->send_away();
    server_handshake->start();
    return true;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kAuth;  // another user's: not our trouble
  } catch (...) {
    return false;
  }
}

// The kernel has no descriptor for a caller in the backlog: a silent one gives up its own.
bool Listener::send_one_away() noexcept {
  std::shared_ptr<ServerHandshake> evicted;
  {
    const std::lock_guard lock(mutex_);
    if (const auto id = silent_.first_to_go()) evicted = take(*id);
  }
  if (evicted == nullptr) return false;
  evicted->send_away();
  return true;
}

// The kernel or the memory has no room: not to spin on a caller who waits in the backlog.
void Listener::rest() noexcept {
  const std::lock_guard lock(mutex_);
  try {
    endpoint_state_->reactor.at(monotonic_ns() + kRestNs, [self = shared_from_this()] {
      const std::lock_guard again(self->mutex_);
      self->resting_ = false;
      self->look_for_callers();
    });
    resting_ = true;
  } catch (...) {
    resting_ = false;
  }
  look_for_callers();
}

// REQUIRES: mutex_ is held.
void Listener::look_for_callers() noexcept {
  const bool wanted = !resting_ && proved_ < proved_max_;
  endpoint_state_->reactor.want(watch_, wanted ? EPOLLIN : 0U);
}

// ---- the callers

// Returns the server handshake that loses its place to this one.
std::shared_ptr<ServerHandshake> Listener::add(std::uint64_t id, std::shared_ptr<ServerHandshake> server_handshake,
                                               std::uint64_t source) {
  const std::lock_guard lock(mutex_);
  callers_.emplace(id, Caller{std::move(server_handshake), source, Stage::kSilent});
  const auto evicted = silent_.enter(id, source);
  return evicted ? take(*evicted) : nullptr;
}

// Out of the books. REQUIRES: mutex_ is held.
std::shared_ptr<ServerHandshake> Listener::take(std::uint64_t id) noexcept {
  const auto found = callers_.find(id);
  if (found == callers_.end()) return nullptr;
  const Stage stage = found->second.stage;
  std::shared_ptr<ServerHandshake> server_handshake = std::move(found->second.server_handshake);
  callers_.erase(found);
  silent_.leave(id);
  greeted_.leave(id);
  if (stage == Stage::kProved && proved_-- == proved_max_) look_for_callers();
  return server_handshake;
}

void Listener::heard_hello(std::uint64_t id) noexcept {
  std::shared_ptr<ServerHandshake> evicted;
  {
    const std::lock_guard lock(mutex_);
    const auto found = callers_.find(id);
    if (found == callers_.end() || found->second.stage != Stage::kSilent) return;
    found->second.stage = Stage::kGreeted;
    silent_.leave(id);
    if (const auto first = greeted_.enter(id, found->second.source)) evicted = take(*first);
  }
  if (evicted != nullptr) evicted->send_away();
}

// Peers that know the secret are not turned away: while many of them have not sent their metadata, callers wait in the
// backlog.
void Listener::heard_proof(std::uint64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = callers_.find(id);
  if (found == callers_.end() || found->second.stage == Stage::kProved) return;
  found->second.stage = Stage::kProved;
  silent_.leave(id);
  greeted_.leave(id);
  if (++proved_ == proved_max_) look_for_callers();
}

void Listener::end(std::uint64_t id) noexcept {
  std::shared_ptr<ServerHandshake> ended;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  ended = take(id);
}

}  // namespace kvpool
