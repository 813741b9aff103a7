#include "kvpool/transfer/strategy.h"

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

std::uint32_t pieces_per_layer(const Layout& layout) noexcept {
  if (layout.format.known()) return layout.format.pieces_per_layer();
  return layout.piece_bytes.size() % 2 == 0 ? 2 : 1;
}

// A strip for each piece, so that none is joined with its neighbour.
void append_pieces(const Layout& layout, std::size_t first, std::size_t count, std::vector<BlockStrip>& out) {
  std::uint64_t offset = 0;
  for (std::size_t piece = 0; piece < first; ++piece) offset += layout.piece_bytes[piece];
  for (std::size_t piece = first; piece < first + count; ++piece) {
    out.push_back({offset, offset, layout.piece_bytes[piece]});
    offset += layout.piece_bytes[piece];
  }
}

}  // namespace

const char* strategy_name(Strategy strategy) noexcept {
  switch (strategy) {
    case Strategy::kAuto:
      return "auto";
    case Strategy::kByLayer:
      return "by_layer";
    case Strategy::kByLayerAgg:
      return "by_layer_agg";
    case Strategy::kByRequest:
      return "by_request";
    case Strategy::kByRequestAgg:
      return "by_request_agg";
  }
  return "unknown";
}

std::uint32_t layer_count(const Layout& layout) noexcept {
  return static_cast<std::uint32_t>(layout.piece_bytes.size()) / pieces_per_layer(layout);
}

BlockStrip layer_strip(const Layout& layout, std::uint32_t layer) noexcept {
  KVPOOL_DCHECK(layer < layer_count(layout));
  const std::uint32_t per_layer = pieces_per_layer(layout);
  BlockStrip strip{0, 0, 0};
  for (std::uint32_t piece = 0; piece < (layer + 1) * per_layer; ++piece) {
    (piece < layer * per_layer ? strip.from : strip.bytes) += layout.piece_bytes[piece];
  }
  strip.to = strip.from;
  return strip;
}

Strategy strategy_used(Strategy asked, bool streamed) noexcept {
  if (streamed) return asked == Strategy::kByLayer ? Strategy::kByLayer : Strategy::kByLayerAgg;
  return asked == Strategy::kAuto ? Strategy::kByRequestAgg : asked;
}

bool is_layered(Strategy strategy) noexcept {
  return strategy == Strategy::kByLayer || strategy == Strategy::kByLayerAgg;
}

bool merges(Strategy strategy) noexcept { return strategy != Strategy::kByLayer && strategy != Strategy::kByRequest; }

WriteStep layer_step(const Layout& layout, Strategy strategy, std::uint32_t layer) {
  WriteStep step{{}, merges(strategy)};
  const std::uint32_t per_layer = pieces_per_layer(layout);
  if (step.merge) {
    step.strips.push_back(layer_strip(layout, layer));
  } else {
    append_pieces(layout, std::size_t{layer} * per_layer, per_layer, step.strips);
  }
  return step;
}

std::vector<WriteStep> plan_steps(const Layout& layout, Strategy strategy) {
  std::vector<WriteStep> steps;
  if (is_layered(strategy)) {
    for (std::uint32_t layer = 0; layer < layer_count(layout); ++layer) {
      steps.push_back(layer_step(layout, strategy, layer));
    }
    return steps;
  }
  WriteStep& step = steps.emplace_back(WriteStep{{}, merges(strategy)});
  if (step.merge) {
    step.strips.push_back({0, 0, layout.block_bytes()});
  } else {
    append_pieces(layout, 0, layout.piece_bytes.size(), step.strips);
  }
  return steps;
}

}  // namespace kvpool
