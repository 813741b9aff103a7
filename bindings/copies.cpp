// The verbs that copy blocks of the caller between the tiers, and their handle.
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"
#include "node.h"
#include "stream.h"
#include "swap_work.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

struct CopyHandle {
  NodePointer node;
  std::shared_ptr<Swap> swap;
  std::size_t blocks;
};

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

}  // namespace

void bind_copies(py::module_& module, PoolClass& pool) {
  swap_handle_class<CopyHandle>(module, "BlockCopy",
                                R"(Blocks that are being copied: the result of save, load and copy with ``wait=False``.

A thread of the pool copies, one after another in each direction, in turn with swaps. Dropping the handle does not
cancel the copy. Thread-safe. ``await`` it in a coroutine, which raises what ``wait`` raises. Cancelling a task that
awaits it ends the waiting, not the copy.

Attributes:
    result: What the call returns with ``wait=True``.)")
      .def_property_readonly(
          "result",
          [](const CopyHandle& handle) {
            ended_swap(handle);
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
}

}  // namespace kvpool::bindings
