// Peer metadata with every field set, for tests of metadata and of code that carries them.
#pragma once

#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool::testing {

// 8 layers of 3,072 bytes of K and of V each, for 16 blocks; HBM aggregated and mapped, DRAM in one segment a piece.
inline PeerMetadata sample_metadata() {
  PeerMetadata metadata;
  metadata.name = "prefill-0 \xC3\xA9\xE2\x82\xAC\xF0\x9F\x90\x99";
  metadata.instance = 17;
  metadata.incarnation = 0x1234567890ABCDEF;
  metadata.pid = 4321;
  metadata.host = "0f0e0d0c-0b0a-4000-8000-000000000000-4026531836";
  metadata.block_tokens = 16;
  metadata.piece_bytes.assign(16, 3072);
  metadata.model = "llama";
  metadata.routes = {"shm", "sock", "ucx"};
  constexpr std::uint64_t kBlock = 16 * 3072;
  metadata.media[Medium::kHbm] = {16, 16 * kBlock, {{0x7F0000000000, kBlock, kBlock}}};
  metadata.media[Medium::kDram] = {32, 0, {}};
  for (std::uint64_t piece = 0; piece < 16; ++piece) {
    metadata.media[Medium::kDram].segments.push_back({0x7E0000000000 + piece * 0x100000, 4096, 3072});
  }
  metadata.ucx = {std::byte{1}, std::byte{2}, std::byte{3}};
  metadata.local_socket = "kvpool-4321-1";
  metadata.format = {8, 12, DType::kBfloat16, false, false};
  metadata.meeting = 77;
  metadata.rank_of = 0xFEDC;
  metadata.rank = 3;
  metadata.address = "tcp:127.0.0.1:4000";
  return metadata;
}

// The same with HBM on a GPU, in two allocations that stand side by side: as an engine has it.
inline PeerMetadata sample_gpu_metadata() {
  PeerMetadata metadata = sample_metadata();
  constexpr std::uint64_t kBase = 0x7D0000000000;
  constexpr std::uint64_t kHalf = 8 * 3072;
  MetadataMedium& hbm = metadata.media[Medium::kHbm];
  hbm = {16, 0, {{kBase + 512, kHalf, kHalf}, {kBase + 0x200000, kHalf, kHalf}}, MemoryKind::kGpu, {}};
  hbm.allocations = {{kBase, 0x200000, {}}, {kBase + 0x200000, 16 * kHalf, {}}};
  for (std::size_t i = 0; i < kMetadataHandleBytes; ++i) {
    hbm.allocations[0].handle[i] = static_cast<std::byte>(i);
    hbm.allocations[1].handle[i] = static_cast<std::byte>(200 - i);
  }
  return metadata;
}

// The scheduler of two tensor-parallel ranks in each of two stages, of which two have joined.
inline PeerMetadata sample_group_metadata() {
  PeerMetadata metadata = sample_metadata();
  metadata.rank_of = 0;
  metadata.rank = 0;
  metadata.address = "";
  for (MetadataMedium& medium : metadata.media) medium = {medium.blocks, 0, {}};
  metadata.tp = 2;
  metadata.stage_layers = {5, 3};
  metadata.ranks = {{1, 0xABCD, "unix:@one"}, {3, 0xABCE, "tcp:10.0.0.2:1"}};
  return metadata;
}

inline Bytes written(const PeerMetadata& metadata) {
  Bytes out;
  WireWriter writer(out);
  write_metadata(metadata, writer);
  return out;
}

}  // namespace kvpool::testing
