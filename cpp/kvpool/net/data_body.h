// The body of a data frame: it says which bytes of which blocks the payload holds. docs/wire.md describes the bytes.
//
//   u32 ranges | (u64 at, u64 bytes) each | u32 blocks | u64 address each
//
// The payload is the blocks' content in these ranges: range by range, within a range block by block in list order. So
// the payload has (sum of the ranges) times (number of blocks) bytes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/strips.h"
#include "kvpool/net/wire.h"

namespace kvpool {

inline constexpr std::size_t kDataRangesMax = 4096;
inline constexpr std::size_t kDataBlocksMax = 4096;
inline constexpr std::size_t kDataPiecesMax = 65536;  // ranges times blocks: what a frame costs its receiver
inline constexpr std::uint64_t kDataBytesMax = std::uint64_t{4} << 20;  // of a payload that we send

struct DataBody {
  std::vector<ContentRange> ranges;
  std::vector<Address> blocks;  // exist here; the caller checks their owner, and that none is listed twice
};

// Writes the body of a frame that fills `strips` of the blocks `to`. REQUIRES: the limits above.
void write_data_body(std::span<const BlockStrip> strips, std::span<const Address> to, Bytes& out);

// Throws Error kProtocol unless all of these hold: counts within the limits and not zero, ranges within the content of
// the blocks and not overlapping, blocks of `local`, and as many bytes as the payload has.
DataBody read_data_body(std::span<const std::byte> body, std::uint64_t payload_bytes, const MediaSpans& local);

// Where the payload goes, piece after piece. REQUIRES: read_data_body returned the body, for the same spans.
std::vector<iovec> data_placement(const DataBody& body, const MediaSpans& local);

}  // namespace kvpool
