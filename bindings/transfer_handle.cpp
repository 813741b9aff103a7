// The handle of a transfer: to wait for it, cancel it, and get its result.
#include <string>
#include <vector>

#include "bind.h"
#include "service.h"
#include "stream.h"
#include "transfer.h"

namespace kvpool::bindings {
namespace {

using namespace py::literals;

// In a forked child a transfer is left alone: its locks and threads are the parent's.
Transfer& transfer_of(const TransferHandle& handle) {
  handle.pool->guard_process();
  return *handle.transfer;
}

bool wait_until(Transfer& transfer, std::int64_t until_ns) {
  return transfer.done() || wait_interruptibly(until_ns, [&](std::int64_t slice) { return transfer.wait(slice); });
}

[[noreturn]] void throw_timeout(const Transfer& transfer) {
  const std::string text = "the transfer is still under way: " + std::to_string(transfer.bytes_done()) + " of " +
                           std::to_string(transfer.bytes_total()) + " bytes";
  PyErr_SetString(PyExc_TimeoutError, text.c_str());
  throw py::error_already_set();
}

py::object wait(py::object self, py::handle timeout) {
  Transfer& transfer = transfer_of(self.cast<const TransferHandle&>());
  if (!wait_until(transfer, deadline_from(timeout, kForever))) throw_timeout(transfer);
  transfer.rethrow_if_failed();
  return self;
}

py::object exception(const TransferHandle& handle, py::handle timeout) {
  Transfer& transfer = transfer_of(handle);
  if (!wait_until(transfer, deadline_from(timeout, kForever))) throw_timeout(transfer);
  try {
    transfer.rethrow_if_failed();
  } catch (const Error& error) {
    return exception_from(error);
  }
  return py::none();
}

const Transfer& ended(const TransferHandle& handle) {
  const Transfer& transfer = transfer_of(handle);
  if (!transfer.done()) throw Error(ErrorCode::kState, "the transfer is still under way: wait() for it first");
  return transfer;
}

py::object addresses(const TransferHandle& handle) {
  const Transfer& transfer = ended(handle);
  transfer.rethrow_if_failed();
  const std::vector<Address>& found = transfer.addresses();
  return to_array(found.data(), found.size());
}

// The facts of a kvpool.TransferStats, by the names of its fields.
py::dict stats(const TransferHandle& handle) {
  const TransferStats stats = ended(handle).stats();
  return py::dict("route"_a = text_of(stats.route), "strategy"_a = stats.strategy, "blocks"_a = stats.blocks,
                  "skipped_blocks"_a = stats.skipped_blocks, "calls"_a = stats.calls, "runs"_a = stats.runs,
                  "bytes"_a = stats.bytes, "reserve_us"_a = stats.reserve_us, "write_us"_a = stats.write_us,
                  "complete_us"_a = stats.complete_us, "total_us"_a = stats.total_us);
}

std::string repr(const TransferHandle& handle) {
  const Transfer& transfer = *handle.transfer;
  const char* state = "under way";
  if (transfer.done()) {
    state = "done";
    try {
      transfer.rethrow_if_failed();
    } catch (const std::exception&) {
      state = "failed";
    }
  }
  return std::string("<Transfer ") + state + ", " + std::to_string(transfer.bytes_done()) + " of " +
         std::to_string(transfer.bytes_total()) + " bytes>";
}

}  // namespace

void bind_transfer_handle(py::module_& module) {
  py::class_<TransferHandle> handle(module, "Transfer", R"(A transfer under way.

Transfers are independent of each other and unordered. Dropping a handle does not cancel its transfer. Thread-safe.
``await`` it in a coroutine, which raises what ``wait`` raises. Cancelling a task that awaits it ends the waiting, not
the transfer: call ``cancel()`` for that.

Attributes:
    addrs: uint64 array of the blocks at the receiver (for a fetch, here), in the order of the call.
    stats: Its cost, a TransferStats, once it has ended.
    progress: (bytes written, bytes to write).)");
  bind_wait_on(handle);
  handle
      .def("wait", &wait, py::arg("timeout") = py::none(), R"(Waits until it is done. Ctrl-C ends the wait.

When this returns, the bytes are in place for every thread that learns of it through kvpool. Releases the GIL.

Args:
    timeout: Seconds; None: the transfer's own deadline ends the wait.

Returns:
    Itself.

Raises:
    TimeoutError: ``timeout`` passed; the transfer goes on. DeadlineExceeded, which is a TimeoutError too, means that
        the transfer's own deadline passed, which has ended it.
    Cancelled: By cancel().
    PeerLost, DeadlineExceeded, Busy, OutOfBlocks, NotOwner, StaleAddress, ClosedError, ...: It failed. The blocks
        that it should have sent are as they were.)")
      .def(
          "done", [](const TransferHandle& handle) { return handle.transfer->done(); },
          "Whether it has ended, with or without success. Does not wait.")
      .def(
          "settled", [](const TransferHandle& handle) { return transfer_of(handle).settled(); },
          R"(Whether it has ended and, of a fetch, nobody writes into its destinations any more. Does not wait.

A fetch that has failed may settle later than it is done: where its owner can write here by itself and has not answered,
the destinations are quarantined until it does, or is proved to be gone. Until then they must not be used.)")
      .def(
          "cancel",
          [](const TransferHandle& handle) {
            const GilReleased released;
            return transfer_of(handle).cancel();
          },
          R"(Asks it to end with Cancelled. Does not wait: it is done when the receiver knows.

Returns:
    True: it is being cancelled, perhaps by an earlier call. False: the call has no effect, because the transfer has
    ended or is about to: the receiver was told already that all is written, or it has failed.)")
      .def("exception", &exception, py::arg("timeout") = py::none(),
           R"(Waits until it is done, and returns the exception that wait() would raise, or None on success.

Args:
    timeout: As in wait.

Raises:
    TimeoutError: ``timeout`` passed; the transfer goes on.)")
      .def_property_readonly("addrs", &addresses,
                             R"(uint64 array of the blocks at the receiver, in the order of the call.

After an insertion, the canonical addresses in the receiver's index. For a fetch, the blocks here.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)")
      .def_property_readonly(
          "progress",
          [](const TransferHandle& handle) {
            return py::make_tuple(handle.transfer->bytes_done(), handle.transfer->bytes_total());
          },
          "(bytes written, bytes to write), at any time.")
      .def(
          "fileno", [](const TransferHandle& handle) { return transfer_of(handle).done_fd(); },
          "A file descriptor that becomes readable when it is done, for select and similar calls. Do not read or close "
          "it.")
      .def("_stats", &stats)
      .def("__repr__", &repr);
}

}  // namespace kvpool::bindings
