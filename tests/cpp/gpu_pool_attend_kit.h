// Pools whose HBM is on a fake GPU and read by attention, and the same content in ordinary memory.
#pragma once

#include "gpu_attention_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device_kit.h"
#include "kvpool/distributed/attend.h"
#include "kvpool/distributed/sequence.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/ranks/instance_ranks.h"
#include "pool_fixture.h"
#include "soon.h"

namespace kvpool::testing {

inline constexpr std::uint32_t kGpuDim = 64;
inline constexpr std::size_t kPieceFloats = kPage * kGpuDim;

// A layer of one KV head in float32.
inline PoolOptions attendable_options(std::uint32_t hbm, std::uint32_t dram, int device) {
  PoolOptions options = small_options(hbm, dram);
  options.device = device;
  options.pin_dram = device >= 0;
  options.layout.piece_bytes.assign(2, kPieceFloats * sizeof(float));
  options.layout.format = {1, kGpuDim, DType::kFloat32, false, false};
  return options;
}

class GpuNodes {
 public:
  GpuNodes() : cubins_(90, DType::kFloat32, kGpuDim) {
    const auto say = cuda_.find<fake_cuda::KernelFunction>("fake_cuda_kernel");
    say("attend_leaves", LeavesByCpu(DType::kFloat32, kGpuDim));
    say("merge_pairs", MergesByCpu(kGpuDim));
  }
  GpuNodes(const GpuNodes&) = delete;
  GpuNodes& operator=(const GpuNodes&) = delete;

  const FakeCuda& fake() const { return cuda_; }
  std::shared_ptr<PeerNode> make(std::uint32_t hbm, std::uint32_t dram = 0, bool with_kernels = true) const {
    return std::make_shared<PeerNode>(std::make_shared<Pool>(attendable_options(hbm, dram, 0)), make_ranks,
                                      PeerNode::kTimeoutNs, 1,
                                      with_kernels ? std::span(cubins_.table) : std::span<const AttentionCubin>());
  }
  static std::shared_ptr<PeerNode> make_on_cpu(std::uint32_t blocks) {
    return std::make_shared<PeerNode>(std::make_shared<Pool>(attendable_options(blocks, 0, -1)), make_ranks);
  }

 private:
  const FakeCuda cuda_;
  const FakeCubins cubins_;
};

// K (piece 0) or V (piece 1) of a block, for the CPU.
inline float* piece_of(const FakeCuda& cuda, Pool& pool, Address address, std::size_t piece) {
  const Arena& arena = *pool.arena(medium_of(address));
  const Segment& segment = arena.segments()[0];
  std::byte* const at = segment.base + block_of(address) * segment.stride + piece * kPieceFloats * sizeof(float);
  return reinterpret_cast<float*>(arena.on_device() ? cuda.host(at, kPieceFloats * sizeof(float)) : at);
}

// Content that depends on the block's place in the sequence alone.
inline void fill_block_of_sequence(const FakeCuda& cuda, Pool& pool, Address address, std::size_t place) {
  Dice dice(static_cast<std::uint64_t>(100 + place));
  for (std::size_t piece = 0; piece < 2; ++piece) {
    float* const values = piece_of(cuda, pool, address, piece);
    for (std::size_t i = 0; i < kPieceFloats; ++i) {
      values[i] = static_cast<float>(dice.below(2000)) / 1000.0F - 1.0F;
    }
  }
}

inline void fill_sequence(const FakeCuda& cuda, Pool& pool, std::span<const Address> addresses) {
  for (std::size_t i = 0; i < addresses.size(); ++i) fill_block_of_sequence(cuda, pool, addresses[i], i);
}

inline std::shared_ptr<Sequence> sequence_over(PeerNode& node, std::span<const Address> addresses) {
  return std::make_shared<Sequence>(node, addresses, std::nullopt, in_seconds(20));
}

inline Attend::Request two_heads_over(std::shared_ptr<Sequence> sequence) {
  Attend::Request request;
  request.query_heads = 2;
  request.query_dtype = DType::kFloat32;
  request.sequences.push_back({std::move(sequence), 1});
  std::vector<float> q(2 * kGpuDim);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 7) / 7.0F - 0.4F;
  request.q.resize(q.size() * sizeof(float));
  std::memcpy(request.q.data(), q.data(), request.q.size());
  return request;
}

inline std::vector<float> output_of(const PartialAttention& part, std::uint64_t tokens) {
  std::vector<float> out(2 * kGpuDim);
  part.finish(DType::kFloat32, tokens, std::as_writable_bytes(std::span(out)));
  return out;
}

inline std::vector<PartialAttention> parts_of(Attend& attend) {
  REQUIRE(attend.wait(in_seconds(20)));
  attend.rethrow_if_failed();
  attend.merge();
  return attend.take_parts();
}

inline PartialAttention part_of(Attend& attend) { return parts_of(attend).front(); }

// Of all sequences, one behind the other.
inline std::vector<float> outputs_of(Attend& attend) {
  std::vector<float> all;
  const std::vector<PartialAttention> parts = parts_of(attend);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<float> out(parts[i].shape().values());
    parts[i].finish(DType::kFloat32, attend.tokens()[i], std::as_writable_bytes(std::span(out)));
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

// What ordinary memory with the same content gives.
inline std::vector<float> expected_output(const FakeCuda& cuda, std::uint32_t blocks) {
  const auto node = GpuNodes::make_on_cpu(blocks);
  const Addresses addresses = alloc(node->pool(), blocks);
  fill_sequence(cuda, node->pool(), addresses);
  const auto attend = Attend::start(*node, two_heads_over(sequence_over(*node, addresses)), in_seconds(20));
  return output_of(part_of(*attend), std::uint64_t{blocks} * kPage);
}

inline void check_close(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  float worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
  CHECK(worst < 1e-5F);
}

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
