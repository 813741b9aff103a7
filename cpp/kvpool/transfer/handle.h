// A transfer under way, as its caller sees it.
//
// Thread-safety: all of it. A handle that is dropped does not cancel its transfer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/cuda/context.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

class Transfer {
 public:
  virtual ~Transfer() = default;

  // True when it has ended, one way or another; then rethrow_if_failed() and results() may be called. Helps: reads what
  // arrives on the link, and copies what is small, in this thread. Returns false at `until_ns` (CLOCK_MONOTONIC).
  virtual bool wait(std::int64_t until_ns) = 0;
  virtual bool done() const noexcept = 0;
  // Throws how it failed: kPeerLost, kDeadline, kCancelled, kBusy, kOutOfBlocks, kNotOwner, kLayoutMismatch, ...
  virtual void rethrow_if_failed() const = 0;
  // Where the blocks are at the receiver, in the order of the request; with an insertion, the canonical ones.
  virtual const std::vector<Address>& addresses() const = 0;
  virtual TransferStats stats() const = 0;
  virtual std::uint64_t bytes_done() const noexcept = 0;
  virtual std::uint64_t bytes_total() const noexcept = 0;

  // Asks it to end with kCancelled. False when it ends, or has ended, in another way: the receiver was told that all is
  // written, or it has failed. The handle is done when both sides know.
  virtual bool cancel() = 0;
  // Of a fetch: the stream, one of this context, does what it is given from now on when the fetch has ended, one way or
  // another; done() is true then. Does not wait itself. If it fails then, the destinations are not free before this
  // handle is gone. Once it has ended: nothing, but throws how it failed. Throws kState when it is no fetch, or the
  // stream is being captured, kArgument for a stream of something else, kUnsupported, kOutOfMemory, kDeviceLost.
  virtual void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) = 0;
  // An eventfd that becomes readable when it is done; made at the first call, owned by the handle.
  virtual int done_fd() = 0;

  // Of a streamed transfer: this layer's content is complete, send it. Throws kState when it is not streamed or was
  // finished, kArgument for a layer that is not there or was sent. Does not wait for the bytes. `after`: as of the
  // request, for this layer.
  virtual void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after = nullptr) = 0;
  // Of a streamed transfer: all layers were sent; completes. Throws kState when one is missing.
  virtual void finish() = 0;
};

}  // namespace kvpool
