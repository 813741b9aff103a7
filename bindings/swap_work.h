// What the handles of swaps and copies have in common. Each keeps its pool, which goes after the swap.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_handle.h"
#include "node.h"
#include "work_handle.h"

namespace kvpool::bindings {

// In a forked child a swap is left alone: its thread is the parent's.
template <class Handle>
Swap& swap_of(const Handle& handle) {
  handle.node->pool().guard_process();
  return *handle.swap;
}

// The result is there once it has ended well.
template <class Handle>
Swap& ended_swap(const Handle& handle) {
  Swap& swap = swap_of(handle);
  if (!swap.done()) throw Error(ErrorCode::kState, "the swap is still under way: wait() for it first");
  swap.rethrow_if_failed();
  return swap;
}

template <class Handle>
py::object wait_for_swap(py::object self, py::handle timeout) {
  const auto& handle = self.cast<const Handle&>();
  Swap& swap = swap_of(handle);
  await_end(handle, swap, timeout, "the swap");
  swap.rethrow_if_failed();
  return self;
}

template <class Handle>
py::object exception_of_swap(const Handle& handle, py::handle timeout) {
  Swap& swap = swap_of(handle);
  await_end(handle, swap, timeout, "the swap");
  return failure_as_exception(swap);
}

template <class Handle>
std::string repr_of_swap(const Handle& handle, const char* name) {
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
py::class_<Handle> swap_handle_class(py::module_& module, const char* name, const char* doc) {
  return py::class_<Handle>(module, name, doc)
      .def("wait", &wait_for_swap<Handle>, py::arg("timeout") = py::none(),
           R"(Waits until it is done. Ctrl-C ends the wait.

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
      .def("exception", &exception_of_swap<Handle>, py::arg("timeout") = py::none(),
           R"(Waits until it is done, and returns the exception that wait() would raise, or None on success.

Args:
    timeout: As in wait.

Raises:
    TimeoutError: ``timeout`` passed; the swap goes on.)")
      .def(
          "fileno", [](const Handle& handle) { return swap_of(handle).done_fd(); },
          "A file descriptor that becomes readable when it is done, for select and similar calls. Do not read or close "
          "it.")
      .def("__repr__", [name](const Handle& handle) { return repr_of_swap(handle, name); });
}

}  // namespace kvpool::bindings
