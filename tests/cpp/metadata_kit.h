// Peer metadata with every field set, for tests of metadata and of code that carries them.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "kvpool/base/error.h"
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

using MetadataChange = std::function<void(PeerMetadata&)>;

// The bytes of peer metadata, without the checks of write_metadata: as an attacker writes them.
inline Bytes forged(const PeerMetadata& metadata) {
  Bytes out;
  WireWriter writer(out);
  writer.number(std::uint32_t{0})
      .number(metadata.instance)
      .number(metadata.incarnation)
      .number(metadata.pid)
      .number(metadata.block_tokens);
  writer.text(metadata.name).text(metadata.host).text(metadata.model).text(metadata.local_socket);
  writer.array(std::span<const std::uint64_t>(metadata.piece_bytes))
      .number(static_cast<std::uint32_t>(metadata.routes.size()));
  for (const std::string& route : metadata.routes) writer.text(route);
  for (const MetadataMedium& medium : metadata.media) {
    writer.number(medium.blocks).number(static_cast<std::uint8_t>(medium.kind)).number(medium.mapped_bytes);
    writer.array(std::span<const MetadataSegment>(medium.segments));
    writer.array(std::span<const MetadataAllocation>(medium.allocations));
  }
  writer.blob(metadata.ucx);
  writer.number(metadata.format.kv_heads).number(metadata.format.head_dim);
  writer.number(static_cast<std::uint8_t>(metadata.format.dtype));
  writer.number(static_cast<std::uint8_t>(metadata.format.tokens_first));
  writer.number(static_cast<std::uint8_t>(metadata.format.fused));
  writer.number(metadata.meeting)
      .number(metadata.rank_of)
      .number(metadata.rank)
      .text(metadata.address)
      .number(metadata.tp);
  writer.array(std::span<const std::uint32_t>(metadata.stage_layers));
  writer.number(static_cast<std::uint32_t>(metadata.ranks.size()));
  for (const MetadataRank& rank : metadata.ranks) writer.number(rank.rank).number(rank.incarnation).text(rank.address);
  return out;
}

inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kProtocol);
    return error.what();
  }
  return "nothing was refused";
}

// Neither side lets such peer metadata pass, and both say why.
inline void check_refused(const char* says, const MetadataChange& change, PeerMetadata metadata = sample_metadata()) {
  change(metadata);
  const Bytes bytes = forged(metadata);
  CAPTURE(says);
  WireReader in(bytes);
  const std::string at_reading = refusal([&] { read_metadata(in); });
  CHECK_MESSAGE(at_reading.find(says) != std::string::npos, at_reading);
  const std::string at_writing = refusal([&] { written(metadata); });
  CHECK_MESSAGE(at_writing.find("metadata of a peer") != std::string::npos, at_writing);
}

inline void check_accepted(const MetadataChange& change) {
  PeerMetadata metadata = sample_metadata();
  change(metadata);
  const Bytes bytes = written(metadata);
  WireReader in(bytes);
  CHECK_NOTHROW(read_metadata(in));
}

}  // namespace kvpool::testing
