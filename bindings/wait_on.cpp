// Lets a CUDA stream of the application wait for a fetch.
#include "kvpool/peers/wait_on.h"

#include <vector>

#include "arguments.h"
#include "gil.h"
#include "stream.h"
#include "transfer.h"

namespace kvpool::bindings {
namespace {

namespace py = pybind11;

py::object hold_up(const TransferHandle& handle, py::handle stream_argument) {
  handle.pool->guard_process();
  const CallerStream stream = stream_from(stream_argument);
  {
    const GilReleased released;
    wait_on(*handle.pool, *handle.transfer, stream);
  }
  const std::vector<Address>& to = handle.transfer->addresses();
  return to_array(to.data(), to.size());
}

}  // namespace

void bind_wait_on(py::class_<TransferHandle>& handle) {
  handle.def("wait_on", &hold_up, py::arg("stream"), R"(Makes a CUDA stream, and no thread, wait for a fetch.

Work queued on the stream from now on begins when the fetch has ended: you may launch kernels on the blocks at once. May
be called for several streams, and by several threads. Does not wait itself, unless the stream's queue is full; releases
the GIL.

A stream cannot learn of a failure. It continues however the fetch ends, even if it was cancelled, was late, or lost the
peer or the pool; the content of the blocks is then undefined. So check ``exception()``, which no longer waits, before
you use the results: once the stream has got past the wait, ``done()`` is True.

If the fetch fails, blocks that the pool allocated, or that the peer may still write to, go back to the pool, but not
before this handle is gone. Keep it until the stream has finished with them. Blocks of ``to`` that the peer can no
longer write to are active again, and yours to free.

Meanwhile every operation that waits for all work of the GPU waits for that stream, too: swaps and transfers without
``stream``, and peers' fetches from this pool. Transfers and peers' fetches that wait like this for a second raise Busy,
because the peer might be waiting for this pool in the same way.

Args:
    stream: A stream of the pool's GPU, as an int or an object that has one (torch, CuPy). Not one that is being
        captured.

Returns:
    uint64 array: the blocks, in the order of the call. If the fetch has succeeded already, at once.

Raises:
    PeerLost, DeadlineExceeded, Cancelled, ...: It has failed already, as wait() says. The stream does not wait.
    ArgumentError: The pool is not on a GPU, or the stream belongs to another GPU.
    StateError: The transfer is not a fetch, or the stream is being captured.
    Unsupported: The GPU or its driver does not support such waits, or the blocks belong to ranks.
    DeviceLost: The GPU is lost.)");
}

}  // namespace kvpool::bindings
