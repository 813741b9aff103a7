// What an error of a write means for the peer.
#pragma once

#include "kvpool/base/error.h"

namespace kvpool {

// Whether a write that ends with this error may still be going on: the route lost its peer, or this side lost the GPU
// that was copying. Then the peer must not be told that the writes have ended.
inline bool breaks_route(const Error& error) noexcept {
  return error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeviceLost;
}

// Translates an error for a peer: if this side has lost its GPU or is closing, the peer has lost this side.
inline Error for_peer(const Error& error) {
  const bool leaves = error.code() == ErrorCode::kDeviceLost || error.code() == ErrorCode::kClosed;
  return leaves ? Error(ErrorCode::kPeerLost, error.what()) : error;
}

}  // namespace kvpool
