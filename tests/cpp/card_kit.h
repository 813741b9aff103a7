// A card of which every field is used, for tests of cards and of what carries them.
#pragma once

#include "kvpool/transport/card.h"

namespace kvpool::testing {

// 8 layers of 3,072 bytes of K and of V each, for 16 blocks; HBM aggregated and mapped, DRAM in one segment a piece.
inline PeerCard sample_card() {
  PeerCard card;
  card.name = "prefill-0 \xC3\xA9\xE2\x82\xAC\xF0\x9F\x90\x99";
  card.instance = 17;
  card.epoch = 0x1234567890ABCDEF;
  card.pid = 4321;
  card.host = "0f0e0d0c-0b0a-4000-8000-000000000000-4026531836";
  card.block_tokens = 16;
  card.piece_bytes.assign(16, 3072);
  card.model = "llama";
  card.routes = {"shm", "sock", "ucx"};
  constexpr std::uint64_t kBlock = 16 * 3072;
  card.media[0] = {16, 16 * kBlock, {{0x7F0000000000, kBlock, kBlock}}};
  card.media[1] = {32, 0, {}};
  for (std::uint64_t piece = 0; piece < 16; ++piece) {
    card.media[1].segments.push_back({0x7E0000000000 + piece * 0x100000, 4096, 3072});
  }
  card.ucx = {std::byte{1}, std::byte{2}, std::byte{3}};
  card.door = "kvpool-4321-1";
  card.format = {8, 12, DType::kBfloat16, false, false};
  card.meeting = 77;
  card.rank_of = 0xFEDC;
  card.rank = 3;
  card.address = "tcp:127.0.0.1:4000";
  return card;
}

// The same with HBM on a GPU, in two allocations that stand side by side: as an engine has it.
inline PeerCard sample_gpu_card() {
  PeerCard card = sample_card();
  constexpr std::uint64_t kBase = 0x7D0000000000;
  constexpr std::uint64_t kHalf = 8 * 3072;
  CardMedium& hbm = card.media[0];
  hbm = {16, 0, {{kBase + 512, kHalf, kHalf}, {kBase + 0x200000, kHalf, kHalf}}, MemoryKind::kGpu, {}};
  hbm.allocations = {{kBase, 0x200000, {}}, {kBase + 0x200000, 16 * kHalf, {}}};
  for (std::size_t i = 0; i < kCardHandleBytes; ++i) {
    hbm.allocations[0].handle[i] = static_cast<std::byte>(i);
    hbm.allocations[1].handle[i] = static_cast<std::byte>(200 - i);
  }
  return card;
}

// The scheduler of two tensor-parallel ranks in each of two stages, of which two have joined.
inline PeerCard sample_group_card() {
  PeerCard card = sample_card();
  card.rank_of = 0;
  card.rank = 0;
  card.address = "";
  for (CardMedium& medium : card.media) medium = {medium.blocks, 0, {}};
  card.tp = 2;
  card.stage_layers = {5, 3};
  card.ranks = {{1, 0xABCD, "unix:@one"}, {3, 0xABCE, "tcp:10.0.0.2:1"}};
  return card;
}

inline Bytes written(const PeerCard& card) {
  Bytes out;
  WireWriter writer(out);
  write_card(card, writer);
  return out;
}

}  // namespace kvpool::testing
