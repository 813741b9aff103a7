// The verbs that move blocks between the tiers, and their handles.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "handles.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"
#include "node.h"
#include "stream.h"
#include "vectors.h"
#include "work_handle.h"

namespace kvpool::bindings {
namespace {

constexpr const char* kWork = "the swap";

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

struct CopyHandle {
  NodePointer node;
  std::shared_ptr<Swap> swap;
  std::size_t blocks;
};

// In a forked child a swap is left alone: its thread is the parent's.
template <class Handle>
Swap& swap_of(const Handle& handle) {
  handle.node->pool().guard_process();
  return *handle.swap;
}

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
                   py::handle stream, py::handle wait_argument) {
  const bool wait = flag_from(wait_argument, "wait");
  const CallerStream after = stream_from(stream);
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  std::vector<Address> into;
  if (!into_argument.is_none()) into = addresses_from(into_argument).copy();
  if (!wait) {
    SwapInHandle handle{node, nullptr, {}};
    {
      const GilReleased released;
      handle.swap = node->pool().begin_swap_in(addresses, into, after);
    }
    return py::cast(std::move(handle));
  }
  py::array_t<Address> arrived(static_cast<py::ssize_t>(addresses.size()));
  Address* out = arrived.mutable_data();
  SwappedIn result;
  {
    const GilReleased released;
    std::vector<IndexPin> pins = node->pool().swap_in(addresses, into, out, after);
    result.pins = Pins(pool_of(node), std::move(pins));
  }
  result.addrs = std::move(arrived);
  return py::cast(std::move(result));
}

py::object save(const NodePointer& node, py::handle tokens_argument, py::handle addresses_argument, py::handle name,
                py::handle first_argument, py::handle stream, py::handle wait_argument) {
  const bool wait = flag_from(wait_argument, "wait");
  const std::size_t first = count_from(first_argument, "first");
  const std::string name_space(name_from(name));
  const CallerStream after = stream_from(stream);
  const std::vector<Token> tokens = tokens_from(tokens_argument).copy();
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  StartedSave started;
  {
    const GilReleased released;
    if (wait) {
      started.blocks = node->pool().save(name_space, tokens, first, addresses, after);
    } else {
      started = node->pool().begin_save(name_space, tokens, first, addresses, after);
    }
  }
  if (wait) return py::int_(started.blocks);
  return py::cast(CopyHandle{node, std::move(started.swap), started.blocks});
}

// `way`: none: out of the medium of the first block.
py::object copy_blocks(const NodePointer& node, std::optional<TierWay> way, py::handle addresses_argument,
                       py::handle into_argument, py::handle stream, py::handle wait_argument) {
  const bool wait = flag_from(wait_argument, "wait");
  const CallerStream after = stream_from(stream);
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  const std::vector<Address> into = addresses_from(into_argument).copy();
  const bool out = !addresses.empty() && medium_bits_of(addresses[0]) == static_cast<std::uint32_t>(Medium::kHbm);
  const TierWay chosen = way.value_or(out ? TierWay::kOut : TierWay::kIn);
  CopyHandle handle{node, nullptr, addresses.size()};
  {
    const GilReleased released;
    if (wait) {
      node->pool().copy(chosen, addresses, into, after);
    } else {
      handle.swap = node->pool().begin_copy(chosen, addresses, into, after);
    }
  }
  return wait ? py::object(py::int_(addresses.size())) : py::cast(std::move(handle));
}

py::object load(const NodePointer& node, py::handle addresses, py::handle into, py::handle stream, py::handle wait) {
  return copy_blocks(node, TierWay::kIn, addresses, into, stream, wait);
}

py::object copy(const NodePointer& node, py::handle addresses, py::handle into, py::handle stream, py::handle wait) {
  return copy_blocks(node, std::nullopt, addresses, into, stream, wait);
}

// ---- the handles

template <class Handle>
Swap& ended(const Handle& handle) {
  Swap& swap = swap_of(handle);
  if (!swap.done()) throw Error(ErrorCode::kState, "the swap is still under way: wait() for it first");
  swap.rethrow_if_failed();
  return swap;
}

py::object result_of(const SwapOutHandle& handle) {
  const std::vector<Address>& moved = ended(handle).addresses();
  return to_array(moved.data(), moved.size());
}

py::object result_of(SwapInHandle& handle) {
  Swap& swap = ended(handle);
  if (!handle.result) {
    SwappedIn result;
    result.addrs = to_array(swap.addresses().data(), swap.addresses().size());
    result.pins = Pins(pool_of(handle.node), swap.take_pins());
    handle.result = py::cast(std::move(result));
  }
  return handle.result;
}

template <class Handle>
py::object wait(py::object self, py::handle timeout) {
  const auto& handle = self.cast<const Handle&>();
  Swap& swap = swap_of(handle);
  await_end(handle, swap, timeout, kWork);
  swap.rethrow_if_failed();
  return self;
}

template <class Handle>
py::object exception(const Handle& handle, py::handle timeout) {
  Swap& swap = swap_of(handle);
  await_end(handle, swap, timeout, kWork);
  return failure_as_exception(swap);
}

template <class Handle>
std::string repr(const Handle& handle, const char* name) {
  const char* state = "under way";
  if (handle.swap->done()) {
    state = "done";
    try {
      handle.swap->rethrow_if_failed();
    } catch (const std::exception&) {
      state = "failed";
    }
  }
  return "<" + std::string(name) + " " + state + ">";
}

template <class Handle>
py::class_<Handle> handle_class(py::module_& module, const char* name, const char* doc) {
  return py::class_<Handle>(module, name, doc)
      .def("wait", &wait<Handle>, py::arg("timeout") = py::none(), R"(Waits until it is done. Ctrl-C ends the wait.

When this returns the bytes have arrived, for every stream and for the CPU. Releases the GIL.

Args:
    timeout: Seconds; None: the setting ``timeout_s``.

Returns:
    Itself.

Raises:
    TimeoutError: ``timeout`` passed; the swap goes on.
    Cancelled: By cancel().
    ClosedError: The pool was closed before a byte had moved. A swap out that had moved some blocks succeeds, with
        these as its result.
    OutOfBlocks, DeviceLost, ...: As the call with ``wait=True``; the pool is unchanged.)")
      .def(
          "done", [](const Handle& handle) { return swap_of(handle).done(); },
          "Whether it has ended, with or without success. Does not wait.")
      .def(
          "cancel", [](const Handle& handle) { return swap_of(handle).cancel(); },
          R"(Asks it to end with Cancelled, which is possible until it begins to move bytes. Does not wait.

Until then it waits for its turn and for the GPU, or evicts blocks for a swap in, which are not brought back. A
cancelled swap ends soon, whatever the GPU does. But with drivers older than CUDA 12.5, a swap that waits for the whole
device ends only when that work has ended.

Returns:
    False when it has begun, or ended; then nothing changes.)")
      .def("exception", &exception<Handle>, py::arg("timeout") = py::none(),
           R"(Waits until it is done, and returns the exception that wait() would raise, or None on success.

Args:
    timeout: As in wait.

Raises:
    TimeoutError: ``timeout`` passed; the swap goes on.)")
      .def(
          "fileno", [](const Handle& handle) { return swap_of(handle).done_fd(); },
          "A file descriptor that becomes readable when it is done, for select and similar calls. Do not read or close "
          "it.")
      .def("__repr__", [name](const Handle& handle) { return repr(handle, name); });
}

}  // namespace

