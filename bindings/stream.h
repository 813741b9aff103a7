// A CUDA stream that Python names.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/cuda/stream.h"

namespace kvpool::bindings {

// None, an int (a cudaStream_t; 0 and 1 are the default stream, 2 that of the thread), or an object that has one:
// `__cuda_stream__()`, torch's `.cuda_stream`, CuPy's `.ptr`. Raises ArgumentTypeError.
CallerStream stream_from(pybind11::handle argument);

}  // namespace kvpool::bindings
