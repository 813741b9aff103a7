// What a peer says about its memory: blocks, pieces, segments, mappings, and handles of a GPU's allocations.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "metadata_kit.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST_CASE("peer metadata says which memory belongs to a GPU") {
  PeerMetadata metadata = sample_metadata();
  metadata.media[Medium::kHbm].kind = MemoryKind::kGpu;
  const Bytes bytes = written(metadata);
  WireReader in(bytes);
  const PeerMetadata read = read_metadata(in);
  CHECK(read.media[Medium::kHbm].kind == MemoryKind::kGpu);
  CHECK(read.media[Medium::kDram].kind == MemoryKind::kHost);
  check_refused("kind of a medium's memory is 2",
                [](PeerMetadata& other) { other.media[Medium::kHbm].kind = MemoryKind{2}; });
  check_refused("a medium without blocks has memory", [](PeerMetadata& other) {
    other.media[Medium::kHbm] = {};
    other.media[Medium::kHbm].kind = MemoryKind::kGpu;
  });
}

TEST_CASE("peer metadata with handles of a GPU's memory is read as it was written") {
  const PeerMetadata metadata = sample_gpu_metadata();
  const Bytes bytes = written(metadata);
  CHECK(bytes == forged(metadata));
  WireReader in(bytes);
  const PeerMetadata read = read_metadata(in);
  CHECK(in.left() == 0);
  REQUIRE(read.media[Medium::kHbm].allocations.size() == 2);
  CHECK(read.media[Medium::kDram].allocations.empty());
  CHECK(std::memcmp(read.media[Medium::kHbm].allocations.data(), metadata.media[Medium::kHbm].allocations.data(),
                    2 * sizeof(MetadataAllocation)) == 0);
  CHECK(has_handles(read));
  CHECK_FALSE(has_handles(sample_metadata()));
  CHECK(written(read) == bytes);
}

TEST_CASE("handles stand for memory that the segments lie in, each in one, and for no other memory") {
  const auto refused = [](const char* says, const std::function<void(MetadataMedium&)>& change) {
    check_refused(says, [&](PeerMetadata& metadata) { change(metadata.media[Medium::kHbm]); }, sample_gpu_metadata());
  };
  refused("a segment lies in no allocation", [](MetadataMedium& medium) { medium.allocations.pop_back(); });
  refused("a segment lies in no allocation", [](MetadataMedium& medium) { medium.allocations[1].bytes -= 1; });
  refused("a segment lies in no allocation", [](MetadataMedium& medium) { medium.segments[0].address -= 513; });
  // A segment that begins in one handle's memory and ends in another's cannot be opened.
  refused("a segment lies in no allocation",
          [](MetadataMedium& medium) { medium.segments[0].address = medium.allocations[1].address - 1; });
  refused("address of an allocation", [](MetadataMedium& medium) { medium.allocations[0].bytes += 1; });
  refused("address of an allocation",
          [](MetadataMedium& medium) { std::swap(medium.allocations[0], medium.allocations[1]); });
  refused("address of an allocation is 0", [](MetadataMedium& medium) { medium.allocations[0].address = 0; });
  refused("length of an allocation is 0", [](MetadataMedium& medium) { medium.allocations[1].bytes = 0; });
  refused("an allocation overflows", [](MetadataMedium& medium) { medium.allocations[1].bytes = ~0ULL; });
  refused("at most 8192", [](MetadataMedium& medium) { medium.allocations.resize(8193, medium.allocations[1]); });
  refused("passed in another way", [](MetadataMedium& medium) { medium.kind = MemoryKind::kHost; });
  refused("passed in another way", [](MetadataMedium& medium) { medium.mapped_bytes = std::uint64_t{1} << 30; });
  refused("a medium without blocks has memory", [](MetadataMedium& medium) {
    MetadataMedium empty;
    empty.allocations = medium.allocations;
    medium = empty;
  });
  check_refused(
      "the scheduler of a logical instance has memory",
      [](PeerMetadata& metadata) {
        metadata.media[Medium::kHbm].allocations = sample_gpu_metadata().media[Medium::kHbm].allocations;
      },
      sample_group_metadata());
}

TEST_CASE("a block has at least one piece, no empty one, and a sum of bytes that does not overflow") {
  check_refused("number of pieces of a block is 0", [](PeerMetadata& metadata) { metadata.piece_bytes = {}; });
  check_refused("at most 8192", [](PeerMetadata& metadata) { metadata.piece_bytes.assign(8193, 6); });
  check_refused("length of a piece is 0", [](PeerMetadata& metadata) { metadata.piece_bytes[3] = 0; });
  check_refused("block's pieces overflows",
                [](PeerMetadata& metadata) { metadata.piece_bytes[0] = metadata.piece_bytes[1] = 1ULL << 63; });
  check_refused("49153 bytes, and 49152 in a medium", [](PeerMetadata& metadata) {
    metadata.piece_bytes[0] += 1;
    metadata.format = {};
  });
}

