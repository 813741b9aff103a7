#include "kvpool/routes/nccl/nccl_transport.h"

#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/copy_bounds.h"
#include "kvpool/cuda/stream_copier.h"
#include "kvpool/routes/nccl/nccl_library.h"
#include "kvpool/routes/nccl/nccl_route.h"

namespace kvpool {
namespace {

// The peer writes nothing by itself: a thread of this process receives what it sends.
class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const TransportSetup& setup) : limits_(setup.settings.nccl_limits), run_(setup.run) {
    if (!setup.memory.arena(Medium::kHbm)->on_device()) {
      throw Error(ErrorCode::kUnsupported, "the route nccl is for HBM on a GPU, and the HBM here is not on one");
    }
    library_ = &load_nccl(setup.settings.nccl);
  }

  // A peer that names the route has HBM on a GPU, too: else it could not.
  void connect(const LocalMemory& memory, const PeerEnd& peer, Grant*, Routes& routes) override {
    if (!run_) return;
    const Arena& hbm = *memory.arena(Medium::kHbm);
    NcclMemory own;
    own.library = library_;
    own.context = hbm.context();
    own.local = memory.spans();
    own.keepalive = memory.keepalive();
    own.limits = limits_;
    if (!memory.arena(Medium::kDram)->pinned()) own.local[Medium::kDram] = {};
    own.kernels = kernels_for(*own.context);
    own.bounds = known_copy_bounds(own.context->ordinal()).value_or(CopyBounds{});
    routes.push_back(make_nccl_route(own, peer.link, run_));
  }

 private:
  const NcclLimits limits_;
  const RouteRun run_;
  const NcclLibrary* library_ = nullptr;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const TransportSetup& setup) {
  return std::make_unique<NcclTransport>(setup);
}

}  // namespace kvpool
