#include <utility>

#include "kvpool/cuda/context.h"
#include "kvpool/routes/cuda_ipc/cuda_route.h"
#include "kvpool/routes/host/host_transports.h"
#include "kvpool/routes/host/memory_route.h"
#include "kvpool/routes/host/process_pools.h"

namespace kvpool {
namespace {

class LoopbackTransport final : public Transport {
 public:
  explicit LoopbackTransport(const TransportSetup& setup) : incarnation_(setup.incarnation), team_(setup.team) {
    ProcessPools::add(incarnation_, setup.memory);
  }
  ~LoopbackTransport() override { ProcessPools::remove(incarnation_); }
  LoopbackTransport(const LoopbackTransport&) = delete;
  LoopbackTransport& operator=(const LoopbackTransport&) = delete;

  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    const auto found = peer.is_here() ? ProcessPools::find(peer.metadata.incarnation) : std::nullopt;
    if (!found) return;
    if (has_blocks(found->host_spans()) && has_blocks(memory.host_spans())) {
      const auto both = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(memory.keepalive(),
                                                                                                  found->keepalive());
      routes.push_back(make_loopback_route(memory.host_spans(), found->host_spans(), both, team_));
    }
    // A GPU's copies are planned once for all blocks, so they find none that lie in pieces.
    if (memory.in_pieces() || found->in_pieces()) return;
    const auto gpu = memory.gpu();
    if (gpu == nullptr || !has_blocks(found->gpu_spans(*gpu))) return;
    routes.push_back(make_cuda_loopback_route(gpu_side_of(memory, gpu),
                                              {found->gpu_spans(*gpu), found->on_gpu(), found->keepalive()}));
  }
  Exposure exposure(const PeerEnd& peer) const override {
    const bool here = peer.is_here();
    return {.by_process = here, .by_gpu = here && peer.has_gpu()};
  }
  void let_go() noexcept override { ProcessPools::remove(incarnation_); }

 private:
  const std::uint64_t incarnation_;
  CopyTeam& team_;
};

}  // namespace

std::unique_ptr<Transport> make_loopback_transport(const TransportSetup& setup) {
  return std::make_unique<LoopbackTransport>(setup);
}

}  // namespace kvpool
