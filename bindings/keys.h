// From Python's keys to the core's: n keys of one length, one after another.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "vectors.h"

namespace kvpool::bindings {

struct Keys {
  Vector<std::byte> bytes;
  std::size_t n = 0;

  const std::byte* data() const noexcept { return bytes.data(); }
};

// A list or tuple of bytes, or of str in hex digits; or one buffer: an array of uint8 of shape [n, key_bytes], or bytes
// with all keys one after another. Copied once, while this thread holds the GIL.
Keys keys_from(py::handle argument, std::size_t key_bytes);

}  // namespace kvpool::bindings
