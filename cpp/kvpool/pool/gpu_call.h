// Calls of a pool to its GPU.
#pragma once

#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool_guard.h"

namespace kvpool {

// Returns and throws what the call does. If the GPU is lost, the pool fails.
template <class Call>
decltype(auto) ask_gpu(PoolGuard& guard, Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) guard.fail(error);
    throw;
  }
}

}  // namespace kvpool
