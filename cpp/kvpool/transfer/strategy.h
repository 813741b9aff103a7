// How the blocks of a transfer are cut into writes (MemServe §5.2, Fig 5).
//
//   by_request       one write of all pieces, each piece a call: 2 L calls a block if the layout is discrete
//   by_request_agg   one write: contiguous ranges are joined, and gathered into messages where the route has these
//   by_layer         one write for each layer, each piece a call
//   by_layer_agg     one write for each layer, joined and gathered in the same way: one message if it is short
//
// sock gathers pieces into frames of up to 4 MiB, cma into lists of up to 1,024 for the kernel, nccl into passes.
// loopback, shm, cuda_ipc and ucx write each range in place: gathering would copy it once more.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

// A block's pieces are layer-major, K before V, or one a layer if K and V are fused. In raw blocks, two pieces count as
// a layer; if the number of pieces is odd, each counts as one.
std::uint32_t layer_count(const Layout& layout) noexcept;
// REQUIRES: layer < layer_count(layout).
BlockStrip layer_strip(const Layout& layout, std::uint32_t layer) noexcept;

struct WriteStep {
  std::vector<BlockStrip> strips;
  bool merge;  // and gather
};

// The strategy that is used for a request: for kAuto, by_request_agg. If the caller sends layer by layer, by_layer
// stays and all others become by_layer_agg.
Strategy strategy_used(Strategy asked, bool streamed) noexcept;
bool is_layered(Strategy strategy) noexcept;
// Whether contiguous ranges are joined, and gathered. REQUIRES: the strategy is one that is used.
bool merges(Strategy strategy) noexcept;
// The steps of a strategy in order. One step of a streamed transfer is one layer.
std::vector<WriteStep> plan_steps(const Layout& layout, Strategy strategy);
WriteStep layer_step(const Layout& layout, Strategy strategy, std::uint32_t layer);

}  // namespace kvpool
