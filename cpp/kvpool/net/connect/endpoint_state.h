// The state that the listeners, server handshakes and client handshakes of one endpoint share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "kvpool/net/keepalive.h"
#include "kvpool/net/sock_address.h"
#include "kvpool/net/sock_link.h"

namespace kvpool {

class Listener;

class EndpointState : public std::enable_shared_from_this<EndpointState> {
 public:
  static std::shared_ptr<EndpointState> make(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce,
                                             Endpoint::Admit admit);

  // Throws what listen_at throws; kClosed. A TCP listener that cannot open its local socket fails as well.
  std::string listen(const std::string& address);
  void close() noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // The pool's metadata, with the address of its Unix socket.
  Introduction introduction() const;
  // Whether this side's settings allow a checksum instead of the MAC. Only for TCP: a Unix socket to another user
  // always has the MAC.
  bool trusts_network(bool tcp) const noexcept { return tcp && options.trusted_network; }
  // Throws kAuth if the socket belongs to another user and nothing but the user authenticates peers here.
  void check_user(const Descriptor& socket, bool tcp) const;
  SockLinkParts parts(Descriptor socket, Channel channel, const SessionKeys& keys) const;
  ServerCapabilities capabilities(bool tcp) const;

  Reactor& reactor;
  const EndpointOptions options;
  const Endpoint::Introduce introduce;
  const Endpoint::Admit admit;
  const std::shared_ptr<LinkKeepalive> keepalive;

 private:
  EndpointState(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce, Endpoint::Admit admit);
  void start(const SockAddress& address, Descriptor socket);
  void open_local_socket();

  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Listener>> listeners_;
  std::string local_socket_;  // see PeerMetadata::local_socket
};

// A channel is local if it is a Unix socket and the peer runs as this user. With another user, frames have MACs,
// because that user's process could relay somebody else's handshake.
Channel channel_of(const Descriptor& socket, bool tcp) noexcept;

// This side's metadata as a frame, with its descriptors. Over a network it has no memory handles.
struct MetadataFrame {
  FrameHeader header{};
  Bytes body;
  std::vector<int> descriptors;
};
MetadataFrame make_metadata_frame(const SockLink& link, const Introduction& own, bool wants_checksum);
// Reads the peer's metadata, which over a network must have no memory handles either. Throws kProtocol.
PeerMetadata take_metadata(const SockLink& link, std::span<const std::byte> body);
// On a link whose writer is held; gives the writer back. Throws kPeerLost.
void send_metadata(SockLink& link, MetadataFrame&& metadata, bool checksum_from_then_on);

}  // namespace kvpool
