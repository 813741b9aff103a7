// The memory that this process lets its peers write, and writes from.
//
// Thread-safety: immutable, but for assignment.
#pragma once

#include <memory>

#include "kvpool/arena/arena.h"
#include "kvpool/base/media_set.h"
#include "kvpool/base/segment.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/net/connect/peer_metadata.h"

namespace kvpool {

class CudaContext;
class DeviceStaging;

struct LocalMemory {
  Layout layout;
  MediumMap<std::shared_ptr<Arena>> arenas;
  // Page-locked buffers between its GPU and a link; RouteMaker adds them. Null without a GPU.
  std::shared_ptr<DeviceStaging> staging = nullptr;

  const std::shared_ptr<Arena>& arena(Medium medium) const noexcept { return arenas[medium]; }
  MediaSpans spans() const;
  // Of these, what the CPU can follow, and what this GPU can; the other media have no blocks.
  MediaSpans host_spans() const;
  MediaSpans gpu_spans(const CudaContext& gpu) const;
  // The media that are on a GPU, and the GPU that they are on; null without any.
  MediaSet on_gpu() const noexcept;
  std::shared_ptr<const CudaContext> gpu() const noexcept;
  // Keeps the memory of spans() alive.
  std::shared_ptr<void> keepalive() const;
  // What the metadata says of it: layout and segments. Says nothing of how it can be mapped.
  void describe(PeerMetadata& metadata) const;
};

bool has_blocks(const MediaSpans& spans) noexcept;

}  // namespace kvpool
