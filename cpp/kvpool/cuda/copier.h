// Copies between memories that one GPU reaches: its own, page-locked host memory, and what other processes and other
// GPUs have let it map. How: stream_copier.h. Each call has a stream to itself, so that calls of several threads
// overlap. If a call makes no progress while streams wait for words (wait_word.h), it sets the words by force.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/copy_stream.h"
#include "kvpool/cuda/stream_copier.h"

namespace kvpool {

class DeviceCopier {
 public:
  // As StreamCopier.
  DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const CopyBounds& bounds,
               const char* what);
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  const std::shared_ptr<const CudaContext>& context() const noexcept { return copier_.context(); }

  // Strip s of block from[i] to block to[i], for all of them; the plan has only blocks of one medium on each side.
  // Returns the number of pieces when the bytes have arrived. `merge`: contiguous neighbours count as one piece. Throws
  // kDeviceLost, kUnsupported, kOutOfMemory, std::bad_alloc. After any of them but kDeviceLost nothing is written any
  // more. REQUIRES: host memory is page-locked; no two pieces overlap where they are written.
  std::uint64_t copy(GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                     std::span<const Address> to, bool merge);
  // The same for pieces as they are.
  void copy(std::span<const CopyPiece> pieces);

  // Overlapping copies of one thread, in parts: the thread enqueues the next part while one is under way, so that the
  // GPU is never idle in between. Each part has its own stream.
  // Thread-safety: none; for one thread, on its stack. Keeps the context current there.
  class Run {
   public:
    explicit Run(DeviceCopier& copier) noexcept : copier_(copier) {}
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    // The part that follows; what is copied from now on belongs to it.
    void begin() { parts_.emplace_back(); }
    // As those of DeviceCopier, but they return when the copies are under way, and may be when they throw. A caller
    // that ends the run because of an error first waits for all of it. REQUIRES: begin().
    std::uint64_t copy(GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                       std::span<const Address> to, bool merge);
    void copy(std::span<const CopyPiece> pieces);
    // That were begun and not waited for.
    std::size_t parts() const noexcept { return parts_.size(); }
    // Returns when the bytes of the oldest part, or of all of them, have arrived. Throw as CopyStream::drain; of that
    // part nothing is written any more then, unless it is kDeviceLost. REQUIRES, of wait(): parts() > 0.
    void wait();
    void wait_for_all();

   private:
    // Of the part that was begun last. `with_table`: one that has a table, when it is to be chosen now.
    CopyStream& stream(bool with_table);

    DeviceCopier& copier_;
    std::optional<CurrentContext> current_;          // as of the first copy
    std::deque<std::unique_ptr<CopyStream>> parts_;  // null: nothing of it is the GPU's
  };

  // Takes what the next call needs of the driver, so that it need not then. Throws as CudaDriver::require.
  void warm_up();
  // The same, and tables for `count` calls or parts at a time, each of up to `copies` copies of up to `strips` strips
  // and, together, up to `pairs` pairs. What goes beyond that is several launches. Where nothing needs a table nothing
  // is taken. Once; this is then destroyed where one may wait for the GPU. Throws as CopyStream::add_table, too.
  void add_tables(std::size_t count, std::size_t copies, std::size_t strips, std::size_t pairs);
  std::size_t table_bytes() const noexcept { return table_bytes_; }  // of all tables

 private:
  template <class Put>
  std::uint64_t at_once(Put&& put);
  std::unique_ptr<CopyStream> take(bool with_table);
  void put_back(std::unique_ptr<CopyStream> stream) noexcept;

  StreamCopier copier_;
  std::size_t table_bytes_ = 0;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CopyStream>> idle_;    // under mutex_; without tables
  std::vector<std::unique_ptr<CopyStream>> tabled_;  // likewise, with: there is always room for all of them
};

}  // namespace kvpool
