#include "kvpool/net/connect/endpoint_state.h"

#include <sys/random.h>
#include <unistd.h>

#include <utility>

#include "kvpool/base/fork_guard.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "kvpool/net/connect/listener.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

// Nobody can guess it, so nobody can take it beforehand.
std::string random_socket_name() {
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

std::shared_ptr<EndpointState> EndpointState::make(Reactor& reactor, EndpointOptions options,
                                                   Endpoint::Introduce introduce, Endpoint::Admit admit) {
  // In a forked child it is left as it is: its lock may be held for ever.
  return {new EndpointState(reactor, std::move(options), std::move(introduce), std::move(admit)),
          [born = fork_generation()](EndpointState* made) {
            if (fork_generation() == born) delete made;
          }};
}

EndpointState::EndpointState(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce,
                             Endpoint::Admit admit)
    : reactor(reactor),
      options(std::move(options)),
      introduce(std::move(introduce)),
      admit(std::move(admit)),
      keepalive(std::make_shared<LinkKeepalive>(reactor, this->options.lease_ns)) {}

// ---- listening

std::string EndpointState::listen(const std::string& text) {
  check_listen_address(text, !options.secret.empty());
  SockAddress address = parse_address(text);
  Descriptor socket = listen_at(address);
  if (address.tcp && options.prefer_unix_socket) open_local_socket();
  start(address, std::move(socket));
  return format_address(address);
}

void EndpointState::start(const SockAddress& address, Descriptor socket) {
  const std::lock_guard lock(mutex_);
  if (closed()) {
    remove_socket_file(address, socket_file(address));
    throw Error(ErrorCode::kClosed, "the pool is closed");
  }
  listeners_.reserve(listeners_.size() + 1);
  listeners_.push_back(Listener::start(shared_from_this(), address, std::move(socket)));
}

// Where peers on this host come in that found us by a TCP address: only here can they pass descriptors.
void EndpointState::open_local_socket() {
  {
    const std::lock_guard lock(mutex_);
    if (!local_socket_.empty()) return;
  }
  const std::string name = random_socket_name();
  SockAddress address{.tcp = false, .path = "@" + name, .host = {}, .port = 0};
  start(address, listen_at(address));
  const std::lock_guard lock(mutex_);
  local_socket_ = name;
}

void EndpointState::close() noexcept {
  closed_.store(true, std::memory_order_release);
  decltype(listeners_) listeners;
  {
    const std::lock_guard lock(mutex_);
    listeners.swap(listeners_);
  }
  for (const auto& listener : listeners) listener->close();
  reactor.wait_for_callback();  // it may be admitting a peer; every later callback sees closed_
}

// ---- what both sides of a meeting need

Introduction EndpointState::introduction() const {
  Introduction own = introduce();
  if (own.descriptors.size() > kDescriptorsMax) {
    throw Error(ErrorCode::kArgument, "a pool passes at most " + std::to_string(kDescriptorsMax) + " descriptors");
  }
  const std::lock_guard lock(mutex_);
  own.metadata.local_socket = local_socket_;
  return own;
}

Channel channel_of(const Descriptor& socket, bool tcp) noexcept {
  return !tcp && unix_peer(socket.get()).uid == geteuid() ? Channel::kLocal : Channel::kNetwork;
}

void EndpointState::check_user(const Descriptor& socket, bool tcp) const {
  if (tcp || !options.secret.empty()) return;
  const uid_t user = unix_peer(socket.get()).uid;
  if (user != geteuid()) {
    throw Error(ErrorCode::kAuth,
                "the peer is run by another user (" + std::to_string(user) + "): that needs a secret");
  }
}

SockLinkParts EndpointState::parts(Descriptor socket, Channel channel, const SessionKeys& keys) const {
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

ServerCapabilities EndpointState::capabilities(bool tcp) const {
  ServerCapabilities body;
  body.checksum = trusts_network(tcp);
  const std::lock_guard lock(mutex_);
  body.local_socket = local_socket_;
  if (tcp && !local_socket_.empty()) body.socket_scope = socket_scope();
  return body;
}

MetadataFrame make_metadata_frame(const SockLink& link, const Introduction& own, bool wants_checksum) {
  MetadataFrame frame;
  frame.header.kind = static_cast<std::uint8_t>(FrameKind::kMetadata);
  if (wants_checksum) frame.header.flags |= kChecksumFlag;
  for (std::size_t i = 0; link.passes_descriptors() && i < own.descriptors.size(); ++i) {
    if (own.descriptors[i] < 0) continue;
    frame.header.flags |= static_cast<std::uint8_t>(1U << i);
    frame.descriptors.push_back(own.descriptors[i]);
  }
  if (!link.passes_descriptors() && has_handles(own.metadata)) {
    PeerMetadata metadata = own.metadata;
    for (MetadataMedium& medium : metadata.media) medium.allocations.clear();
    frame.body = write_metadata_body(metadata);
    return frame;
  }
  frame.body = write_metadata_body(own.metadata);
  return frame;
}

PeerMetadata take_metadata(const SockLink& link, std::span<const std::byte> body) {
  PeerMetadata metadata = read_metadata_body(body);
  if (has_handles(metadata) && !link.passes_descriptors()) {
    throw Error(ErrorCode::kProtocol, "the metadata of a peer has handles of a GPU's memory, over a network");
  }
  return metadata;
}

void send_metadata(SockLink& link, MetadataFrame&& metadata, bool checksum_from_then_on) {
  link.writer().release(metadata.header, std::move(metadata.body), metadata.descriptors, checksum_from_then_on);
}

}  // namespace kvpool
