// What the listeners, the server handshakes of callers and the visits of one endpoint share.
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

  // Throws what listen_at throws; kClosed. A TCP listener that cannot have its Unix door fails as well.
  std::string listen(const std::string& address);
  void close() noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // What the pool says of itself, with its door.
  Introduction introduction() const;
  // Whether this side's settings let a checksum take the MAC's place. That is for TCP alone: a Unix
  // socket to another user always has the MAC.
  bool trusts_network(bool tcp) const noexcept { return tcp && options.trusted_network; }
  // Throws kAuth when nothing but its user can tell a friend here, and it is another user's.
  void check_user(const Descriptor& socket, bool tcp) const;
  SockLinkParts parts(Descriptor socket, Channel channel, const SessionKeys& keys) const;
  DoorBody door_body(bool tcp) const;

  Reactor& reactor;
  const EndpointOptions options;
  const Endpoint::Introduce introduce;
  const Endpoint::Admit admit;
  const std::shared_ptr<LinkKeepalive> keeper;

 private:
  EndpointState(Reactor& reactor, EndpointOptions options, Endpoint::Introduce introduce, Endpoint::Admit admit);
  void start(const SockAddress& address, Descriptor socket);
  void open_door();

  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Listener>> listeners_;
  std::string door_;
};

// Local is a Unix socket whose other end is this user's. Over another user's, frames have MACs: he could be one who
// passes on the handshake of others.
Channel channel_of(const Descriptor& socket, bool tcp) noexcept;

// This side's metadata as a frame, and what goes with it. Over a network it has no handles of memory.
struct MetadataFrame {
  FrameHeader header{};
  Bytes body;
  std::vector<int> descriptors;
};
MetadataFrame make_metadata_frame(const SockLink& link, const Introduction& own, bool wants_checksum);
// The peer's, which has none either over a network. Throws kProtocol.
PeerMetadata take_metadata(const SockLink& link, std::span<const std::byte> body);
// On a link whose writer is held; gives the writer back. Throws kPeerLost.
void send_metadata(SockLink& link, MetadataFrame&& metadata, bool checksum_from_then_on);

}  // namespace kvpool
