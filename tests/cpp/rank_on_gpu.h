// Ranks of this process whose memory is on a (fake) GPU.
#pragma once

#include "device_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/cuda/order.h"
#include "rank_here.h"

namespace kvpool::testing {

inline RankSpec on_gpu(int device) {
  RankSpec spec;
  spec.device = device;
  return spec;
}

// The spans of a rank as the CPU finds them.
inline MediaSpans host_view(const FakeCuda& cuda, const RankHere& rank) {
  MediaSpans spans = rank.memory.spans();
  for (MediumSpan& span : spans) {
    for (Segment& segment : span.segments) {
      if (span.blocks > 0) segment.base = cuda.host(segment.base, (span.blocks - 1) * segment.stride + segment.bytes);
    }
  }
  return spans;
}

inline void fill(const FakeCuda& cuda, const RankHere& rank, std::size_t block, std::uint8_t value) {
  fill_block(cuda, *rank.memory.arenas[Medium::kHbm], block_of(rank.at(block)), value);
}

inline bool is(const FakeCuda& cuda, const RankHere& rank, std::size_t block, std::uint8_t value) {
  return block_is(cuda, *rank.memory.arenas[Medium::kHbm], block_of(rank.at(block)), value);
}

// Gives an order for whole blocks, and waits for its report: the error's code, or nothing.
inline std::optional<ErrorCode> send(RankHere& from, RankHere& to, std::vector<Address> sources,
                                     std::vector<Address> targets, std::shared_ptr<const DeviceOrder> after = nullptr) {
  const auto outcome = std::make_shared<Outcome>();
  std::uint64_t bytes = 0;
  for (const std::size_t piece : from.pool->layout().piece_bytes) bytes += piece;
  give(from, 5, {{part(to.number, 0, bytes)}, std::move(sources), std::move(targets)}, outcome, 20, std::move(after));
  REQUIRE(soon([&] { return outcome->reports == 1; }));
  if (outcome->code < 0) return std::nullopt;
  return static_cast<ErrorCode>(outcome->code.load());
}

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
