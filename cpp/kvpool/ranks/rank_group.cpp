#include "kvpool/ranks/rank_group.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// [first, end) of the pieces of the logical block: K and V of each layer in turn, or, fused, one for each layer.
struct PieceRange {
  std::uint64_t first;
  std::uint64_t end;
};

std::vector<PieceRange> pieces_of(const KVShape& shape, std::span<const BlockStrip> logical) {
  const std::uint64_t piece = shape.piece_bytes();
  std::vector<PieceRange> ranges;
  ranges.reserve(logical.size());
  std::uint64_t end = 0;
  for (const BlockStrip& strip : logical) {
    const bool whole = strip.from == strip.to && strip.from % piece == 0 && strip.bytes % piece == 0;
    const std::uint64_t block = shape.block_bytes();
    if (!whole || strip.from < end || strip.from > block || strip.bytes > block - strip.from) {
      throw Error(ErrorCode::kArgument,
                  "a logical instance writes whole layers, or K or V of one, in order; asked for are " +
                      std::to_string(strip.bytes) + " bytes from " + std::to_string(strip.from) + " to " +
                      std::to_string(strip.to) + " of blocks of " + std::to_string(block) + " bytes, in pieces of " +
                      std::to_string(piece),
                  {{"value", static_cast<std::int64_t>(strip.from)}});
    }
    end = strip.from + strip.bytes;
    ranges.push_back({strip.from / piece, end / piece});
  }
  return ranges;
}

ChannelWrite channel_of(const Sharding& sharding, const ReshardPair& pair, std::span<const PieceRange> ranges) {
  const RankSlice held = sharding.slice(pair.from_rank);
  const std::uint64_t per_layer = sharding.shape().pieces_per_layer();
  const std::uint64_t first = per_layer * held.layer_first;
  const std::uint64_t end = first + per_layer * held.layers;
  const std::uint64_t piece = held.heads * sharding.shape().head_bytes();
  ChannelWrite channel{pair.to_rank, 0, {}};
  for (const PieceRange& range : ranges) {
    const std::uint64_t low = std::max(range.first, first);
    const std::uint64_t high = std::min(range.end, end);
    if (low >= high) continue;
    for (const BlockStrip& strip : clip_strips(pair.strips, (low - first) * piece, (high - first) * piece)) {
      channel.strips.push_back(strip);
      channel.bytes += strip.bytes;
    }
  }
  return channel;
}

}  // namespace

std::uint64_t RankOrder::bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const ChannelWrite& channel : channels) bytes += channel.bytes;
  return bytes;
}

std::vector<RankOrder> rank_orders(const ReshardPlan& plan, std::span<const BlockStrip> logical) {
  const std::vector<PieceRange> ranges = pieces_of(plan.from.shape(), logical);
  std::vector<RankOrder> orders;
  for (std::uint32_t rank = 0; rank < plan.from.ranks(); ++rank) {
    RankOrder order{rank, {}};
    for (const ReshardPair& pair : plan.of_sender(rank)) {
      ChannelWrite channel = channel_of(plan.from, pair, ranges);
      if (!channel.strips.empty()) order.channels.push_back(std::move(channel));
    }
    if (order.channels.empty()) continue;
    const auto first = static_cast<std::ptrdiff_t>(rank % order.channels.size());
    std::ranges::rotate(order.channels, order.channels.begin() + first);
    orders.push_back(std::move(order));
  }
  return orders;
}

}  // namespace kvpool
