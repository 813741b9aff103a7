// Blocks on DISK: the options of a pool.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/pool/pool_options.h"

namespace kvpool::bindings {

// From (blocks, path, [(name, value)], admission, bytes a second, bytes a day, seconds after which a drive hangs). The
// Python half has checked the types. Throws kArgument.
DiskTierOptions disk_from(const pybind11::object& disk);

}  // namespace kvpool::bindings
