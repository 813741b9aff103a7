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
  // The same for given pieces.
  void copy(std::span<const CopyPiece> pieces);

  // Overlapping copies of one thread, in parts: the thread enqueues the next part while one is under way, so that the
  // GPU is never idle in between. Each part has its own stream.
  // Thread-safety: none; for one thread, on its stack. Keeps the context current there.
  class Run {
   public:
    explicit Run(DeviceCopier& copier) noexcept : copier_(copier) {}
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    // Begins the next part, to which later copies belong.
    void begin() { parts_.emplace_back(); }
    // As those of DeviceCopier, but they return when the copies are under way; after an error some may be under way,
    // too. A caller that ends the run because of an error first waits for all of it. REQUIRES: begin().
    std::uint64_t copy(GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                       std::span<const Address> to, bool merge);
    void copy(std::span<const CopyPiece> pieces);
    // The number of parts that were begun and not waited for.
    std::size_t parts() const noexcept { return parts_.size(); }
    // Return when the bytes of the oldest part, or of all parts, have arrived. Throw as CopyStream::drain; then that
    // part writes nothing any more, unless it is kDeviceLost. REQUIRES, for wait(): parts() > 0.
    void wait();
    void wait_for_all();

   private:
    // The stream of the latest part. `with_table`: if it is chosen now, choose one with a table.
    CopyStream& stream(bool with_table);

    DeviceCopier& copier_;
    std::optional<CurrentContext> current_;          // set by the first copy
    std::deque<std::unique_ptr<CopyStream>> parts_;  // null: the part has no work on the GPU
  };

  // Acquires now what the next call needs of the driver. Throws as CudaDriver::require.
  void warm_up();
  // The same, and allocates tables for `count` concurrent calls or parts, each of up to `copies` copies of up to
  // `strips` strips and, together, up to `pairs` pairs. Larger copies take several launches. Allocates nothing if no
  // copy needs a table. Call it once; then the destructor may wait for the GPU. Also throws as CopyStream::add_table.
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
  std::vector<std::unique_ptr<CopyStream>> tabled_;  // under mutex_; with tables; always has capacity for all of them
};

}  // namespace kvpool
