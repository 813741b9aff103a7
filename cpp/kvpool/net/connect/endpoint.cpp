#include "kvpool/net/connect/endpoint.h"

#include <algorithm>

#include "kvpool/base/fork_guard.h"
#include "kvpool/net/connect/client_handshake.h"
#include "kvpool/net/connect/endpoint_state.h"

namespace kvpool {
namespace {

// Whether the peer is on this host and can be met over a Unix socket.
bool is_on_this_host(const EndpointState& state, const ServerCapabilities& capabilities, const SockAddress& address) {
  return address.tcp && state.options.prefer_unix_socket && !capabilities.local_socket.empty() &&
         capabilities.socket_scope == socket_scope();
}

// The peer named this socket under a MAC. If nothing answers there, an attacker may be trying to keep the connection
// on TCP, so this side never falls back to TCP silently.
std::shared_ptr<ClientHandshake> connect_locally(const std::shared_ptr<EndpointState>& state, const SockAddress& local,
                                                 const std::string& address, const Waiting& waiting) {
  const std::string name = format_address(local);
  try {
    return ClientHandshake::begin(state, local, ClientTimeouts(*state, name, waiting));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kDeadline) throw;
    throw Error(error.code(), "the peer at " + address + " is on this host, and its Unix socket " + name +
                                  " refuses the connection: " + error.what() +
                                  ". Without prefer_unix_socket on either side they connect over TCP");
  }
}

}  // namespace

void check_listen_address(const std::string& address, bool has_secret) {
  if (parse_address(address).tcp && !has_secret) {
    throw Error(ErrorCode::kArgument, "listening at " + address + " needs a secret: anybody can reach a TCP port");
  }
}

void check_connect_address(const std::string& address, bool has_secret) {
  if (parse_address(address).tcp && !has_secret) {
    throw Error(ErrorCode::kArgument, "connecting to " + address + " needs a secret: TCP carries it to anybody");
  }
}

Endpoint::Endpoint(Reactor& reactor, EndpointOptions options, Introduce introduce, Admit admit)
    : state_(EndpointState::make(reactor, std::move(options), std::move(introduce), std::move(admit))),
      born_(fork_generation()) {}

Endpoint::~Endpoint() { close(); }

std::string Endpoint::listen(const std::string& address) {
  check_usable();
  return state_->listen(address);
}

std::shared_ptr<Link> Endpoint::connect(const std::string& text, const Waiting& waiting, std::uint64_t meeting) {
  check_usable();
  check_connect_address(text, !state_->options.secret.empty());
  const SockAddress address = parse_address(text);
  if (state_->reactor.in_thread()) throw Error(ErrorCode::kState, "a callback of the reactor cannot wait for a peer");
  const ClientTimeouts patience(*state_, text, waiting);
  const auto handshake = ClientHandshake::begin(state_, address, patience);
  if (!is_on_this_host(*state_, handshake->capabilities(), address)) return handshake->introduce(patience, meeting);
  const SockAddress local{.tcp = false, .path = "@" + handshake->capabilities().local_socket, .host = {}, .port = 0};
  handshake->leave(Error(ErrorCode::kPeerLost, "met on the same host"));
  return connect_locally(state_, local, text, waiting)->introduce(patience, meeting);
}

void Endpoint::close() noexcept {
  if (fork_generation() == born_) state_->close();
}

void Endpoint::check_usable() const {
  if (fork_generation() != born_) {
    throw Error(ErrorCode::kFork, "an endpoint belongs to the process that made it");
  }
  if (state_->closed()) throw Error(ErrorCode::kClosed, "the pool is closed");
}

}  // namespace kvpool
