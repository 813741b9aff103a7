#include "kvpool/transport/hall.h"

#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "kvpool/base/fork_guard.h"
#include "kvpool/transport/greeting.h"
#include "kvpool/transport/meeting.h"
#include "kvpool/transport/sock_pass.h"

namespace kvpool {
namespace {

constexpr int kAcceptsAtOnce = 16;
constexpr std::int64_t kRestNs = 100'000'000;  // after the kernel refused a descriptor

// Nobody can guess it, so nobody can take it beforehand.
std::string random_door() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) {
    throw Error(ErrorCode::kState, "the kernel gives no random bytes");
  }
  std::string name = "kvpool-";
  for (const unsigned char byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

}  // namespace

std::shared_ptr<Hall> Hall::make(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce,
                                 Endpoint::Admit admit) {
  // In a forked child it is left as it is: its lock may be held for ever.
  return {new Hall(reactor, std::move(options), std::move(introduce), std::move(admit)),
          [born = fork_generation()](Hall* made) {
            if (fork_generation() == born) delete made;
          }};
}

Hall::Hall(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce, Endpoint::Admit admit)
    : reactor(reactor),
      options(std::move(options)),
      introduce(std::move(introduce)),
      admit(std::move(admit)),
      keeper(std::make_shared<LinkKeeper>(reactor, this->options.lease_ns)) {}

// ---- listening

std::string Hall::listen(const std::string& text) {
  check_listen_address(text, !options.secret.empty());
  SockAddress address = parse_address(text);
  Descriptor socket = listen_at(address);
  if (address.tcp && options.door) open_door();
  start(address, std::move(socket));
  return format_address(address);
}

void Hall::start(const SockAddress& address, Descriptor socket) {
  const auto listener = std::make_shared<Listener>();
  listener->address = address;
  listener->file = socket_file(address);
  listener->socket = std::move(socket);
  const std::lock_guard lock(mutex_);
  if (closed()) {
    remove_socket_file(listener->address, listener->file);
    throw Error(ErrorCode::kClosed, "the pool is closed");
  }
  listeners_.reserve(listeners_.size() + 1);
  listener->watch = reactor.watch(listener->socket.get(),
                                  [self = shared_from_this(), listener](std::uint32_t) { self->on_caller(*listener); });
  listeners_.push_back(listener);
}

// Where peers on this host come in that found us by a TCP address: only here can they pass descriptors.
void Hall::open_door() {
  {
    const std::lock_guard lock(mutex_);
    if (!door_.empty()) return;
  }
  try {
    const std::string name = random_door();
    SockAddress address{.tcp = false, .path = "@" + name, .host = {}, .port = 0};
    start(address, listen_at(address));
    const std::lock_guard lock(mutex_);
    door_ = name;
  } catch (const Error&) {
    // Without a door they stay on TCP.
  }
}

void Hall::on_caller(Listener& listener) noexcept {
  for (int i = 0; i < kAcceptsAtOnce && !closed(); ++i) {
    if (is_full()) return;
    Descriptor socket = Descriptor::open(
        [&] { return accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) pause_for_a_while();
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    if (!welcome(std::move(socket), listener.address.tcp)) return pause_for_a_while();
  }
}

// As many strangers as there may be: until one of them is through, callers wait in the backlog.
bool Hall::is_full() noexcept {
  const std::lock_guard lock(mutex_);
  full_ = greetings_.size() >= options.handshakes_max;
  if (full_) want_callers(false);
  return full_;
}

bool Hall::welcome(Descriptor socket, bool tcp) noexcept {
  try {
    tune_socket(socket, tcp, options.lease_ns);
    check_user(socket, tcp);
    Greeting::start(shared_from_this(), ++last_greeting_, std::move(socket), tcp);
    return true;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kAuth;  // another user's: not our trouble
  } catch (...) {
    return false;
  }
}

// The kernel or the memory has no room: not to spin on a caller who waits in the backlog.
void Hall::pause_for_a_while() noexcept {
  const std::lock_guard lock(mutex_);
  want_callers(false);
  try {
    reactor.at(monotonic_ns() + kRestNs, [self = shared_from_this()] {
      const std::lock_guard again(self->mutex_);
      self->want_callers(true);
    });
  } catch (...) {
    want_callers(true);
  }
}

// REQUIRES: mutex_ is held.
void Hall::want_callers(bool wanted) noexcept {
  const std::uint32_t events = wanted ? EPOLLIN : 0U;
  for (const auto& listener : listeners_) reactor.want(listener->watch, events);
}

// ---- greetings

void Hall::add_greeting(std::uint64_t id, std::shared_ptr<Greeting> greeting) {
  const std::lock_guard lock(mutex_);
  greetings_.emplace(id, std::move(greeting));
}

void Hall::end_greeting(std::uint64_t id) noexcept {
  std::shared_ptr<Greeting> ended;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = greetings_.find(id);
  if (found == greetings_.end()) return;
  ended = std::move(found->second);
  greetings_.erase(found);
  if (std::exchange(full_, false)) want_callers(true);
}

void Hall::close() noexcept {
  closed_.store(true, std::memory_order_release);
  decltype(listeners_) listeners;
  {
    const std::lock_guard lock(mutex_);
    listeners.swap(listeners_);
  }
  for (const auto& listener : listeners) {
    reactor.unwatch(listener->watch);  // from here on nobody is let in by it
    remove_socket_file(listener->address, listener->file);
    listener->socket.reset();
  }
  while (true) {
    std::shared_ptr<Greeting> greeting;
    {
      const std::lock_guard lock(mutex_);
      if (greetings_.empty()) break;
      greeting = std::move(greetings_.begin()->second);
      greetings_.erase(greetings_.begin());
    }
    greeting->abandon(Error(ErrorCode::kClosed, "the pool was closed"));
  }
  reactor.wait_for_callback();  // it may be admitting somebody; whoever comes after it sees closed_
}

// ---- what both sides of a meeting need

Introduction Hall::introduction() const {
  Introduction own = introduce();
  if (own.descriptors.size() > kDescriptorsMax) {
    throw Error(ErrorCode::kArgument, "a pool passes at most " + std::to_string(kDescriptorsMax) + " descriptors");
  }
  const std::lock_guard lock(mutex_);
  own.card.door = door_;
  return own;
}

Channel channel_of(const Descriptor& socket, bool tcp) noexcept {
  return !tcp && unix_peer(socket.get()).uid == geteuid() ? Channel::kLocal : Channel::kNetwork;
}

bool Hall::content_with_checksums(const Descriptor& socket, Channel channel) const noexcept {
  return channel == Channel::kNetwork && (options.trusted_network || peer_is_loopback(socket));
}

void Hall::check_user(const Descriptor& socket, bool tcp) const {
  if (tcp || !options.secret.empty()) return;
  const uid_t user = unix_peer(socket.get()).uid;
  if (user != geteuid()) {
    throw Error(ErrorCode::kAuth,
                "the peer is run by another user (" + std::to_string(user) + "): that needs a secret");
  }
}

SockLinkParts Hall::parts(Descriptor socket, Channel channel, const SessionKeys& keys) const {
  SockLinkParts parts;
  parts.description = describe_peer(socket);
  parts.pidfd = pidfd_of_peer(socket.get());
  parts.process = unix_peer(socket.get()).pid;
  parts.socket = std::move(socket);
  parts.keys = keys;
  parts.tag = channel == Channel::kLocal ? TagKind::kNone : TagKind::kMac;  // while they meet
  parts.passes_descriptors = channel == Channel::kLocal;
  parts.queue_bytes_max = options.queue_bytes_max;
  return parts;
}

DoorBody Hall::door_body(const Descriptor& socket, bool tcp, Channel channel) const {
  DoorBody body;
  body.checksum = content_with_checksums(socket, channel);
  const std::lock_guard lock(mutex_);
  body.door = door_;
  if (tcp && !door_.empty()) body.host = host_id();
  return body;
}

CardFrame make_card_frame(const SockLink& link, const Introduction& own, bool wants_checksum) {
  CardFrame frame;
  frame.header.kind = static_cast<std::uint8_t>(FrameKind::kCard);
  if (wants_checksum) frame.header.flags |= kChecksumFlag;
  for (std::size_t i = 0; link.passes_descriptors() && i < own.descriptors.size(); ++i) {
    if (own.descriptors[i] < 0) continue;
    frame.header.flags |= static_cast<std::uint8_t>(1U << i);
    frame.descriptors.push_back(own.descriptors[i]);
  }
  if (!link.passes_descriptors() && has_handles(own.card)) {
    PeerCard card = own.card;
    for (CardMedium& medium : card.media) medium.allocations.clear();
    frame.body = write_card_body(card);
    return frame;
  }
  frame.body = write_card_body(own.card);
  return frame;
}

PeerCard take_card(const SockLink& link, std::span<const std::byte> body) {
  PeerCard card = read_card_body(body);
  if (has_handles(card) && !link.passes_descriptors()) {
    throw Error(ErrorCode::kProtocol, "the card of a peer has handles of a GPU's memory, over a network");
  }
  return card;
}

void send_card(SockLink& link, CardFrame&& card, bool checksum_from_then_on) {
  link.writer().release(card.header, std::move(card.body), card.descriptors, checksum_from_then_on);
}

}  // namespace kvpool
