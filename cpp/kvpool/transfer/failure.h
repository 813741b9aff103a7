// Errors as values, where one must not fly on: in work that a peer asked for, and in callbacks.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

// What the work threw. What is no Error is memory that ran out.
template <class Work>
std::optional<Error> failure_of(Work&& work) {
  try {
    work();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kOutOfMemory, std::string("memory ran out: ") + error.what());
  }
}

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
