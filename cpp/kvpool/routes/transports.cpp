#include "kvpool/routes/transports.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/routes/cuda_ipc/cuda_ipc_transport.h"
#include "kvpool/routes/host/host_transports.h"
#include "kvpool/routes/host/memory_route.h"
#include "kvpool/routes/nccl/nccl_transport.h"
#include "kvpool/routes/sock/sock_transport.h"
#include "kvpool/routes/ucx/ucx_transport.h"

namespace kvpool {
namespace {

// Not by default: cma lets peers write anywhere in the process, ucx and nccl take long to start.
constexpr std::array kTransports = {
    TransportKind{"loopback", true, make_loopback_transport, true},
    TransportKind{"shm", true, make_shm_transport},
    TransportKind{"cuda_ipc", true, make_cuda_ipc_transport},
    TransportKind{"cma", false, make_cma_transport},
    TransportKind{"ucx", false, make_ucx_transport},
    TransportKind{"nccl", false, make_nccl_transport},
    TransportKind{"sock", true, make_sock_transport, true},
};

}  // namespace

std::span<const TransportKind> all_transports() noexcept { return kTransports; }

std::unique_ptr<Route> make_reader(std::shared_ptr<const MediaSpans> from, const LocalMemory& to, CopyTeam& team) {
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<const MediaSpans>>;
  MediaSpans spans = *from;
  return make_loopback_route(std::move(spans), to.host_spans(), std::make_shared<Both>(to.keepalive(), std::move(from)),
                             team);
}

std::vector<TransportKind> transports_named(std::span<const TransportKind> kinds, const std::vector<std::string>& names,
                                            bool in_pieces) {
  std::vector<TransportKind> chosen;
  if (names.empty()) {
    std::ranges::copy_if(kinds, std::back_inserter(chosen), [&](const TransportKind& kind) {
      return kind.by_default && (kind.finds_pieces || !in_pieces);
    });
    return chosen;
  }
  for (const std::string& name : names) {
    const auto kind = std::ranges::find(kinds, name, &TransportKind::name);
    if (kind == kinds.end()) {
      std::string known;
      for (const TransportKind& other : kinds) known += (known.empty() ? "" : ", ") + std::string(other.name);
      throw Error(ErrorCode::kArgument, "there is no route '" + name + "'; routes are " + known);
    }
    if (in_pieces && !kind->finds_pieces) {
      throw Error(ErrorCode::kUnsupported, "the route '" + name +
                                               "' needs blocks in one piece, and those of this pool may lie in "
                                               "several: name others, or load the model with pieces=\"whole\"");
    }
    chosen.push_back(*kind);
  }
  return chosen;
}

}  // namespace kvpool
