// What match, insert and swap_in return: pins with what they pin. Each is a context manager.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "kvpool/index/pins.h"

namespace kvpool::bindings {

struct Match {
  Pins pins;
  std::size_t tokens = 0;
  std::size_t partial_tokens = 0;
  pybind11::object addrs;
};

struct Inserted {
  Pins pins;
  std::size_t tokens = 0;
  std::size_t inserted = 0;
  pybind11::object addrs;
  pybind11::object duplicates;
};

struct SwappedIn {
  Pins pins;
  pybind11::object addrs;
};

}  // namespace kvpool::bindings
