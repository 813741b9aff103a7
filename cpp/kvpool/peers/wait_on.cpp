#include "kvpool/peers/wait_on.h"

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/handle.h"

namespace kvpool {

void wait_on(Pool& pool, Transfer& transfer, const CallerStream& stream) {
  pool.guard_process();
  if (!stream) throw Error(ErrorCode::kArgument, "wait_on takes the stream that is to wait: name it");
  if (pool.sharding()) {
    throw Error(ErrorCode::kUnsupported,
                "the blocks of this instance come to its ranks, which work in streams of their own processes: wait for "
                "the handle");
  }
  if (!pool.on_device()) {
    throw Error(ErrorCode::kArgument, "stream is for a pool on a GPU: the memory of this one has no streams");
  }
  try {
    transfer.wait_on(pool.arena(Medium::kHbm)->context(), *stream);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) pool.fail(error);
    throw;
  }
}

}  // namespace kvpool
