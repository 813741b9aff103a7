#include "kvpool/routes/local_memory.h"

#include <algorithm>

#include "kvpool/arena/device_memory.h"
#include "kvpool/cuda/context.h"

namespace kvpool {
namespace {

// A GPU reaches its own memory, host memory that is page-locked, and memory of another GPU that was opened to it.
bool reaches(const CudaContext& gpu, const Arena& arena) noexcept {
  if (!arena.on_device()) return arena.pinned();
  if (arena.context()->ordinal() == gpu.ordinal()) return true;
  const DeviceMemory* const owned = arena.device_memory();
  return owned != nullptr && std::ranges::find(owned->peers(), gpu.ordinal()) != owned->peers().end();
}

}  // namespace

bool has_blocks(const MediaSpans& spans) noexcept {
  return std::ranges::any_of(spans, [](const MediumSpan& span) { return span.blocks > 0; });
}

MediaSpans LocalMemory::spans() const {
  MediaSpans spans;
  for (std::size_t i = 0; i < spans.size(); ++i) spans[i] = {arenas[i]->blocks(), arenas[i]->segments(), places[i]};
  return spans;
}

MediaSpans LocalMemory::host_spans() const {
  MediaSpans spans = this->spans();
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (arenas[i]->on_device()) spans[i] = {};
  }
  return spans;
}

MediaSpans LocalMemory::gpu_spans(const CudaContext& gpu) const {
  MediaSpans spans = this->spans();
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (!reaches(gpu, *arenas[i])) spans[i] = {};
  }
  return spans;
}

bool LocalMemory::in_pieces() const noexcept {
  return std::ranges::any_of(places, [](const auto& of_medium) { return of_medium != nullptr; });
}

MediaSet LocalMemory::on_gpu() const noexcept {
  MediaSet set{};
  for (const Medium medium : kMedia) set[medium] = arena(medium)->on_device();
  return set;
}

std::shared_ptr<const CudaContext> LocalMemory::gpu() const noexcept {
  for (const auto& arena : arenas) {
    if (arena->on_device() && arena->blocks() > 0) return arena->context();
  }
  return nullptr;
}

std::shared_ptr<void> LocalMemory::keepalive() const {
  return std::make_shared<MediumMap<std::shared_ptr<Arena>>>(arenas);
}

void LocalMemory::describe(PeerMetadata& metadata) const {
  metadata.block_tokens = layout.block_tokens;
  metadata.piece_bytes.assign(layout.piece_bytes.begin(), layout.piece_bytes.end());
  metadata.format = layout.format;
  for (const Medium medium : kMedia) {
    const Arena& from = *arena(medium);
    MetadataMedium& out = metadata.media[medium];
    out.blocks = from.blocks();
    if (from.blocks() == 0) continue;
    if (from.on_device()) out.kind = MemoryKind::kGpu;
    for (const Segment& segment : from.segments()) {
      out.segments.push_back({reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
    }
  }
}

}  // namespace kvpool
