#include "kvpool/arena/pin.h"

#include "kvpool/cuda/context.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "memory cannot be pinned";

}  // namespace

PinnedRange::PinnedRange(void* base, std::size_t bytes, int device)
    : context_(device < 0 ? CudaContext::retain_current(kWhat) : CudaContext::retain(device, kWhat)), base_(base) {
  const CurrentContext current(*context_, kWhat);
  context_->driver().require(context_->driver().mem_host_register(base, bytes, kCuHostRegisterPortable),
                             "cuMemHostRegister", kWhat);
}

// At the end of the process the driver may have shut down already; nothing is lost when these calls fail then.
PinnedRange::~PinnedRange() {
  const CurrentContext current(*context_);
  if (current) context_->driver().mem_host_unregister(base_);
}

}  // namespace kvpool
