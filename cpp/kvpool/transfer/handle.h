// The handle of a transfer.
//
// Thread-safety: all of it. Dropping a handle does not cancel its transfer.
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

  // True when it has ended, successfully or not; then rethrow_if_failed() and addresses() may be called. Helps
  // meanwhile: reads the link, and makes small copies, in this thread. Returns false at `until_ns` (CLOCK_MONOTONIC).
  virtual bool wait(std::int64_t until_ns) = 0;
  virtual bool done() const noexcept = 0;
  // Throws its error: kPeerLost, kDeadline, kCancelled, kBusy, kOutOfBlocks, kNotOwner, kLayoutMismatch, ...
  virtual void rethrow_if_failed() const = 0;
  // Where the blocks are at the receiver, in the order of the request; with an insertion, the canonical ones.
  virtual const std::vector<Address>& addresses() const = 0;
  virtual TransferStats stats() const = 0;
  virtual std::uint64_t bytes_done() const noexcept = 0;
  virtual std::uint64_t bytes_total() const noexcept = 0;

  // Asks it to end with kCancelled. False when it is too late: the receiver was told that all is written, or it has
  // failed. The handle is done when both sides know.
  virtual bool cancel() = 0;
  // Whether it has ended and, of a fetch, nobody writes into its destinations any more. A fetch that has failed may
  // settle later than it is done: E1.
  virtual bool settled() const noexcept { return done(); }
  // For a fetch: makes the stream, one of this context, wait for the end of the fetch before it runs later work; done()
  // is true then. Does not block. If the fetch fails after this call, its destinations become free only after this
  // handle is destroyed. After the end it only throws the error of a failed fetch. Throws kState when it is no fetch or
  // the stream is being captured, kArgument for a stream of another device, kUnsupported, kOutOfMemory, kDeviceLost.
  virtual void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) = 0;
  // An eventfd that becomes readable when it is done; made at the first call, owned by the handle.
  virtual int done_fd() = 0;

  // For a streamed transfer: sends this layer, whose content is complete. Throws kState when the transfer is not
  // streamed or was finished, kArgument for a layer that does not exist or was sent. Does not wait for the bytes.
  // `after`: as in the request, for this layer.
  virtual void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after = nullptr) = 0;
  // For a streamed transfer: completes it. Throws kState when a layer was not sent.
  virtual void finish() = 0;
};

}  // namespace kvpool
