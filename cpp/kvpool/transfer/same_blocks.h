// Whether the blocks of a peer hold what blocks of this side hold: the check that comes before any block is exchanged.
#pragma once

#include <string_view>

#include "kvpool/blocks/layout.h"
#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool {

// Throws kLayoutMismatch unless both have the same pieces, of the same page format, for as many tokens. The message
// describes both sides; the fields are the numbers: offered_* are the peer's, layout_* this side's. `own_name` and
// `peer_name` are what the message calls the two.
void check_same_blocks(const PeerMetadata& metadata, std::string_view peer_name, const Layout& own,
                       std::string_view own_name);

// The same of two ranks, each of which may hold other layers and heads of a block: throws kLayoutMismatch unless they
// agree in the format of a row and in the tokens of a block.
void check_same_rows(const PeerMetadata& metadata, const Layout& own);

}  // namespace kvpool
