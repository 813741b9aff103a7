// Sequences, whose blocks may lie in several pools.
#include "sequence.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "arguments.h"
#include "kvpool/base/failure.h"
#include "kvpool/pool/pool.h"
#include "node.h"
#include "service.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

std::optional<std::uint64_t> tokens_written(py::handle argument) {
  if (argument.is_none()) return std::nullopt;
  return count_from(argument, "tokens");
}

// In a forked child a sequence is left alone: its blocks are the parent's.
Sequence& sequence_of(const SequenceHandle& handle) {
  handle.node->pool().guard_process();
  return *handle.sequence;
}

SequenceHandle make_sequence(const NodePointer& node, const py::object& addresses_argument, py::handle tokens,
                             py::handle timeout) {
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  const std::optional<std::uint64_t> written = tokens_written(tokens);
  const std::int64_t deadline = deadline_from(timeout, node->timeout_ns());
  return {node, call_interruptibly([&](const GivenUp& given_up) {
            return std::make_shared<Sequence>(*node, addresses, written, Waiting(deadline, given_up));
          })};
}

void append(const SequenceHandle& handle, const py::object& addresses_argument, py::handle tokens, py::handle timeout) {
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  const std::optional<std::uint64_t> written = tokens_written(tokens);
  const std::int64_t deadline = deadline_from(timeout, handle.node->timeout_ns());
  Sequence& sequence = sequence_of(handle);
  call_interruptibly([&](const GivenUp& given_up) { sequence.append(addresses, written, {deadline, given_up}); });
}

py::array_t<Address> replace(const SequenceHandle& handle, py::handle first_block, const py::object& addresses_argument,
                             py::handle timeout) {
  const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
  const std::size_t first = count_from(first_block, "first_block");
  const std::int64_t deadline = deadline_from(timeout, handle.node->timeout_ns());
  Sequence& sequence = sequence_of(handle);
  const std::vector<Address> old = call_interruptibly(
      [&](const GivenUp& given_up) { return sequence.replace(first, addresses, {deadline, given_up}); });
  return to_array(old.data(), old.size());
}

// For kvpool.attention.moving.
void switch_blocks(const SequenceHandle& handle, const std::vector<std::uint64_t>& blocks,
                   const py::object& old_argument, const py::object& new_argument, std::uint64_t copied_at,
                   py::handle timeout) {
  const std::vector<Address> old_addresses = addresses_from(old_argument).copy();
  const std::vector<Address> addresses = addresses_from(new_argument).copy();
  const std::int64_t deadline = deadline_from(timeout, handle.node->timeout_ns());
  Sequence& sequence = sequence_of(handle);
  call_interruptibly([&](const GivenUp& given_up) {
    sequence.switch_blocks(blocks, old_addresses, addresses, copied_at, {deadline, given_up});
  });
}

py::array_t<Address> addresses_of(const SequenceHandle& handle) {
  const std::vector<Address> addresses = sequence_of(handle).addresses();
  return to_array(addresses.data(), addresses.size());
}

// By position; 0 for blocks of this pool.
py::array_t<std::int64_t> instances_of(const SequenceHandle& handle) {
  const std::vector<Address> addresses = sequence_of(handle).addresses();
  const std::uint32_t own = handle.node->pool().instance();
  py::array_t<std::int64_t> instances(static_cast<py::ssize_t>(addresses.size()));
  std::ranges::transform(addresses, instances.mutable_data(), [own](Address address) {
    return instance_of(address) == own ? 0 : std::int64_t{instance_of(address)};
  });
  return instances;
}

}  // namespace

py::list ranges_as_list(const std::vector<TokenRange>& ranges) {
  py::list list;
  for (const TokenRange& range : ranges) list.append(py::make_tuple(range.begin, range.end));
  return list;
}

