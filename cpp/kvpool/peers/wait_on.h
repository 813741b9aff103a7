// Lets a CUDA stream of the application wait for a fetch.
#pragma once

#include "kvpool/cuda/stream.h"

namespace kvpool {

class Pool;
class Transfer;

// Transfer::wait_on for a stream of the application. Also throws kArgument without a stream or if this pool's memory is
// not on a GPU, kUnsupported for a logical instance, kFork, and kClosed.
void wait_on(Pool& pool, Transfer& transfer, const CallerStream& stream);

}  // namespace kvpool
