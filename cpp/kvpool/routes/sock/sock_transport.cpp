#include "kvpool/routes/sock/sock_transport.h"

#include "kvpool/routes/sock/sock_route.h"

namespace kvpool {
namespace {

// The peer writes nothing by itself: this process places what comes over the link.
class SockTransport final : public Transport {
 public:
  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    routes.push_back(make_sock_route(memory.spans(), memory.keepalive(), peer.link, memory.staging, memory.on_gpu()));
  }
};

}  // namespace

std::unique_ptr<Transport> make_sock_transport(const TransportSetup&) { return std::make_unique<SockTransport>(); }

}  // namespace kvpool
