// Moves content between a GPU's blocks and code that cannot reach them, through page-locked buffers.
//
// Thread-safety: all of it; one thread at a time uses a buffer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/shared_memory.h"

namespace kvpool {

class DeviceStaging {
 public:
  static constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

  // Allocates no memory yet. Throws as CudaDriver::require.
  explicit DeviceStaging(std::shared_ptr<const CudaContext> context);
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  // A buffer of kBufferBytes, which may outlive this object. When it is dropped, it may be kept for later calls. Throws
  // as PinnedBuffer.
  std::shared_ptr<PinnedBuffer> buffer();

  // Acquires now what one buffer and one copy need, so that later the driver is only asked to copy. Throws as both.
  void warm_up();

  // Copy the pieces, in order, to the buffer, and back. Pieces lie in GPU memory or page-locked memory. Return when the
  // bytes have arrived. Throw as DeviceCopier::copy. REQUIRES: they fit.
  void gather(std::span<const iovec> pieces, std::byte* to);
  void scatter(const std::byte* from, std::span<const iovec> pieces);

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<std::unique_ptr<PinnedBuffer>> buffers;
    void keep(std::unique_ptr<PinnedBuffer>& buffer) noexcept;
  };

  DeviceCopier copier_;
  const std::shared_ptr<Kept> kept_;
};

}  // namespace kvpool
