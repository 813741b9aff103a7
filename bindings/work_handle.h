// What the handles of work that a thread of the pool does have in common. Such a handle keeps its node.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "arguments.h"
#include "bind.h"
#include "service.h"

namespace kvpool::bindings {

// Waits until the work is done. Raises TimeoutError when the time comes before; `what` names the work. A timeout of
// None is the setting timeout_s.
template <class Handle, class Work>
void await_end(const Handle& handle, Work& work, pybind11::handle timeout, const char* what) {
  const std::int64_t until_ns = deadline_from(timeout, handle.node->timeout_ns());
  if (work.done() || wait_interruptibly(until_ns, [&](std::int64_t slice) { return work.wait(slice); })) return;
  PyErr_SetString(PyExc_TimeoutError, (std::string(what) + " is still under way").c_str());
  throw pybind11::error_already_set();
}

// What it has failed with, as an exception of Python; None. REQUIRES: work.done().
template <class Work>
pybind11::object failure_as_exception(const Work& work) {
  try {
    work.rethrow_if_failed();
  } catch (const Error& error) {
    return exception_from(error);
  }
  return pybind11::none();
}

}  // namespace kvpool::bindings
