// Puts copies into a stream. Only this file knows how pieces are copied on a GPU.
//
// Many small pieces are one kernel that reads and writes both sides itself (cuda/kernels.h); few large ones go by the
// copy engines (copy_bounds.h says which are which), in one call where the driver has it (cuMemcpyBatchAsync,
// CUDA 12.8), otherwise one by one. A call that this GPU or driver does not support is not tried again. Some drivers
// refuse correct batches, or hang in them: KVPOOL_CUDA_BATCHES=0 in the environment disables batches.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/base/address.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/context.h"
#include "kvpool/cuda/copy_bounds.h"
#include "kvpool/cuda/copy_table.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool {

// The kernels for this context, all of them loaded; null if none exist, or this GPU or its driver cannot run them.
// The kernels of this build call the machine's driver. If another library replaces the driver (KVPOOL_CUDA_LIBRARY),
// returns the kernels of that library (CudaDriver::kernel_launcher), if any. Call it when a pool is made, before any
// stream waits for a word (wait_word.h); later calls load nothing. Throws kOutOfMemory, kDeviceLost, kState.
const cuda::KernelSet* kernels_for(const CudaContext& context);
// Loads these kernels; null if they cannot run. Throws as above.
const cuda::KernelSet* loaded(const CudaContext& context, const cuda::KernelSet& kernels);

// Thread blocks of a kernel. Over the bus, this many keep half a megabyte in flight, a few times what 64 GB/s needs:
// more would not make copies faster, and the model needs the rest of the GPU. Copies that may stay within the GPU, or
// go over a link, get more thread blocks, and still leave most of the GPU.
inline constexpr std::uint32_t kBusThreadBlocks = 32;
inline constexpr std::uint32_t kLinkThreadBlocks = 64;

class StreamCopier {
 public:
  // `kernels`: if null, the copy engines copy small pieces, too; `bounds` says which are small. `thread_blocks`: the
  // most of a kernel. `what` begins the text of errors: what could not be done; the pointer is kept. Throws as
  // CudaDriver::require.
  StreamCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const CopyBounds& bounds,
               std::uint32_t thread_blocks, const char* what);
  StreamCopier(const StreamCopier&) = delete;
  StreamCopier& operator=(const StreamCopier&) = delete;

  const std::shared_ptr<const CudaContext>& context() const noexcept { return context_; }
  const char* what() const noexcept { return what_; }
  const CopyBounds& bounds() const noexcept { return bounds_; }

  // Strip s of block from[i] to block to[i], for all of them; the plan has only blocks of one medium on each side.
  // `merge`: joins contiguous neighbours into one piece. A kernel takes one launch if its description travels with it
  // (cuda::kInlineTableBytes), or fits into `table`, which belongs to the stream; otherwise several. Returns the number
  // of pieces. Throws kDeviceLost, kUnsupported, kOutOfMemory, std::bad_alloc; some of the copies may be in the stream
  // then. REQUIRES: the context is current, the stream is of it, and host memory is page-locked; no two pieces overlap
  // where they are written.
  std::uint64_t copy(CuStream stream, GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                     std::span<const Address> to, bool merge, CopyTable* table = nullptr);
  // The same for given pieces, with the copy engines.
  void copy(CuStream stream, std::span<const CopyPiece> pieces);

  // The table bytes that a copy of these numbers of strips and pairs needs to be one launch; 0: it needs no table.
  std::size_t table_bytes(std::size_t strips, std::size_t pairs) const noexcept;

 private:
  bool launch(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
              std::span<const Address> to, CopyTable* table);
  void copy_some(CuStream stream, std::span<const CopyPiece> pieces);
  bool copied_as_batch(CuStream stream, std::span<const CopyPiece> pieces);

  const std::shared_ptr<const CudaContext> context_;
  const cuda::KernelSet* const kernels_;
  const CopyBounds bounds_;
  const std::uint32_t thread_blocks_;
  const char* const what_;
  std::atomic<bool> kernels_refused_{false};  // this GPU or its driver cannot run the compiled kernels
  std::atomic<bool> batches_refused_;         // the driver has the call but does not support it, or it is disabled
};

}  // namespace kvpool
