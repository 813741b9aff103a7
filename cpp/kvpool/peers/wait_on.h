// A stream of the application's that waits for a fetch.
#pragma once

#include "kvpool/cuda/stream.h"

namespace kvpool {

class Pool;
class Transfer;

// Transfer::wait_on for a stream that the application names. Throws also kArgument when none is named, or when the
// memory of this pool has no streams, kUnsupported for a logical instance, kFork, and kClosed.
void wait_on(Pool& pool, Transfer& transfer, const CallerStream& stream);

}  // namespace kvpool
