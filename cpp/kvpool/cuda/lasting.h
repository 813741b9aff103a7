// Which refusals of the CUDA driver hold for good.
//
// CudaDriver::require says kUnsupported for all that is neither memory, a capture nor the end of the context. For a
// caller that is one thing; whoever may try again wants to know whether there is any use in it.
#pragma once

#include "kvpool/base/error.h"

namespace kvpool {

// Of kUnsupported: what does not come from the driver, or is its word that this machine or driver cannot do it. False
// for everything else, of other codes, too.
bool is_lasting(const Error& error) noexcept;

}  // namespace kvpool
