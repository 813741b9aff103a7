// What a pool counts, and how its memory lies, as dictionaries: those of src/kvpool/alloc/stats.py are made of them.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/pool/pool.h"

namespace kvpool::bindings {

namespace py = pybind11;

py::dict to_dict(const PoolStats& stats);
py::dict to_dict(const Arena& arena);

}  // namespace kvpool::bindings
