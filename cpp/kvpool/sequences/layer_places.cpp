#include "kvpool/sequences/layer_places.h"

#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

MediaSegments segments_of(const MediumMap<std::shared_ptr<Arena>>& arenas) noexcept {
  MediaSegments segments;
  for (const Medium medium : kMedia) {
    const Arena* const arena = arenas[medium].get();
    if (arena != nullptr && arena->blocks() > 0) segments[medium] = arena->segments();
  }
  return segments;
}

MediaSegments segments_of(const MediaSpans& spans) noexcept {
  MediaSegments segments;
  for (const Medium medium : kMedia) {
    if (spans[medium].blocks > 0) segments[medium] = spans[medium].segments;
  }
  return segments;
}

LayerPlaces::LayerPlaces(const Layout& layout, const MediaSegments& segments, std::uint32_t layer) {
  // All pieces of a KV layout have the same size, and K stands before V.
  const std::uint64_t piece_bytes = layout.piece_bytes.front();
  const std::uint64_t k_offset = std::uint64_t{layer} * layout.format.pieces_per_layer() * piece_bytes;
  const std::uint64_t v_offset = layout.format.fused ? k_offset : k_offset + piece_bytes;
  for (const Medium medium : kMedia) {
    if (segments[medium].empty()) continue;
    places_[medium] = {run_of(segments[medium], k_offset, piece_bytes, layer),
                       run_of(segments[medium], v_offset, piece_bytes, layer)};
  }
}

void LayerPlaces::fill(std::span<const Address> addresses, const std::byte** k_blocks,
                       const std::byte** v_blocks) const noexcept {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const Place& place = places_[medium_of(addresses[i])];
    const std::uint32_t block = block_of(addresses[i]);
    k_blocks[i] = place.k.base == nullptr ? nullptr : place.k.base + block * place.k.stride;
    v_blocks[i] = place.v.base == nullptr ? nullptr : place.v.base + block * place.v.stride;
  }
}

// The bytes [offset, offset + bytes) of a block's content, which is the concatenation of its pieces in all segments.
LayerPlaces::Run LayerPlaces::run_of(std::span<const Segment> segments, std::uint64_t offset, std::uint64_t bytes,
                                     std::uint32_t layer) {
  std::uint64_t begin = 0;
  for (const Segment& segment : segments) {
    if (offset >= begin && offset + bytes <= begin + segment.bytes) {
      return {segment.base + (offset - begin), segment.stride};
    }
    begin += segment.bytes;
  }
  throw Error(ErrorCode::kUnsupported,
              "K or V of layer " + std::to_string(layer) +
                  " is cut into several runs of bytes in the adopted tensors: attention cannot read it",
              {{"layer", layer}});
}

}  // namespace kvpool
