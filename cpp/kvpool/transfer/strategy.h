// How the blocks of a transfer are cut into writes (MemServe §5.2, Fig 5).
//
//   by_request       one write of all pieces, each piece a call: 2 L calls a block where the layout is discrete
//   by_request_agg   one write in which neighbouring blocks are one call: a block or run each where it is aggregated
//   by_layer         a write a layer, each piece a call
//   by_layer_agg     a write a layer, in which what lies in a row is one call
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/base/strips.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

// A block's pieces are layer-major, K before V, or one a layer where K and V are fused. Of raw blocks two pieces count
// as a layer; where their number is odd, each does.
std::uint32_t layer_count(const Layout& layout) noexcept;
// REQUIRES: layer < layer_count(layout).
BlockStrip layer_strip(const Layout& layout, std::uint32_t layer) noexcept;

struct WriteStep {
  std::vector<BlockStrip> strips;
  bool merge;
};

// What is used where this was asked for: kAuto makes one call of what lies in a row, as by_request_agg. Where the
// caller sends layer by layer, all but by_layer is by_layer_agg.
Strategy strategy_used(Strategy asked, bool streamed) noexcept;
bool is_layered(Strategy strategy) noexcept;
// The steps of a strategy in order. One step of a streamed transfer is one layer.
std::vector<WriteStep> plan_steps(const Layout& layout, Strategy strategy);
WriteStep layer_step(const Layout& layout, Strategy strategy, std::uint32_t layer);

}  // namespace kvpool
