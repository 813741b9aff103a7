// What a pool asks of its GPU.
#pragma once

#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool_guard.h"

namespace kvpool {

// Returns what the call returns, and throws what it throws. A pool that has lost its GPU has failed.
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
