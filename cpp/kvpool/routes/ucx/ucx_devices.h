// Which memory of a GPU UCX can be given, as it says itself at run time and as its versions are known to.
#pragma once

#include <string>

#include "kvpool/routes/ucx/ucx_library.h"
#include "kvpool/routes/ucx/ucx_transport.h"

namespace kvpool {

// Why UCX is not to be given it; empty when it is. Callbacks and devices of UCX may run meanwhile: the GPU's context is
// current.
std::string why_not_by_ucx(const UcxLibrary& ucx, ucp_context_h context, UcxGpuMemory memory);

}  // namespace kvpool
