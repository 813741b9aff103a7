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

  // Takes no memory yet. Throws as CudaDriver::require.
  explicit DeviceStaging(std::shared_ptr<const CudaContext> context);
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  // A buffer of kBufferBytes, until it is let go of; outlives this object. Some are kept for later calls. Throws as
  // PinnedBuffer.
  std::shared_ptr<PinnedBuffer> buffer();

  // Takes what one buffer and one copy need, so that nothing is asked of the driver then but to copy. Throws as both.
  void warm_up();

  // The pieces, one after the other, to the buffer; and back. Pieces are the GPU's or page-locked memory. Return when
  // the bytes have arrived. Throw as DeviceCopier::copy. REQUIRES: they fit.
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
