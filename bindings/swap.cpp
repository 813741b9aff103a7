// The verbs that move cached blocks between the tiers, and their handles.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "handles.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"
#include "node.h"
#include "service.h"
#include "stream.h"
#include "swap_work.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

// Each keeps its pool, which goes after the swap.
struct SwapOutHandle {
  NodePointer node;
  std::shared_ptr<Swap> swap;
};
struct SwapInHandle {
  NodePointer node;
  std::shared_ptr<Swap> swap;
  py::object result;  // once somebody has asked for it
};

// ---- starting

py::object swap_out(const NodePointer& node, py::handle n_argument, py::handle stream, py::handle wait) {
  const std::size_t n = count_from(n_argument, "n");
  const CallerStream after = stream_from(stream);
  if (flag_from(wait, "wait")) {
    std::vector<Address> moved;
    {
      const GilReleased released;
      moved = node->pool().swap_out(n, after);
    }
    return to_array(moved.data(), moved.size());
  }
  SwapOutHandle handle{node, nullptr};
  {
    const GilReleased released;
    handle.swap = node->pool().begin_swap_out(n, after);
  }
  return py::cast(std::move(handle));
}

py::object swap_in(const NodePointer& node, py::handle addresses_argument, const py::object& into_argument,
                   py::handle medium_argument, py::handle stream, py::handle wait_argument) {
  const bool wait = flag_from(wait_argument, "wait");
  const bool to_dram = medium_from(medium_argument) == Medium::kDram;
  if (to_dram && !(into_argument.is_none() && stream.is_none())) {
    throw_argument("into and stream are for swaps to HBM: leave them out with medium=kvpool.DRAM");
  }
  const CallerStream after = stream_from(stream);
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  std::vector<Address> into;
  if (!into_argument.is_none()) into = addresses_from(into_argument).copy();
  if (!wait) {
    SwapInHandle handle{node, nullptr, {}};
    {
      const GilReleased released;
      handle.swap = to_dram ? node->pool().begin_bring(addresses) : node->pool().begin_swap_in(addresses, into, after);
    }
    return py::cast(std::move(handle));
  }
  py::array_t<Address> arrived(static_cast<py::ssize_t>(addresses.size()));
  Address* out = arrived.mutable_data();
  SwappedIn result;
  call_interruptibly([&](const GivenUp& given_up) {
    std::vector<IndexPin> pins =
        to_dram ? node->pool().bring(addresses, out, given_up) : node->pool().swap_in(addresses, into, out, after);
    result.pins = Pins(pool_of(node), std::move(pins));
  });
  result.addrs = std::move(arrived);
  return py::cast(std::move(result));
}

// ---- the handles

py::object result_of(const SwapOutHandle& handle) {
  const std::vector<Address>& moved = ended_swap(handle).addresses();
  return to_array(moved.data(), moved.size());
}

py::object result_of(SwapInHandle& handle) {
  Swap& swap = ended_swap(handle);
  if (!handle.result) {
    SwappedIn result;
    result.addrs = to_array(swap.addresses().data(), swap.addresses().size());
    result.pins = Pins(pool_of(handle.node), swap.take_pins());
    handle.result = py::cast(std::move(result));
  }
  return handle.result;
}

}  // namespace

