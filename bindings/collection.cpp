// Which threads are collecting garbage.
//
// The collector's callback is C++ because the interpreter handles signals where it runs Python, and an exception that
// is raised in the middle of a callback (KeyboardInterrupt, by Ctrl-C) is printed and goes no further.
#include <pybind11/pybind11.h>

#include "bind.h"

namespace kvpool::bindings {

namespace py = pybind11;

namespace {

bool& collecting() noexcept {
  static thread_local bool here = false;
  return here;
}

}  // namespace

void bind_collection(py::module_& module) {
  module.def(
      "_note_collection",
      [](const py::str& phase, const py::object& /*info*/) {
        collecting() = PyUnicode_CompareWithASCIIString(phase.ptr(), "start") == 0;
      },
      py::arg("phase"), py::arg("info"), "For gc.callbacks: this thread collects from \"start\" to any other phase.");
  module.def("_collecting", [] { return collecting(); }, "Whether this thread is in the middle of a collection.");
}

}  // namespace kvpool::bindings
