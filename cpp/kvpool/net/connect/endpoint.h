// Makes links: listens and connects over Unix and TCP sockets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/wait.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/net/reactor.h"

namespace kvpool {

struct EndpointOptions {
  std::string secret;
  bool trusted_network = false;           // TCP frames carry a CRC-32C instead of a MAC, if both sides say so
  std::int64_t lease_ns = 3'000'000'000;  // a link that is silent for so long is closed: kPeerLost
  std::int64_t handshake_ns = 5'000'000'000;
  std::size_t queue_bytes_max = std::size_t{64} << 20;
  bool prefer_unix_socket =
      true;  // a client that reaches a server on its own host by TCP reconnects over a Unix socket
  // Callers that a listener keeps at each stage: nothing said, hello said, secret proved. At most a 16th of the
  // descriptors that the process may have open.
  std::size_t handshakes_max = 128;
};

// The pool's current metadata, and the descriptors that local peers get with it.
struct Introduction {
  PeerMetadata metadata;
  std::vector<int> descriptors;
  std::shared_ptr<void> attachment;  // what was made for this peer alone: Link::attachment()
};

// The first check of listen() and connect(). Throws kArgument for a malformed address, and for TCP without a secret.
void check_listen_address(const std::string& address, bool has_secret);
void check_connect_address(const std::string& address, bool has_secret);

class EndpointState;

class Endpoint {
 public:
  using Introduce = std::function<Introduction()>;
  // Checks a peer that has proved that it knows the secret, and returns the handler of its link. Throws an Error to
  // refuse the peer, whose connect() then throws the same. Called once a link before any of its messages; must not
  // block.
  using Admit = std::function<std::shared_ptr<LinkHandler>(const std::shared_ptr<Link>& link,
                                                           const PeerMetadata& metadata, bool initiated_here)>;

  // The reactor outlives the endpoint.
  Endpoint(Reactor& reactor, EndpointOptions options, Introduce introduce, Admit admit);
  ~Endpoint();  // closes it
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // "unix:/path", "unix:@name" (abstract), "tcp:HOST:PORT", "tcp:[::1]:0". Returns the address with the port that was
  // given. Throws kArgument (syntax; a TCP address with an empty secret), kState (in use).
  std::string listen(const std::string& address);
  // Connects to the peer that listens there. If a peer on this host offers a Unix socket, connects through that socket,
  // which can pass descriptors; it does not fall back to TCP, even if the socket does not answer. A listener crowded by
  // strangers may disconnect a caller before its proof; this method then connects again.
  // Returns its link, admitted. Throws kPeerLost (nothing listens there; the Unix socket refuses; of cause
  // kUnanswered when the link has ended before the peer said whether it lets this side in), kDeadline, kAuth,
  // kProtocol, and any Error that either side's Admit threw; kCancelled when the caller gives up. `meeting` goes into
  // the metadata that both sides' Admit gets.
  std::shared_ptr<Link> connect(const std::string& address, const Waiting& waiting, std::uint64_t meeting = 0);
  // Stops listening and closes what is not admitted yet; connect() throws kClosed soon. Links live on. Idempotent.
  // Waits for an admission under way in the reactor's thread: do not hold a lock that Admit takes. After it has
  // returned, only a connect() that has not returned yet may still call Introduce or Admit.
  void close() noexcept;

 private:
  void check_usable() const;

  const std::shared_ptr<EndpointState> state_;
  const std::uint32_t born_;
};

}  // namespace kvpool
