// The inner loop of bulk copies: one thread, past the caches.
//
// An ordinary store first reads the line that it is about to overwrite; a copy that misses the caches then moves three
// bytes over the memory bus for two. Non-temporal stores avoid that read. But with them the processor's prefetcher no
// longer hides the latency of the loads, so the loop advances through several pages side by side and prefetches the
// source lines, across the end of one piece into the next.
#pragma once

#include <cstddef>
#include <span>

#include "kvpool/base/copy.h"

namespace kvpool {

// A way to copy tiles. Two tiles may share a cache line of the destination, as long as they do not share a byte.
struct CopyKernel {
  const char* name;
  // The longest tile that `copy` accepts. Longer pieces must be cut, preferably at cache lines of the destination.
  std::size_t tile_bytes;
  // Copies every tile. On return the bytes are visible to this thread and, by any release operation that follows, to
  // others. REQUIRES: no tile is longer than tile_bytes, and no destination overlaps anything else.
  void (*copy)(std::span<const CopyPiece> tiles) noexcept;
};

inline constexpr std::size_t kCacheLineBytes = 64;

// All kernels that this processor can run, the fastest first. The last one is memcpy, which runs on all.
std::span<const CopyKernel> copy_kernels() noexcept;

// The kernel for batches that do not fit into the caches.
inline const CopyKernel& streaming_kernel() noexcept { return copy_kernels().front(); }

}  // namespace kvpool
