// Access of this process to a peer's blocks.
//
// Thread-safety: all objects are immutable.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvpool/base/segment.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/route.h"

namespace kvpool {

// The peer's blocks at the addresses that they have in the peer: for routes that name remote addresses (cma, ucx).
// Never dereference them here. Media on a GPU have no blocks in the result, except those of `gpu_media`.
MediaSpans remote_spans(const PeerMetadata& metadata, const MediaSet& gpu_media = {});

// The span of a medium whose memory is mapped here at `base`. Throws kProtocol.
MediumSpan mapped_span(const MetadataMedium& medium, std::byte* base);

// Files of the peer's media, -1 for a medium that cannot be mapped.
using MediaFiles = MediumMap<int>;
inline constexpr MediaFiles kNoFiles = same_for_all_media(-1);

// The peer's owned arenas, mapped into this process. The mapping does not depend on the descriptors or the peer; it
// ends with this object. A forked child does not inherit it.
class MappedPeer {
 public:
  // Maps every medium of host memory that has a descriptor and mapped_bytes; the others get no blocks. Throws Error
  // kProtocol (the descriptor is no memory file, may shrink, or is shorter than the metadata says), kUnsupported
  // (nothing to map, or the kernel refuses).
  static std::unique_ptr<MappedPeer> make(const PeerMetadata& metadata, const MediaFiles& files);
  virtual ~MappedPeer() = default;

  const MediaSpans& spans() const noexcept { return spans_; }
  // Where each medium is mapped, and its length; empty for a medium that is not mapped.
  const MediumMap<std::span<std::byte>>& regions() const noexcept { return regions_; }

 protected:
  MediaSpans spans_;
  MediumMap<std::span<std::byte>> regions_{};
};

}  // namespace kvpool