void bind_sequence(py::module_& module, PoolClass& pool) {
  py::class_<SequenceHandle>(module, "KVSequence",
                             R"(The KV cache of one sequence: which block holds which of its tokens.

Made by `Pool.sequence`. Its blocks may lie in this pool and in pools of peers, in any order. It holds them but does not
own them: blocks that are freed, evicted, swapped or deleted meanwhile keep their content where it is, and are reused
only after ``close()``. Use it in a ``with``, or close it. Thread-safe.

Attributes:
    addrs: uint64 array with the address of each block.
    instances: int64 array with the instance that owns each block; 0: this pool.
    lost: List of (begin, end): written tokens whose blocks are lost with their peers, or were recalled by them. Compute
        their K and V again, and `replace` the blocks.
    tokens: How many tokens have been written. Assign it when the engine has written more, or has rejected some.
        ArgumentError if the blocks hold fewer; StateError when the sequence is closed, or when tokens are taken back
        whose block lies with a peer, so that the engine could not write it: bring it home first.
    closed: Whether close() was called.)")
      .def("append", &append, py::arg("addrs"), py::arg("tokens") = py::none(), py::kw_only(),
           py::arg("timeout") = py::none(), R"(Adds blocks behind the last one.

Args:
    addrs: Addresses; uint64 array, buffer, or list.
    tokens: How many tokens have been written now; None: as many as before.
    timeout: Seconds that peers have; None: the setting ``timeout_s``.

Raises:
    StateError: The sequence is closed.
    StaleAddress, NotOwner, Unsupported, ArgumentError, PeerLost, DeadlineExceeded, Busy: As `Pool.sequence`. Nothing
        was added.)")
      .def("replace", &replace, py::arg("first_block"), py::arg("addrs"), py::kw_only(),
           py::arg("timeout") = py::none(),
           R"(Puts other blocks, with the same content, in the place of those from a block on.

Attention that begins later reads the new blocks; what has begun goes on to read the old ones, which keep their content
until it has ended. All or nothing.

Args:
    first_block: Which block of the sequence the first address replaces; the others follow.
    addrs: Addresses of the new blocks.
    timeout: As in append.

Returns:
    uint64 array with the addresses that stood there. They are yours: free what nothing else needs.

Raises:
    ArgumentError: The sequence has fewer blocks.
    StateError, StaleAddress, NotOwner, Unsupported, PeerLost, DeadlineExceeded, Busy: As append.)")
      .def_property_readonly(
          "lost", [](const SequenceHandle& handle) { return ranges_as_list(sequence_of(handle).lost()); },
          "List of (begin, end): written tokens whose blocks are lost with their peers, or were recalled by them.")
      .def_property(
          "tokens", [](const SequenceHandle& handle) { return sequence_of(handle).tokens(); },
          [](const SequenceHandle& handle, py::handle tokens) {
            sequence_of(handle).set_tokens(count_from(tokens, "tokens"));
          },
          "How many tokens have been written.")
      .def_property_readonly("addrs", &addresses_of, "uint64 array with the address of each block.")
      .def_property_readonly("instances", &instances_of,
                             "int64 array with the instance that owns each block; 0: this pool.")
      .def_property_readonly(
          "closed", [](const SequenceHandle& handle) { return sequence_of(handle).closed(); },
          "Whether close() was called.")
      .def(
          "close", [](const SequenceHandle& handle) { sequence_of(handle).close(); },
          "Lets the blocks go, at once or when no attention reads them any longer. Idempotent.")
      .def_property_readonly("_block_tokens",
                             [](const SequenceHandle& handle) { return handle.node->pool().layout().block_tokens; })
      .def("_switch", &switch_blocks)
      .def_property_readonly("_set_backs", [](const SequenceHandle& handle) { return sequence_of(handle).set_backs(); })
      .def_property_readonly("_pool", [](const SequenceHandle& handle) { return handle.node; })
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](const SequenceHandle& handle, const py::args&) { sequence_of(handle).close(); })
      .def("__repr__", [](const SequenceHandle& handle) {
        if (failure_of([&] { handle.node->pool().guard_process(); })) {
          return std::string("<KVSequence of the parent process>");
        }
        const Sequence& sequence = *handle.sequence;
        return "<KVSequence of " + std::to_string(sequence.tokens()) + " tokens in " +
               std::to_string(sequence.addresses().size()) + " blocks" + (sequence.closed() ? ", closed>" : ">");
      });
  pool.def("sequence", &make_sequence, py::arg("addrs"), py::arg("tokens") = py::none(), py::kw_only(),
           py::arg("timeout") = py::none(),
           R"(A sequence whose KV cache is in these blocks, for `attend`.

The sequence holds the blocks, which stay the caller's: free them as before, best after the sequence is closed. Peers
hold theirs for it, and are told once which they are. Releases the GIL.

Args:
    addrs: One address for each block, in the order of the tokens. Blocks in HBM and in DRAM, of this pool and of peers,
        may be mixed: those that a peer has lent, and cached ones.
    tokens: How many tokens have been written, from the first on. None: as many as the blocks hold.
    timeout: Seconds that peers have; None: the setting ``timeout_s``.

Raises:
    Unsupported: Attention cannot read them: blocks of ranks, of a RawLayout, or an element type without a kernel. The
        CPU has kernels for float32, float16, bfloat16 and float8_e4m3fn. For blocks on a GPU there are kernels if kvpool
        was built with them, for all but float8, in heads of 64 or 128 elements.
    StaleAddress, NotOwner, StateError: One was freed, is of an instance that is no peer, or is being written by a
        transfer; or it was freed, and something still reads it.
    PeerLost, DeadlineExceeded, Busy: A peer is gone, did not answer in time, or has too many views open.
    ArgumentError: The blocks hold fewer tokens than `tokens`, or one is no address.)");
}

}  // namespace kvpool::bindings
