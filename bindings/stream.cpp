#include "stream.h"

#include <cstdint>
#include <string>

#include "arguments.h"

namespace kvpool::bindings {
namespace {

namespace py = pybind11;

// The handle that the object has, or the object itself.
py::object handle_of(py::handle argument) {
  try {
    if (py::hasattr(argument, "__cuda_stream__")) {
      const py::object pair = argument.attr("__cuda_stream__")();
      if (PyTuple_CheckExact(pair.ptr()) != 0 && PyTuple_GET_SIZE(pair.ptr()) == 2) {
        return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(pair.ptr(), 1));
      }
    }
    for (const char* name : {"cuda_stream", "ptr"}) {
      if (py::hasattr(argument, name)) return argument.attr(name);
    }
  } catch (py::error_already_set& raised) {
    raised.restore();
    throw_type_error("stream: " + type_name(argument) + " does not say which CUDA stream it is");
  }
  return py::reinterpret_borrow<py::object>(argument);
}

}  // namespace

CallerStream stream_from(py::handle argument) {
  if (argument.is_none()) return std::nullopt;
  const py::object handle = handle_of(argument);
  if (PyLong_Check(handle.ptr()) == 0 || PyBool_Check(handle.ptr()) != 0) {
    throw_type_error(
        "stream must be a CUDA stream: an int, or an object with __cuda_stream__, cuda_stream or ptr, not " +
        type_name(argument));
  }
  const std::size_t number = PyLong_AsSize_t(handle.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw Error(ErrorCode::kArgument, "stream is no CUDA stream: " + int_text(handle));
  }
  return reinterpret_cast<CuStream>(number);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace kvpool::bindings
