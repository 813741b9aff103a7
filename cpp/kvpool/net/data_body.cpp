#include "kvpool/net/data_body.h"

#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/media_set.h"

namespace kvpool {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a data frame from the peer is malformed: " + what);
}

void check_place(const DataBody& body, const MediaSpans& local) {
  if (!blocks_exist(body.blocks, local)) fail("a block that does not exist");
  MediaSet used{};
  for (const Address block : body.blocks) {
    used[medium_of(block)] = true;
  }
  for (const Medium medium : kMedia) {
    if (used[medium] && !ranges_fit(body.ranges, local[medium].block_bytes())) fail("a range beyond a block's content");
  }
  if (ranges_overlap(body.ranges)) fail("ranges that overlap");
}

}  // namespace

void write_data_body(std::span<const BlockStrip> strips, std::span<const Address> to, Bytes& out) {
  WireWriter writer(out);
  writer.number(static_cast<std::uint32_t>(strips.size()));
  for (const BlockStrip& strip : strips) writer.number(strip.to).number(strip.bytes);
  writer.array(to);
}

DataBody read_data_body(std::span<const std::byte> body, std::uint64_t payload_bytes, const MediaSpans& local) {
  WireReader reader(body);
  DataBody data;
  data.ranges = reader.array<ContentRange>(kDataRangesMax);
  data.blocks = reader.array<Address>(kDataBlocksMax);
  reader.finish();
  const std::size_t pieces = data.ranges.size() * data.blocks.size();
  if (pieces == 0 || pieces > kDataPiecesMax) {
    fail(std::to_string(pieces) + " pieces; it can have 1 to " + std::to_string(kDataPiecesMax));
  }
  check_place(data, local);
  // No sum overflows: the ranges lie within a block and do not overlap.
  std::uint64_t bytes = 0;
  for (const ContentRange& range : data.ranges) bytes += range.bytes;
  if (payload_bytes % data.blocks.size() != 0 || payload_bytes / data.blocks.size() != bytes) {
    fail("a payload of " + std::to_string(payload_bytes) + " bytes for " + std::to_string(data.blocks.size()) +
         " times " + std::to_string(bytes));
  }
  return data;
}

std::vector<iovec> data_placement(const DataBody& body, const MediaSpans& local) {
  std::vector<iovec> pieces;
  ContentPlan(local, body.ranges).emit(body.blocks, true, pieces);
  return pieces;
}

}  // namespace kvpool
