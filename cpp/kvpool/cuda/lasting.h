// Tells which refusals of the CUDA driver are permanent.
//
// CudaDriver::require throws kUnsupported for every failure that is not lack of memory, a capture or the end of the
// context. Code that may try again needs to know whether trying again can succeed.
#pragma once

#include "kvpool/base/error.h"
#include "kvpool/cuda/driver.h"

namespace kvpool {

// Whether the driver says with this result that this machine or driver cannot do it.
bool is_lasting(CuResult result) noexcept;

// True for a kUnsupported that does not come from the driver, or with which the driver says that this machine or driver
// cannot do it. False for everything else (kMayPass, by which CudaDriver::require marks the rest), including other
// codes.
bool is_lasting(const Error& error) noexcept;

}  // namespace kvpool
