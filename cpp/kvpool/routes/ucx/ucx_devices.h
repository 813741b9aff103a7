// Which GPU memory UCX can use, according to UCX at run time and to known limits of its versions.
#pragma once

#include <string>

#include "kvpool/routes/ucx/ucx.h"
#include "kvpool/routes/ucx/ucx_library.h"

namespace kvpool {

// Why UCX must not get this memory; empty if it may. UCX may run callbacks and devices meanwhile. REQUIRES: the GPU's
// context is current.
std::string why_not_by_ucx(const UcxLibrary& ucx, ucp_context_h context, UcxGpuMemory memory);

// Whether peers take descriptors out of this process: that is how UCX shares memory of cuMemCreate (pidfd_getfd), and a
// kernel with Yama allows it to tracers only. Without the permission, UCX silently copies through the host. `refused`:
// why UCX was not given a medium.
bool passes_descriptors(const UcxLocal& local, const MediumMap<std::string>& refused) noexcept;

}  // namespace kvpool
