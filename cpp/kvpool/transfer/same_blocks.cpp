#include "kvpool/transfer/same_blocks.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

[[noreturn]] void fail(const PeerCard& card, std::string_view peer_name, const Layout& own, std::string_view own_name) {
  const auto layers = [](const PageFormat& format, std::size_t pieces) {
    return format.known() ? static_cast<std::int64_t>(pieces / format.pieces_per_layer()) : 0;
  };
  std::uint64_t offered = 0;
  for (const std::uint64_t bytes : card.piece_bytes) offered += bytes;
  const std::string peer = describe_blocks(card.format, card.piece_bytes, card.block_tokens);
  const std::string here = describe_blocks(own.format, own.piece_bytes, own.block_tokens);
  throw Error(
      ErrorCode::kLayoutMismatch,
      "the layouts differ: " + std::string(peer_name) + " has " + peer + "; " + std::string(own_name) + " has " + here,
      {{"offered_bytes", static_cast<std::int64_t>(offered)},
       {"layout_bytes", static_cast<std::int64_t>(own.block_bytes())},
       {"offered_layers", layers(card.format, card.piece_bytes.size())},
       {"layout_layers", layers(own.format, own.piece_bytes.size())},
       {"offered_kv_heads", card.format.kv_heads},
       {"layout_kv_heads", own.format.kv_heads},
       {"offered_head_dim", card.format.head_dim},
       {"layout_head_dim", own.format.head_dim},
       {"offered_block_tokens", card.block_tokens},
       {"layout_block_tokens", own.block_tokens}});
}

}  // namespace

void check_same_blocks(const PeerCard& card, std::string_view peer_name, const Layout& own, std::string_view own_name) {
  const bool same = card.format == own.format && card.block_tokens == own.block_tokens &&
                    std::ranges::equal(card.piece_bytes, own.piece_bytes);
  if (!same) fail(card, peer_name, own, own_name);
}

void check_same_rows(const PeerCard& card, const Layout& own) {
  PageFormat theirs = card.format;
  theirs.kv_heads = own.format.kv_heads;
  if (theirs == own.format && card.format.known() == own.format.known() && card.block_tokens == own.block_tokens) {
    return;
  }
  fail(card, card.name, own, "this rank");
}

}  // namespace kvpool
