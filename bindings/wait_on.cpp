// A stream of the application's that waits for a fetch.
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
  handle.def("wait_on", &hold_up, py::arg("stream"), R"(Of a fetch: lets a CUDA stream wait for it, and no thread.

What the stream is given from now on begins when the fetch has ended: its kernels may be launched on the blocks at once.
May be called for several streams, and by several threads. Does not wait itself, unless the stream has as much to do as
it can take; releases the GIL.

A stream cannot be told of a failure. It goes on when the fetch has ended in any way, cancelled, late or with its peer
or pool gone, and the blocks hold anything then. So ask ``exception()``, which does not wait any more, before you use
what was computed from them: when the stream has come so far, ``done()`` is True.

If the fetch fails, blocks that the pool allocated, or that the peer may still write, go back to the pool, but not as
long as this handle lives. Keep it until the stream has ended what it does with them. Blocks of ``to`` that the peer
does not write any more are active again, and yours to free.

Meanwhile what follows all work of the GPU follows that stream, too: swaps and transfers without ``stream``, and what
peers fetch from here. Transfers and peers' fetches that have been held up so for a second raise Busy, for the peer
might wait for the very same.

Args:
    stream: A stream of the pool's GPU, as an int or an object that has one (torch, CuPy). Not one that is being
        captured.

Returns:
    uint64 array: the blocks, in the order of the call. When the fetch has ended well, at once.

Raises:
    PeerLost, DeadlineExceeded, Cancelled, ...: It has failed already, as wait() says. The stream does not wait.
    ArgumentError: The pool is on no GPU; the stream is none of its GPU.
    StateError: It is no fetch; the stream is being captured.
    Unsupported: The GPU or its driver cannot wait so; the blocks are those of ranks.
    DeviceLost: The GPU is lost.)");
}

}  // namespace kvpool::bindings
