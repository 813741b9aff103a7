// Rows of bytes in a buffer of the caller's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "arguments.h"

namespace kvpool::bindings {

// n rows of the caller's memory, held while they are copied.
class Rows {
 public:
  Rows(py::handle argument, const char* name, std::size_t n, std::size_t row_bytes, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_CheckBuffer(argument.ptr()) == 0 || PyObject_GetBuffer(argument.ptr(), &view_, flags) != 0) {
      view_.obj = nullptr;
      throw_type_error(std::string(name) + " must be a contiguous" + (writable ? " and writable" : "") +
                       " buffer, such as a NumPy array, and is " + type_name(argument));
    }
    const auto given = static_cast<std::size_t>(view_.len);
    if (given == n * row_bytes) return;
    PyBuffer_Release(&view_);
    throw_argument(std::to_string(n) + " keys of blocks of " + std::to_string(row_bytes) + " bytes, and " + name +
                       " has " + std::to_string(given) + " bytes",
                   {{"needed", static_cast<std::int64_t>(n * row_bytes)}, {"given", static_cast<std::int64_t>(given)}});
  }
  ~Rows() { PyBuffer_Release(&view_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(view_.buf); }

 private:
  Py_buffer view_{};
};

}  // namespace kvpool::bindings
