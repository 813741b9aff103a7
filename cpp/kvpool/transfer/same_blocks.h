// Checks, before any block is exchanged, that a peer's blocks have the same content layout as those of this side.
#pragma once

#include <string_view>

#include "kvpool/blocks/layout.h"
#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool {

// Throws kLayoutMismatch unless both have the same pieces, of the same page format, for the same number of tokens. The
// message describes both sides, by `own_name` and `peer_name`; the fields offered_* are the peer's numbers, layout_*
// this side's.
void check_same_blocks(const PeerMetadata& metadata, std::string_view peer_name, const Layout& own,
                       std::string_view own_name);

// The same for two ranks, which may hold different layers and heads of a block: throws kLayoutMismatch unless they
// agree in the format of a row and in the tokens of a block.
void check_same_rows(const PeerMetadata& metadata, const Layout& own);

}  // namespace kvpool
