#include "kvpool/routes/host/cma_route.h"
#include "kvpool/routes/host/host_transports.h"
#include "kvpool/routes/tracers.h"

namespace kvpool {
namespace {

class CmaTransport final : public Transport {
 public:
  explicit CmaTransport(const TransportSetup& setup) : team_(setup.team) {
    static_cast<void>(allow_tracers());  // whether it is enough, the peer finds out as it connects
  }

  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    if (!peer.same_host || peer.link->pidfd() < 0 || !has_blocks(memory.host_spans())) return;
    routes.push_back(make_cma_route(memory.host_spans(), memory.keepalive(), peer.metadata,
                                    static_cast<pid_t>(peer.metadata.pid), peer.link->pidfd(), team_));
  }
  Exposure exposure(const PeerEnd& peer) const override {
    return {.by_process = peer.same_host, .by_address = peer.same_host};
  }

 private:
  CopyTeam& team_;
};

}  // namespace

std::unique_ptr<Transport> make_cma_transport(const TransportSetup& setup) {
  return std::make_unique<CmaTransport>(setup);
}

}  // namespace kvpool
