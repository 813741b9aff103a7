// What a pool asks of its GPU.
#pragma once

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

// Returns what the call returns, and throws what it throws. With the GPU the pool is lost. REQUIRES: the pool's lock is
// not held.
template <class Call>
decltype(auto) ask_gpu(Pool& pool, Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) pool.fail(error);
    throw;
  }
}

}  // namespace kvpool
