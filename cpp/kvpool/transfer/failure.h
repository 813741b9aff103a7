// What an error means for the peer that is concerned.
#pragma once

#include "kvpool/base/error.h"

namespace kvpool {

// Whether a write that ends so may have begun what nobody calls back: the route lost its peer, or this side the GPU
// that was copying. Then the peer must not hear that nothing is written any more.
inline bool breaks_route(const Error& error) noexcept {
  return error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeviceLost;
}

// The error as a peer is told it: that this side has lost its GPU, or is closing, is to the peer that it has lost this
// side.
inline Error for_peer(const Error& error) {
  const bool leaves = error.code() == ErrorCode::kDeviceLost || error.code() == ErrorCode::kClosed;
  return leaves ? Error(ErrorCode::kPeerLost, error.what()) : error;
}

}  // namespace kvpool
