// Where links come from: listening and connecting over Unix and TCP sockets.
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
  bool door = true;  // peers on one host that meet by TCP go on over a Unix socket
  // Callers that a listener keeps at each stage: nothing said, hello said, secret proved. At most a 16th of the
  // descriptors that the process may have open.
  std::size_t handshakes_max = 128;
};

// What the pool says of itself, at the moment of asking, and the descriptors that local peers get with it.
struct Introduction {
  PeerMetadata metadata;
  std::vector<int> descriptors;
  std::shared_ptr<void> attachment;  // what was made for this peer alone: Link::attachment()
};

// What listen() and connect() look at first. Throws kArgument: the address is none; TCP without a secret.
void check_listen_address(const std::string& address, bool has_secret);
void check_connect_address(const std::string& address, bool has_secret);

class Endpoint {
 public:
  using Introduce = std::function<Introduction()>;
  // Vets a peer that has proved that it knows the secret, and says who handles its link. Throws an Error to refuse it;
  // the peer's connect() throws the same. Called once a link before any of its messages; must not block.
  using Admit = std::function<std::shared_ptr<LinkHandler>(const std::shared_ptr<Link>& link,
                                                           const PeerMetadata& metadata, bool initiated_here)>;

  // The reactor outlives the endpoint.
  static std::unique_ptr<Endpoint> make(Reactor& reactor, EndpointOptions options, Introduce introduce, Admit admit);
  virtual ~Endpoint() = default;

  // "unix:/path", "unix:@name" (abstract), "tcp:HOST:PORT", "tcp:[::1]:0". Returns the address with the port that was
  // given. Throws kArgument (syntax; a TCP address with an empty secret), kState (in use).
  virtual std::string listen(const std::string& address) = 0;
  // Meets the peer that listens there. A peer on this host that has a Unix door is met through the door, so that it can
  // pass descriptors; it is not met by TCP then, even if the door does not answer. A listener that strangers crowd may
  // disconnect a caller before it has proved that it knows the secret: then this calls again.
  // Returns its link, admitted. Throws kPeerLost (nobody there; the door refuses; with the field `unanswered` when the
  // link has ended before the peer said whether it lets this side in), kDeadline, kAuth, kProtocol, and whatever either
  // side's Admit threw; kCancelled when the caller gives up. `meeting` goes into the metadata that both
  // sides' Admit sees.
  virtual std::shared_ptr<Link> connect(const std::string& address, const Waiting& waiting,
                                        std::uint64_t meeting = 0) = 0;
  // Stops listening and closes what is not admitted yet; connect() throws kClosed soon. Links live on. Idempotent.
  // Waits for an admission under way in the reactor's thread: do not hold a lock that Admit takes. When it has
  // returned, neither Introduce nor Admit is called but by a connect() that has not returned yet.
  virtual void close() noexcept = 0;
};

}  // namespace kvpool
