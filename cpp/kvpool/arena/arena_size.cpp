// What is the same for arenas in any memory: how large they are, and where pieces lie in them.
#include <cstdint>
#include <string>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {

ArenaSize arena_size(std::uint32_t blocks, const std::vector<std::size_t>& segment_bytes) {
  if (blocks > kBlocksMax) {
    throw Error(ErrorCode::kArgument,
                std::to_string(blocks) + " blocks are more than a medium can have (" + std::to_string(kBlocksMax) + ")",
                {{"blocks", blocks}, {"blocks_max", kBlocksMax}});
  }
  if (segment_bytes.empty()) {
    throw Error(ErrorCode::kArgument, "a block needs at least one piece");
  }
  // Everything below a quarter of the address space, so that no sum of two sizes overflows.
  constexpr std::size_t kBytesMax = SIZE_MAX / 4;
  ArenaSize size{};
  for (const std::size_t piece : segment_bytes) {
    if (piece == 0) {
      throw Error(ErrorCode::kArgument, "a piece of zero bytes");
    }
    if (piece > kBytesMax || size.block_bytes + piece > kBytesMax) {
      throw Error(ErrorCode::kArgument, "the pieces of a block are longer than any memory");
    }
    size.block_bytes += piece;
  }
  if (__builtin_mul_overflow(size.block_bytes, std::size_t{blocks}, &size.payload_bytes) ||
      size.payload_bytes > kBytesMax) {
    throw Error(
        ErrorCode::kArgument,
        std::to_string(blocks) + " blocks of " + std::to_string(size.block_bytes) + " bytes are larger than any memory",
        {{"blocks", blocks}, {"block_bytes", static_cast<std::int64_t>(size.block_bytes)}});
  }
  return size;
}

std::vector<Segment> arena_segments(std::byte* base, std::uint32_t blocks,
                                    const std::vector<std::size_t>& segment_bytes) {
  std::vector<Segment> segments;
  segments.reserve(segment_bytes.size());
  for (const std::size_t piece : segment_bytes) {
    segments.push_back(Segment{base, piece, piece});
    if (base != nullptr) base += blocks * piece;
  }
  return segments;
}

}  // namespace kvpool
