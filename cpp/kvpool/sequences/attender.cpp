#include "kvpool/sequences/attender.h"

#include "kvpool/base/error.h"

namespace kvpool {

std::shared_ptr<GpuAttention> Attender::gpu() const {
  if (!gpu_kernel_) {
    throw Error(ErrorCode::kUnsupported, "the blocks are on a GPU, and this build has no kernels of attention for it");
  }
  const std::lock_guard lock(mutex_);
  if (gpu_ == nullptr) throw Error(ErrorCode::kClosed, "the pool was closed before the attention had begun");
  return gpu_;
}

Attender::Computing::Computing(Attender& attender) : attender_(attender) {
  const std::lock_guard lock(attender_.mutex_);
  if (attender_.stopped_) throw Error(ErrorCode::kClosed, "the pool was closed before the attention had begun");
  ++attender_.computing_;
}

Attender::Computing::~Computing() {
  const std::lock_guard lock(attender_.mutex_);
  if (--attender_.computing_ == 0) attender_.ended_.notify_all();
}

void Attender::stop() noexcept {
  stopping_.store(true);
  std::unique_lock lock(mutex_);
  stopped_ = true;
  ended_.wait(lock, [this] { return computing_ == 0; });
  const std::shared_ptr<GpuAttention> gpu = std::move(gpu_);
  lock.unlock();  // the end of what is on a GPU may wait for it
}

}  // namespace kvpool
