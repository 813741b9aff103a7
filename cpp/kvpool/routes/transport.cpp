#include "kvpool/routes/transport.h"

#include <unistd.h>

#include <algorithm>

namespace kvpool {

void Offer::add_host_files(const LocalMemory& memory) noexcept {
  for (const Medium medium : kMedia) {
    const Arena& arena = *memory.arena(medium);
    if (arena.blocks() > 0 && !arena.on_device()) files[medium] = arena.memfd();
  }
}

bool PeerEnd::is_here() const noexcept { return link->process() == getpid(); }

bool PeerEnd::is_local() const { return link->pidfd() >= 0 || link->describe().starts_with("unix"); }

bool PeerEnd::has_gpu() const noexcept {
  return std::ranges::any_of(metadata.media,
                             [](const MetadataMedium& medium) { return medium.kind == MemoryKind::kGpu; });
}

MediaFiles PeerEnd::files() const {
  MediaFiles files = kNoFiles;
  std::size_t next = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (metadata.media[i].mapped_bytes > 0) files[i] = link->descriptor(next++);
  }
  return files;
}

}  // namespace kvpool