void bind_swap(py::module_& module, PoolClass& pool) {
  swap_handle_class<SwapOutHandle>(module, "SwapOut",
                                   R"(Blocks on their way to DRAM: the result of swap_out with ``wait=False``.

A thread of the pool runs swaps out one after another, in the order of their calls, concurrently with swaps in. Dropping
the handle does not cancel the swap. Thread-safe. ``await`` it in a coroutine, which raises what ``wait`` raises.
Cancelling a task that awaits it ends the waiting, not the swap.

Attributes:
    result: What swap_out returns with ``wait=True``.)")
      .def_property_readonly(
          "result", [](const SwapOutHandle& handle) { return result_of(handle); },
          R"(uint64 array of the DRAM addresses of the blocks that moved.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)");
  swap_handle_class<SwapInHandle>(module, "SwapIn",
                                  R"(Blocks on their way to HBM: the result of swap_in with ``wait=False``.

A thread of the pool runs swaps in one after another, in the order of their calls, concurrently with swaps out. The
blocks are pinned from the call on. Dropping the handle does not cancel the swap, and releases its pins when it is done.
Thread-safe. ``await`` it in a coroutine, which raises what ``wait`` raises. Cancelling a task that awaits it ends the
waiting, not the swap.

Attributes:
    result: What swap_in returns with ``wait=True``.)")
      .def_property_readonly(
          "result", [](SwapInHandle& handle) { return result_of(handle); },
          R"(The SwappedIn; always the same. Close it to unpin the blocks.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)");
  pool.def("swap_out", &swap_out, py::arg("n"), py::kw_only(), py::arg("stream") = py::none(), py::arg("wait") = true,
           R"(Moves up to n cached blocks from HBM to DRAM, the least recently used first.

Never moves a pinned or active block. If DRAM is full, its least recently used blocks are dropped. The old addresses
become stale, and the index has the new ones. Releases the GIL. Runs concurrently with a swap_in.

On a GPU the copy runs on a separate stream. It begins, on the GPU, when the work already queued on `stream` has
ended. When the call returns the bytes have arrived, for every stream and for the CPU.

Args:
    n: Blocks to move at most.
    stream: The CUDA stream whose work may still write these blocks: an int, or an object of torch, CuPy or any with
        ``__cuda_stream__``. None: the calling thread waits for all current work of the device, including a swap_in;
        not possible while a CUDA graph is captured on the device. StateError for a stream that is being captured.
    wait: False returns a SwapOut at once, and a thread of the pool does the work. It chooses the blocks when it begins;
        if blocks were inserted since the call, it also waits for all work that the device has then.

Returns:
    uint64 array of the DRAM addresses of the blocks that moved; fewer than n when no more can. Or a SwapOut.)")
      .def("swap_in", &swap_in, py::arg("addrs"), py::arg("into") = py::none(), py::kw_only(),
           py::arg("medium") = static_cast<int>(Medium::kHbm), py::arg("stream") = py::none(), py::arg("wait") = true,
           R"(Brings cached blocks to HBM and pins them there. Or those on DISK to DRAM.

Blocks on DISK come to DRAM first, all in one read; those that are there already stay if HBM has no room.

Addresses in HBM do not change, so all addresses of a match can be passed. Evicts as alloc does. Blocks that other
holders still read by their old address stay until the last of them releases its pin. Releases the GIL. Runs
concurrently with a swap_out, except while it evicts.

Args:
    addrs: Addresses of cached blocks.
    into: Active HBM blocks to use, one for each address in DRAM; by default the pool allocates. If another swap_in
        brings some of the pages first, the last blocks of `into` stay unused: active, and not in the result. Not for
        pages on DISK.
    medium: kvpool.HBM; or kvpool.DRAM, for a pool with blocks on DISK: only these move, and all others are pinned where
        they are.
    stream: As in swap_out, for work that may still read or write the destination blocks.
    wait: False returns a SwapIn at once, and a thread of the pool does the work. When the call returns, the blocks are
        pinned and the pool owns those of `into`; wrong arguments raise at once. Without `into`, if HBM blocks were
        freed since the call, it also waits for all work that the device has then.

Returns:
    A SwappedIn, with one address for each given: in HBM; with ``medium=kvpool.DRAM`` in HBM or DRAM. Or a SwapIn.

Raises:
    StaleAddress: A block has left its address; or it is damaged on disk, and not cached any more.
    StateError: A block is not cached.
    OutOfBlocks: HBM has no room, and nothing more can be evicted.
    StoreFailed: The disk has failed, and nothing on it is cached any more.
    DeadlineExceeded: The disk did not answer within the setting ``timeout_s``.
    Unsupported: ``medium=kvpool.DRAM`` without blocks on DISK; `into` with pages on DISK.)");
}

}  // namespace kvpool::bindings
