#include "handles.h"

#include <memory>

#include "bind.h"
#include "kvpool/base/error.h"

namespace kvpool::bindings {
namespace {

namespace py = pybind11;

// The members of every handle: the addresses, whether they are pinned, and three ways to release the pins.
template <class Handle>
py::class_<Handle> handle_class(py::module_& module, const char* name, const char* doc) {
  return py::class_<Handle>(module, name, doc)
      .def_property_readonly(
          "addrs", [](const Handle& handle) { return handle.addrs; },
          "uint64 array of addresses, in the prompt's order.")
      .def_property_readonly(
          "closed", [](const Handle& handle) { return !handle.pins.holds(); }, "Whether the pins are gone.")
      .def(
          "close", [](Handle& handle) { handle.pins.release(); }, "Releases the pins. Idempotent.")
      .def(
          "__enter__",
          [](py::object self) {
            if (!self.cast<const Handle&>().pins.holds()) throw Error(ErrorCode::kClosed, "the handle is closed");
            return self;
          },
          "Itself.")
      .def(
          "__exit__",
          [](Handle& handle, const py::object&, const py::object&, const py::object&) { handle.pins.release(); },
          "Closes.");
}

}  // namespace

void bind_handles(py::module_& module) {
  handle_class<Match>(module, "Match", R"(A cached prefix, pinned until it is closed.

Attributes:
    tokens: Tokens cached, whole blocks.
    addrs: uint64 array of ``tokens / block_tokens`` addresses (an index alone: values), in the prompt's order; media
        may be mixed.
    partial_tokens: Tokens of the next block that agree with a cached block.
    closed: Whether the pin has ended.)")
      .def_readonly("tokens", &Match::tokens, "Tokens cached, whole blocks.")
      .def_readonly("partial_tokens", &Match::partial_tokens, "Tokens that agree inside the next block.")
      .def("__repr__", [](const Match& match) {
        return "<Match tokens=" + std::to_string(match.tokens) +
               " partial_tokens=" + std::to_string(match.partial_tokens) + (match.pins.holds() ? " pinned>" : ">");
      });
  handle_class<Inserted>(module, "Inserted", R"(A prompt that was stored, pinned until it is closed.

Attributes:
    tokens: Tokens of the prompt.
    addrs: uint64 array of the canonical addresses: where the index holds each block. Decode on them.
    inserted: Blocks newly stored.
    duplicates: uint64 array of given addresses whose block was cached before; still the caller's, unless
        ``free_duplicates`` was asked for.
    closed: Whether the pin has ended.)")
      .def_readonly("tokens", &Inserted::tokens, "Tokens of the prompt.")
      .def_readonly("inserted", &Inserted::inserted, "Blocks newly stored.")
      .def_property_readonly(
          "duplicates", [](const Inserted& inserted) { return inserted.duplicates; },
          "uint64 array of given addresses whose block was cached before.")
      .def("__repr__", [](const Inserted& inserted) {
        return "<Inserted tokens=" + std::to_string(inserted.tokens) +
               " inserted=" + std::to_string(inserted.inserted) + (inserted.pins.holds() ? " pinned>" : ">");
      });
  handle_class<SwappedIn>(module, "SwappedIn", R"(Blocks that are now in HBM, pinned until it is closed.

Attributes:
    addrs: uint64 array, one for each address given: where the block lies in HBM.
    closed: Whether the pins have ended.)")
      .def("__repr__", [](const SwappedIn& swapped) {
        return "<SwappedIn blocks=" + std::to_string(py::len(swapped.addrs)) +
               (swapped.pins.holds() ? " pinned>" : ">");
      });
}

}  // namespace kvpool::bindings
