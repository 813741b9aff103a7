// The memory of this process from which it writes to peers, and into which peers write.
//
// Thread-safety: immutable, except for assignment.
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
  // Page-locked buffers between the GPU and a link; RouteMaker adds them. Null without a GPU.
  std::shared_ptr<DeviceStaging> staging = nullptr;
  // Where blocks lie that may be cut; null for the others.
  MediumMap<std::shared_ptr<const BlockPlaces>> places{};

  const std::shared_ptr<Arena>& arena(Medium medium) const noexcept { return arenas[medium]; }
  MediaSpans spans() const;
  // The spans that the CPU, or this GPU, can access; other media have no blocks.
  MediaSpans host_spans() const;
  MediaSpans gpu_spans(const CudaContext& gpu) const;
  bool in_pieces() const noexcept;
  // The media on a GPU, and that GPU's context; null if all are in host memory.
  MediaSet on_gpu() const noexcept;
  std::shared_ptr<const CudaContext> gpu() const noexcept;
  // Keeps the memory of spans() alive.
  std::shared_ptr<void> keepalive() const;
  // Writes layout and segments into the metadata, but not how the memory can be mapped.
  void describe(PeerMetadata& metadata) const;
};

bool has_blocks(const MediaSpans& spans) noexcept;

}  // namespace kvpool
