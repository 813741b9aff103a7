// Memory for the description of a copy that is too long to travel with its launch (table.h): page-locked host memory,
// to which it is written, and as much GPU memory, from which the kernel reads it.
//
// It belongs to one stream and is allocated front to back, so consecutive copies in the stream get separate parts. All
// of it is free again when the stream has no work (CopyStream::drain). Allocating or freeing such memory may wait for
// all work of the GPU, so a copy never does.
//
// Thread-safety: none; any thread may destroy it.
#pragma once

#include <cstddef>
#include <memory>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/shared_memory.h"

namespace kvpool {

class CopyTable {
 public:
  // The longest table: half a million pairs.
  static constexpr std::size_t kBytesMax = std::size_t{4} << 20;

  // The rounded length of a part of `bytes`: parts begin at multiples of the unit in which memory is read.
  static constexpr std::size_t length_of(std::size_t bytes) noexcept { return (bytes + 255) / 256 * 256; }

  // Null when memory of either kind is short: no copy strictly needs a table. At most kBytesMax. Throws kDeviceLost,
  // kState, std::bad_alloc. REQUIRES: bytes > 0.
  static std::unique_ptr<CopyTable> make(const std::shared_ptr<const CudaContext>& context, std::size_t bytes);
  // REQUIRES: the stream has no work, unless the GPU is lost. Frees nothing in a forked child.
  ~CopyTable();
  CopyTable(const CopyTable&) = delete;
  CopyTable& operator=(const CopyTable&) = delete;

  std::size_t bytes() const noexcept { return host_.bytes(); }
  // Takes `bytes` of the rest, until reset(). Returns an empty space if too little is left.
  cuda::TableSpace take(std::size_t bytes) noexcept;
  void reset() noexcept { taken_ = 0; }

 private:
  CopyTable(const std::shared_ptr<const CudaContext>& context, std::size_t bytes);

  const std::shared_ptr<const CudaContext> context_;
  PinnedBuffer host_;
  CuPointer device_ = 0;
  std::size_t taken_ = 0;
};

}  // namespace kvpool
