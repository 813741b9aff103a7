#include "kvpool/transfer/same_blocks.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

[[noreturn]] void fail(const PeerMetadata& metadata, std::string_view peer_name, const Layout& own,
                       std::string_view own_name) {
  const auto layers = [](const PageFormat& format, std::size_t pieces) {
    return format.known() ? static_cast<std::int64_t>(pieces / format.pieces_per_layer()) : 0;
  };
  std::uint64_t offered = 0;
  for (const std::uint64_t bytes : metadata.piece_bytes) offered += bytes;
  const std::string peer = describe_blocks(metadata.format, metadata.piece_bytes, metadata.block_tokens);
  const std::string here = describe_blocks(own.format, own.piece_bytes, own.block_tokens);
  throw Error(
      ErrorCode::kLayoutMismatch,
      "the layouts differ: " + std::string(peer_name) + " has " + peer + "; " + std::string(own_name) + " has " + here,
      {{"offered_bytes", static_cast<std::int64_t>(offered)},
       {"layout_bytes", static_cast<std::int64_t>(own.block_bytes())},
       {"offered_layers", layers(metadata.format, metadata.piece_bytes.size())},
       {"layout_layers", layers(own.format, own.piece_bytes.size())},
       {"offered_kv_heads", metadata.format.kv_heads},
       {"layout_kv_heads", own.format.kv_heads},
       {"offered_head_dim", metadata.format.head_dim},
       {"layout_head_dim", own.format.head_dim},
       {"offered_block_tokens", metadata.block_tokens},
       {"layout_block_tokens", own.block_tokens}});
}

}  // namespace

void check_same_blocks(const PeerMetadata& metadata, std::string_view peer_name, const Layout& own,
                       std::string_view own_name) {
  const bool same = metadata.format == own.format && metadata.block_tokens == own.block_tokens &&
                    std::ranges::equal(metadata.piece_bytes, own.piece_bytes);
  if (!same) fail(metadata, peer_name, own, own_name);
}

void check_same_rows(const PeerMetadata& metadata, const Layout& own) {
  PageFormat theirs = metadata.format;
  theirs.kv_heads = own.format.kv_heads;
  if (theirs == own.format && metadata.format.known() == own.format.known() &&
      metadata.block_tokens == own.block_tokens) {
    return;
  }
  fail(metadata, metadata.name, own, "this rank");
}

}  // namespace kvpool
