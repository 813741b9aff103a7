// Memory for what a kernel is told when that is too long to travel with its launch (table.h): page-locked memory of the
// host, where it is written, and as much of the GPU's, where the kernel reads it.
//
// It belongs to one stream, and is taken from its front: copies that are put into the stream one after the other get
// parts of it that do not meet. All of it is free again when nothing of the stream is under way (CopyStream::drain).
// To take such memory of the driver or to give it back may wait for all that the GPU does, so a copy never does.
//
// Thread-safety: none; may go in any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/shared_memory.h"

namespace kvpool {

class CopyTable {
 public:
  // Longer ones are not made: half a million pairs.
  static constexpr std::size_t kBytesMax = std::size_t{4} << 20;

  // What a part of so many bytes takes of it: parts begin at multiples of what memory is read in.
  static constexpr std::size_t length_of(std::size_t bytes) noexcept { return (bytes + 255) / 256 * 256; }

  // Null when memory is short, of either kind: there is nothing that needs a table. At most kBytesMax. Throws
  // kDeviceLost, kState, std::bad_alloc. REQUIRES: bytes > 0.
  static std::unique_ptr<CopyTable> make(const std::shared_ptr<const CudaContext>& context, std::size_t bytes);
  // REQUIRES: nothing of the stream is under way, unless the GPU is lost. In a forked child nothing is given back.
  ~CopyTable();
  CopyTable(const CopyTable&) = delete;
  CopyTable& operator=(const CopyTable&) = delete;

  std::size_t bytes() const noexcept { return host_.bytes(); }
  // So much of what is left, until reset(). Of no length when there is less.
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
