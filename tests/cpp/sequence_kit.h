// Pools that attention can read, with values that make a result easy to know.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/distributed/attend.h"
#include "kvpool/distributed/sequence.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"

namespace kvpool::testing {

constexpr std::uint32_t kDim = 8;
constexpr std::uint32_t kQueryHeads = 2;
constexpr std::int64_t kSecondsNs = 20'000'000'000;

// Two layers of one KV head in float32.
inline PoolOptions attendable(std::uint32_t hbm, std::uint32_t dram = 0) {
  PoolOptions options = small_options(hbm, dram);
  options.layout.piece_bytes.assign(4, kPage * kDim * sizeof(float));
  options.layout.format = {1, kDim, DType::kFloat32, false, false};
  return options;
}

inline std::shared_ptr<PeerNode> make_attendable_node(std::uint32_t hbm, std::uint32_t dram = 0, int threads = 1) {
  return std::make_shared<PeerNode>(std::make_shared<Pool>(attendable(hbm, dram)), make_ranks, PeerNode::kTimeoutNs,
                                    threads);
}

// K (piece 0) or V (piece 1) of a layer in a block.
inline float* piece_of(Pool& pool, Address address, std::uint32_t layer, std::uint32_t piece) {
  const Segment& segment = pool.arena(medium_of(address))->segments()[0];
  std::byte* const block = segment.base + block_of(address) * segment.stride;
  return reinterpret_cast<float*>(block + (2 * layer + piece) * kPage * kDim * sizeof(float));
}

// V of a layer in all blocks; K is left as zeros, so that every token has the same weight.
inline void fill_values(Pool& pool, std::span<const Address> addresses, std::uint32_t layer, float value) {
  for (const Address address : addresses) std::fill_n(piece_of(pool, address, layer, 1), kPage * kDim, value);
}

inline std::shared_ptr<Sequence> sequence_of(PeerNode& node, std::span<const Address> addresses,
                                             std::optional<std::uint64_t> tokens = std::nullopt) {
  return std::make_shared<Sequence>(node, addresses, tokens, monotonic_ns() + kSecondsNs);
}

inline Attend::Request request_of(std::vector<std::shared_ptr<Sequence>> sequences, std::uint32_t layer = 0) {
  Attend::Request request;
  request.layer = layer;
  request.query_heads = kQueryHeads;
  request.query_dtype = DType::kFloat32;
  for (auto& sequence : sequences) request.sequences.push_back({std::move(sequence), 1});
  request.q.resize(request.sequences.size() * kQueryHeads * kDim * sizeof(float));
  return request;
}

inline std::vector<std::vector<float>> finished(Attend& attend) {
  std::vector<std::vector<float>> results;
  attend.merge();
  const std::vector<PartialAttention> parts = attend.take_parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].finish(DType::kFloat32, attend.tokens()[i],
                    std::as_writable_bytes(std::span(results.emplace_back(kQueryHeads * kDim))));
  }
  return results;
}

inline std::vector<float> all_of_value(float value) { return std::vector<float>(kQueryHeads * kDim, value); }

inline std::uint32_t free_blocks(Pool& pool, Medium medium = Medium::kHbm) {
  return pool.stats().media[medium].by_state[static_cast<std::size_t>(BlockState::kFree)];
}

}  // namespace kvpool::testing