TEST_CASE("a medium has blocks if and only if it has memory") {
  check_accepted([](PeerMetadata& metadata) { metadata.media[Medium::kHbm] = metadata.media[Medium::kDram] = {}; });
  check_accepted([](PeerMetadata& metadata) {
    metadata.media[Medium::kDram].blocks = kBlocksMax;
    for (MetadataSegment& segment : metadata.media[Medium::kDram].segments) segment.stride = 3072;
  });
  check_refused("number of blocks is 16777217",
                [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].blocks = kBlocksMax + 1; });
  check_refused("number of blocks on DISK is 32",
                [](PeerMetadata& metadata) { metadata.media[Medium::kDisk] = metadata.media[Medium::kDram]; });
  check_refused("without blocks has memory", [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].blocks = 0; });
  check_refused("without blocks has memory",
                [](PeerMetadata& metadata) { metadata.media[Medium::kHbm] = {0, 4096, {}}; });
  check_refused("number of segments is 0", [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].segments = {}; });
  check_refused("at most 8192",
                [](PeerMetadata& metadata) { metadata.media[Medium::kDram].segments.resize(8193, {4096, 4096, 1}); });
}

TEST_CASE("block addresses can be computed from segments without overflow") {
  const auto segment = [](MetadataSegment changed) {
    return [changed](PeerMetadata& metadata) { metadata.media[Medium::kDram] = {2, 0, {changed}}; };
  };
  constexpr std::uint64_t kBlock = 16 * 3072;
  check_accepted(segment({1, kBlock, kBlock}));
  check_accepted(segment({~0ULL - 2 * kBlock, kBlock, kBlock}));
  check_refused("a segment overflows", segment({~0ULL - 2 * kBlock + 1, kBlock, kBlock}));
  check_refused("a segment overflows", segment({1, 1ULL << 63, kBlock}));
  check_refused("a segment overflows", segment({1, ~0ULL, kBlock}));
  check_refused("address of a segment is 0", segment({0, kBlock, kBlock}));
  check_accepted(segment({1, kBlock - 1, kBlock}));  // blocks of a space lie at any unit
  check_accepted(segment({~0ULL - kBlock - 4096, 4096, kBlock}));
  check_refused("a segment overflows", segment({~0ULL - kBlock - 4096 + 1, 4096, kBlock}));
  check_refused("stride of a segment is 0", segment({1, 0, kBlock}));
  check_refused("length of a segment's piece is 0",
                [](PeerMetadata& metadata) { metadata.media[Medium::kDram].segments[0].bytes = 0; });
  // Two that overflow to the right sum.
  check_refused("sum of a medium's segments overflows", [](PeerMetadata& metadata) {
    metadata.media[Medium::kDram] = {
        1, 0, {{1, 1ULL << 63, 1ULL << 63}, {1, (1ULL << 63) + kBlock, (1ULL << 63) + kBlock}}};
  });
  check_refused("in a medium", segment({1, kBlock, kBlock - 1}));
}

TEST_CASE("blocks of a mapped medium lie within its memfd") {
  constexpr std::uint64_t kBase = 1 << 20;
  constexpr std::uint64_t kBlock = 16 * 3072;
  check_accepted([](PeerMetadata& metadata) { metadata.media[Medium::kHbm].mapped_bytes += 4096; });
  check_refused("in a mapping of 786431",
                [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].mapped_bytes -= 1; });
  check_refused("in a mapping of 1", [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].mapped_bytes = 1; });
  // The last piece may end where the mapping does, though its stride goes on.
  const auto two = [](std::uint64_t second, std::uint64_t mapped) {
    return [second, mapped](PeerMetadata& metadata) {
      metadata.media[Medium::kHbm] = {2, mapped, {{kBase, kBlock, kBlock / 2}, {second, kBlock, kBlock / 2}}};
    };
  };
  check_accepted(two(kBase + kBlock / 2, 2 * kBlock));
  check_refused("in a mapping of", two(kBase + kBlock / 2, 2 * kBlock - 1));
  check_refused("in a mapping of", two(1ULL << 60, 2 * kBlock));
  // A segment below the first one: its distance counts as well.
  check_refused("in a mapping of", two(kBase - kBlock, 2 * kBlock));
}