void bind_swap(py::module_& module, PoolClass& pool) {
  handle_class<SwapOutHandle>(module, "SwapOut",
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
  handle_class<SwapInHandle>(module, "SwapIn", R"(Blocks on their way to HBM: the result of swap_in with ``wait=False``.

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
  handle_class<CopyHandle>(module, "BlockCopy",
                           R"(Blocks that are being copied: the result of save, load and copy with ``wait=False``.

A thread of the pool copies, one after another in each direction, in turn with swaps. Dropping the handle does not
cancel the copy. Thread-safe. ``await`` it in a coroutine, which raises what ``wait`` raises. Cancelling a task that
awaits it ends the waiting, not the copy.

Attributes:
    result: What the call returns with ``wait=True``.)")
      .def_property_readonly(
          "result",
          [](const CopyHandle& handle) {
            ended(handle);
            return handle.blocks;
          },
          R"(How many blocks were copied.

Raises:
    StateError: It is under way. If it failed: what wait() raises.)");
  pool.def("save", &save, py::arg("tokens"), py::arg("addrs"), py::arg("namespace") = "", py::kw_only(),
           py::arg("first") = 0, py::arg("stream") = py::none(), py::arg("wait") = true,
           R"(Copies blocks that you hold in HBM to DRAM, and caches the copies.

For engines that allocate their own blocks (``engine_allocates=True``) and use them again when a request ends: the cache
has copies, which that does not touch. Copies only what is not cached yet, making room as alloc does. Your blocks stay
yours. Until it has ended do not write to them; an engine's `free` raises StateError. Releases the GIL.

Args:
    tokens: Token ids, of whole blocks.
    addrs: The blocks that hold them: active blocks in HBM, one for each block of tokens from `first` on.
    namespace: As in match.
    first: Of an engine that has only the end of a prompt (sliding window): the number of blocks before it, which must be
        cached.
    stream: The CUDA stream whose work may still write these blocks; None: all work of the device. As in swap_out.
    wait: False returns a BlockCopy at once, and a thread of the pool copies. Wrong arguments raise at once.

Returns:
    How many blocks were copied; the others were cached already. Or a BlockCopy.

Raises:
    ArgumentError: The numbers of tokens and blocks do not fit, or a block is not in HBM.
    StaleAddress, NotOwner, StateError: A block is not an active one of this pool; the pool lacks HBM or DRAM; or a
        block before `first` is not cached (any more).
    OutOfBlocks: DRAM has no room, and nothing more can be evicted. Nothing was cached.
    Busy: A logical instance, and not all of its ranks have joined. Or others are filling blocks of this prompt
        (``filled=False``), or what was cached of it was forgotten meanwhile. Nothing was cached: try again.
    Unsupported: `stream`, of a logical instance: each rank waits for all work of its GPU.)")
      .def("load", &load, py::arg("addrs"), py::arg("into"), py::kw_only(), py::arg("stream") = py::none(),
           py::arg("wait") = true, R"(Copies blocks in DRAM, as a match names them, to blocks that you hold in HBM.

The opposite of save: what is cached stays where it is. Keep the match open until it has ended. Releases the GIL.

Args:
    addrs: Addresses of blocks in DRAM.
    into: Active blocks in HBM, one for each of `addrs`. Reserved until it has ended.
    stream: The CUDA stream whose work may still use `into`; None: all work of the device. As in swap_in.
    wait: As in save.

Returns:
    How many blocks were copied. Or a BlockCopy.

Raises:
    ArgumentError: The lists differ in length, a block stands twice in `into`, or a block is in the other medium.
    StaleAddress, NotOwner, StateError, Busy, Unsupported: As save.
    DeviceLost: The content of `into` is undefined.)")
      .def("copy", &copy, py::arg("addrs"), py::arg("into"), py::kw_only(), py::arg("stream") = py::none(),
           py::arg("wait") = true, R"(Copies blocks from HBM to DRAM, or from DRAM to HBM; caches nothing.

For engines with an index elsewhere, which says what is where: it copies between blocks that you hold. Of blocks in DRAM
it is `load`. Releases the GIL.

Args:
    addrs: Blocks in one of the media, active or cached. Until it has ended do not write to them; an engine's `free`
        raises StateError.
    into: Active blocks in the other, one for each of `addrs`. Reserved until it has ended.
    stream: The CUDA stream whose work may still write or use the blocks in HBM; None: all work of the device. As in
        swap_out.
    wait: As in save.

Returns:
    How many blocks were copied. Or a BlockCopy.

Raises:
    ArgumentError: The lists differ in length, a block stands twice in `into`, or a block is in the wrong medium.
    StaleAddress, NotOwner, StateError, Busy, Unsupported: As save.
    DeviceLost: The content of `into` is undefined.)");
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
           py::arg("stream") = py::none(), py::arg("wait") = true, R"(Brings cached blocks to HBM and pins them there.

Addresses in HBM do not change, so all addresses of a match can be passed. Evicts as alloc does. Blocks that other
holders still read by their old address stay until the last of them releases its pin. Releases the GIL. Runs
concurrently with a swap_out, except while it evicts.

Args:
    addrs: Addresses of cached blocks.
    into: Active HBM blocks to use, one for each address in DRAM; by default the pool allocates. If another swap_in
        brings some of the pages first, the last blocks of `into` stay unused: active, and not in the result.
    stream: As in swap_out, for work that may still read or write the destination blocks.
    wait: False returns a SwapIn at once, and a thread of the pool does the work. When the call returns, the blocks are
        pinned and the pool owns those of `into`; wrong arguments raise at once. Without `into`, if HBM blocks were
        freed since the call, it also waits for all work that the device has then.

Returns:
    A SwappedIn, with one HBM address for each given. Or a SwapIn.

Raises:
    StaleAddress: A block has left its address.
    StateError: A block is not cached.
    OutOfBlocks: HBM has no room, and nothing more can be evicted.)");
}

}  // namespace kvpool::bindings
