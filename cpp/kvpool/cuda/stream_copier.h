// Puts copies into a stream: the one place that knows how pieces are copied on a GPU.
//
// Many small pieces are one kernel that reads and writes both sides itself (cuda/kernels.h); few large ones go by the
// copy engines, in one call where the driver has it (cuMemcpyBatchAsync, CUDA 12.8), else one by one. What this GPU or
// its driver turns out not to support is not asked for again.
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
#include "kvpool/cuda/copy_table.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool {

// The kernels that can be launched in this context, all of them loaded: null without any, where this GPU or its driver
// cannot run them, and where another library than the machine's own driver answers, which the kernels would not call.
// Whoever makes a pool asks first, before any stream waits for a word (wait_word.h); to ask again loads nothing. Throws
// kOutOfMemory, kDeviceLost, kState.
const cuda::KernelSet* kernels_for(const CudaContext& context);
// These, loaded; null where they cannot run. Throws as above.
const cuda::KernelSet* loaded(const CudaContext& context, const cuda::KernelSet& kernels);

class StreamCopier {
 public:
  // Mean length of a piece up to which a kernel copies. Below, the copy engines are slower than the bus: each piece
  // costs them one to two microseconds.
  static constexpr std::size_t kKernelPieceBytesMax = std::size_t{256} << 10;

  // `kernels`: null, the copy engines copy small pieces, too. `thread_blocks`: of a kernel, at most. `what` begins the
  // text of errors: what cannot be done then; it is kept, not copied. Throws as CudaDriver::require.
  StreamCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, std::uint32_t thread_blocks,
               const char* what);
  StreamCopier(const StreamCopier&) = delete;
  StreamCopier& operator=(const StreamCopier&) = delete;

  const std::shared_ptr<const CudaContext>& context() const noexcept { return context_; }
  const char* what() const noexcept { return what_; }

  // Strip s of block from[i] to block to[i], for all of them; the plan has only blocks of one medium on each side.
  // `merge`: neighbours that lie in a row are one piece. A kernel is one launch when its description travels with it
  // (cuda::kInlineTableBytes), or has room in `table`, which is the stream's; else several. Returns how many pieces
  // there are. Throws kDeviceLost, kUnsupported, kOutOfMemory, std::bad_alloc; some of the copies may be in the stream
  // then. REQUIRES: the context is current, the stream is of it, and host memory is page-locked; no two pieces overlap
  // where they are written.
  std::uint64_t copy(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
                     std::span<const Address> to, bool merge, CopyTable* table = nullptr);
  // The same for pieces as they are, by the copy engines.
  void copy(CuStream stream, std::span<const CopyPiece> pieces);

  // How much of a table a copy of so many strips and pairs takes, to be one launch; 0: it needs none.
  std::size_t table_bytes(std::size_t strips, std::size_t pairs) const noexcept;

 private:
  bool launch(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
              std::span<const Address> to, CopyTable* table);
  void copy_some(CuStream stream, std::span<const CopyPiece> pieces);
  bool copied_as_batch(CuStream stream, std::span<const CopyPiece> pieces);

  const std::shared_ptr<const CudaContext> context_;
  const cuda::KernelSet* const kernels_;
  const std::uint32_t thread_blocks_;
  const char* const what_;
  std::atomic<bool> kernels_refused_{false};  // this GPU or its driver cannot run what was compiled
  std::atomic<bool> batches_refused_{false};  // has the call, and does not support it
};

}  // namespace kvpool
