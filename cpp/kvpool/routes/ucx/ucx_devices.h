// Which memory of a GPU UCX can be given, as it says itself at run time and as its versions are known to.
#pragma once

#include <string>

#include "kvpool/routes/ucx/ucx.h"
#include "kvpool/routes/ucx/ucx_library.h"

namespace kvpool {

// Why UCX is not to be given it; empty when it is. Callbacks and devices of UCX may run meanwhile: the GPU's context is
// current.
std::string why_not_by_ucx(const UcxLibrary& ucx, ucp_context_h context, UcxGpuMemory memory);

// Whether peers take descriptors out of this process: UCX hands over memory that was made by cuMemCreate in this way
// (pidfd_getfd), and a kernel with Yama allows that to tracers alone. Where they may not, UCX goes the long way, by the
// host, and says nothing. `refused`: why UCX was not given a medium.
bool passes_descriptors(const UcxLocal& local, const MediumMap<std::string>& refused) noexcept;

}  // namespace kvpool
