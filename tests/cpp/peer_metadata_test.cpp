#include "kvpool/net/connect/peer_metadata.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "metadata_kit.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

using Change = std::function<void(PeerMetadata&)>;

// The bytes of peer metadata, without the checks of write_metadata: as an attacker writes them.
Bytes forged(const PeerMetadata& metadata) {
  Bytes out;
  WireWriter writer(out);
  writer.number(std::uint32_t{0})
      .number(metadata.instance)
      .number(metadata.incarnation)
      .number(metadata.pid)
      .number(metadata.block_tokens);
  writer.text(metadata.name).text(metadata.host).text(metadata.model).text(metadata.local_socket);
  writer.array(std::span<const std::uint64_t>(metadata.piece_bytes))
      .number(static_cast<std::uint32_t>(metadata.routes.size()));
  for (const std::string& route : metadata.routes) writer.text(route);
  for (const MetadataMedium& medium : metadata.media) {
    writer.number(medium.blocks).number(static_cast<std::uint8_t>(medium.kind)).number(medium.mapped_bytes);
    writer.array(std::span<const MetadataSegment>(medium.segments));
    writer.array(std::span<const MetadataAllocation>(medium.allocations));
  }
  writer.blob(metadata.ucx);
  writer.number(metadata.format.kv_heads).number(metadata.format.head_dim);
  writer.number(static_cast<std::uint8_t>(metadata.format.dtype));
  writer.number(static_cast<std::uint8_t>(metadata.format.tokens_first));
  writer.number(static_cast<std::uint8_t>(metadata.format.fused));
  writer.number(metadata.meeting)
      .number(metadata.rank_of)
      .number(metadata.rank)
      .text(metadata.address)
      .number(metadata.tp);
  writer.array(std::span<const std::uint32_t>(metadata.stage_layers));
  writer.number(static_cast<std::uint32_t>(metadata.ranks.size()));
  for (const MetadataRank& rank : metadata.ranks) writer.number(rank.rank).number(rank.incarnation).text(rank.address);
  return out;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kProtocol);
    return error.what();
  }
  return "nothing was refused";
}

// Neither side lets such peer metadata pass, and both say why.
void check_refused(const char* says, const Change& change, PeerMetadata metadata = sample_metadata()) {
  change(metadata);
  const Bytes bytes = forged(metadata);
  CAPTURE(says);
  WireReader in(bytes);
  const std::string at_reading = refusal([&] { read_metadata(in); });
  CHECK_MESSAGE(at_reading.find(says) != std::string::npos, at_reading);
  const std::string at_writing = refusal([&] { written(metadata); });
  CHECK_MESSAGE(at_writing.find("metadata of a peer") != std::string::npos, at_writing);
}

void check_accepted(const Change& change) {
  PeerMetadata metadata = sample_metadata();
  change(metadata);
  const Bytes bytes = written(metadata);
  WireReader in(bytes);
  CHECK_NOTHROW(read_metadata(in));
}

}  // namespace

TEST_CASE("peer metadata is read as it was written, to its last byte") {
  const PeerMetadata metadata = sample_metadata();
  const Bytes bytes = written(metadata);
  CHECK(bytes == forged(metadata));
  WireReader in(bytes);
  const PeerMetadata read = read_metadata(in);
  CHECK(in.left() == 0);
  CHECK(read.name == metadata.name);
  CHECK(read.instance == metadata.instance);
  CHECK(read.incarnation == metadata.incarnation);
  CHECK(read.pid == metadata.pid);
  CHECK(read.host == metadata.host);
  CHECK(read.block_tokens == metadata.block_tokens);
  CHECK(read.piece_bytes == metadata.piece_bytes);
  CHECK(read.model == metadata.model);
  CHECK(read.routes == metadata.routes);
  CHECK(read.local_socket == metadata.local_socket);
  CHECK(read.ucx == metadata.ucx);
  CHECK(read.meeting == 77);
  CHECK(read.rank_of == metadata.rank_of);
  CHECK(read.address == metadata.address);
  CHECK(read.media[Medium::kHbm].mapped_bytes == metadata.media[Medium::kHbm].mapped_bytes);
  REQUIRE(read.media[Medium::kDram].segments.size() == 16);
  CHECK(read.media[Medium::kDram].blocks == 32);
  CHECK(std::memcmp(read.media[Medium::kDram].segments.data(), metadata.media[Medium::kDram].segments.data(),
                    16 * sizeof(MetadataSegment)) == 0);
  CHECK(written(read) == bytes);
}

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

TEST_CASE("peer metadata that ends too early is refused at every byte") {
  for (const PeerMetadata& metadata : {sample_metadata(), sample_gpu_metadata()}) {
    const Bytes bytes = written(metadata);
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      WireReader in(std::span<const std::byte>(bytes).first(length));
      REQUIRE(refusal([&] { read_metadata(in); }) != "nothing was refused");
    }
  }
}

TEST_CASE("the largest peer metadata allowed fits a frame") {
  PeerMetadata metadata = sample_metadata();
  metadata.name.assign(kNameBytesMax, 'n');
  metadata.model.assign(kMetadataModelBytesMax, 'm');
  metadata.local_socket.assign(kMetadataLocalSocketBytesMax, 'd');
  metadata.ucx.assign(kMetadataUcxBytesMax, std::byte{1});
  metadata.piece_bytes.assign(kMetadataSegmentsMax, 64);
  metadata.format = {1, 2, DType::kBfloat16, false, false};
  for (MetadataMedium& medium : metadata.media)
    medium = {1, 0, std::vector<MetadataSegment>(kMetadataSegmentsMax, {64, 64, 64})};
  metadata.media[Medium::kDisk] = {};  // which may have nothing
  metadata.media[Medium::kHbm].kind = MemoryKind::kGpu;
  for (std::size_t i = 0; i < kMetadataAllocationsMax; ++i)
    metadata.media[Medium::kHbm].allocations.push_back({64 + 64 * i, 64, {}});
  const Bytes bytes = written(metadata);
  CHECK(bytes.size() < kMetadataBytesMax);
  WireReader in(bytes);
  CHECK(read_metadata(in).piece_bytes.size() == kMetadataSegmentsMax);
}

TEST_CASE("the metadata of a scheduler of several ranks is read as it was written") {
  const PeerMetadata metadata = sample_group_metadata();
  const Bytes bytes = written(metadata);
  CHECK(bytes == forged(metadata));
  WireReader in(bytes);
  const PeerMetadata read = read_metadata(in);
  CHECK(read.is_group());
  CHECK(read.tp == 2);
  CHECK(read.stage_layers == metadata.stage_layers);
  REQUIRE(read.ranks.size() == 2);
  CHECK(read.ranks[1].rank == 3);
  CHECK(read.ranks[1].incarnation == 0xABCE);
  CHECK(read.ranks[1].address == "tcp:10.0.0.2:1");
  CHECK(read.media[Medium::kDram].blocks == 32);
  CHECK(written(read) == bytes);
}

TEST_CASE("the parts of peer metadata about ranks agree with each other") {
  const auto group = [](const char* says, const Change& change) {
    check_refused(says, change, sample_group_metadata());
  };
  group("the scheduler of a logical instance has memory",
        [](PeerMetadata& metadata) { metadata.media[Medium::kHbm] = sample_metadata().media[Medium::kHbm]; });
  group("the scheduler of a logical instance has memory",
        [](PeerMetadata& metadata) { metadata.media[Medium::kHbm].mapped_bytes = 4096; });
  group("number of pipeline stages is 0", [](PeerMetadata& metadata) { metadata.stage_layers = {}; });
  group("number of ranks is 8194", [](PeerMetadata& metadata) { metadata.tp = 4097; });
  group("the rank is 4; it can be 0 to 3", [](PeerMetadata& metadata) { metadata.ranks[1].rank = 4; });
  group("its ranks are not in order", [](PeerMetadata& metadata) { metadata.ranks[1].rank = 1; });
  group("incarnation of a rank is 0", [](PeerMetadata& metadata) { metadata.ranks[0].incarnation = 0; });
  group("address of a rank has 0 bytes", [](PeerMetadata& metadata) { metadata.ranks[0].address = ""; });
  group("a rank has ranks", [](PeerMetadata& metadata) {
    metadata.rank_of = 1;
    metadata.address = "unix:@x";
  });
  check_refused("a pool of one rank names other ranks",
                [](PeerMetadata& metadata) { metadata.ranks = {{0, 1, "unix:@x"}}; });
  check_refused("a pool of one rank names other ranks", [](PeerMetadata& metadata) { metadata.stage_layers = {8}; });
  check_refused("address of a rank has 0 bytes", [](PeerMetadata& metadata) { metadata.address = ""; });
  check_refused("address of a rank is not printable", [](PeerMetadata& metadata) { metadata.address = "a\nb"; });
  check_refused("the rank is 4096", [](PeerMetadata& metadata) { metadata.rank = 4096; });
}

TEST_CASE("peer metadata's page format describes its pieces, or is absent") {
  for (const bool tokens_first : {false, true}) {
    for (std::uint8_t dtype = 1; dtype <= static_cast<std::uint8_t>(kDTypeMax); ++dtype) {
      PeerMetadata metadata = sample_metadata();
      metadata.format = {8, 24 / dtype_bytes(DType{dtype}), DType{dtype}, tokens_first, false};
      const Bytes split = written(metadata);
      WireReader in(split);
      CHECK(read_metadata(in).format == metadata.format);
      // As many bytes in as many pieces, of another content.
      metadata.format.head_dim /= 2;
      metadata.format.fused = true;
      const Bytes fused = written(metadata);
      WireReader again(fused);
      CHECK(read_metadata(again).format == metadata.format);
    }
  }
  check_accepted([](PeerMetadata& metadata) { metadata.format = {}; });
  check_refused("number of KV heads is 1048577",
                [](PeerMetadata& metadata) { metadata.format.kv_heads = (1U << 20) + 1; });
  check_refused("head dimension is 0", [](PeerMetadata& metadata) { metadata.format.head_dim = 0; });
  check_refused("element type is 0", [](PeerMetadata& metadata) { metadata.format.dtype = DType::kNone; });
  check_refused("element type is 8", [](PeerMetadata& metadata) { metadata.format.dtype = DType{8}; });
  check_refused("a piece has 3072 bytes, and by its page format 6144",
                [](PeerMetadata& metadata) { metadata.format.dtype = DType::kFloat32; });
  check_refused("by its page format 6144", [](PeerMetadata& metadata) { metadata.format.fused = true; });
  check_refused("by its page format 1536", [](PeerMetadata& metadata) { metadata.format.kv_heads = 4; });
  check_refused("15 pieces are no whole layers", [](PeerMetadata& metadata) {
    metadata.piece_bytes.resize(15);
    metadata.media[Medium::kHbm] = metadata.media[Medium::kDram] = {};
  });
  check_refused("raw bytes have a page format", [](PeerMetadata& metadata) { metadata.format.kv_heads = 0; });
  check_refused("raw bytes have a page format", [](PeerMetadata& metadata) {
    metadata.format = {};
    metadata.format.tokens_first = true;
  });
  PeerMetadata metadata = sample_metadata();
  for (const std::size_t behind : {1U, 2U}) {  // the flags: the last bytes of the format
    Bytes bytes = written(metadata);
    Bytes without;
    WireWriter tail(without);
    tail.number(metadata.meeting)
        .number(metadata.rank_of)
        .number(metadata.rank)
        .text(metadata.address)
        .number(metadata.tp);
    tail.number(std::uint64_t{0});  // two empty lists
    bytes[bytes.size() - without.size() - behind] = std::byte{2};
    WireReader in(bytes);
    CHECK(refusal([&] { read_metadata(in); }).find("is 2; it can be 0 to 1") != std::string::npos);
  }
}

TEST_CASE("a name is 1 to 255 bytes of printable UTF-8") {
  check_accepted([](PeerMetadata& metadata) { metadata.name = "x"; });
  check_accepted([](PeerMetadata& metadata) { metadata.name = "\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF\xC2\xA0"; });
  check_refused("the name has 0 bytes", [](PeerMetadata& metadata) { metadata.name = ""; });
  check_refused("256 bytes; at most 255", [](PeerMetadata& metadata) { metadata.name.assign(256, 'n'); });
  for (const std::string_view name :
       {std::string_view("line\nbreak"), std::string_view("\x1B[2J"), std::string_view("zero\0byte", 9),
        std::string_view("\x7F"), std::string_view("\xC2\x85"),              // control characters
        std::string_view("\xE2\x80\xA8"), std::string_view("\xE2\x80\xAE"),  // a line separator, right to left
        std::string_view("\x80"), std::string_view("\xC3"), std::string_view("\xFF"), std::string_view("\xC1\x81"),
        std::string_view("\xE0\x81\x81"),  // an A in too many bytes
        std::string_view("\xF0\x80\x81\x81"), std::string_view("\xED\xA0\x80"), std::string_view("\xF4\x90\x80\x80"),
        std::string_view("\xF8\x88\x80\x80\x80"), std::string_view("\xE2\x82"), std::string_view("\xE2\x28\xA1")}) {
    check_refused("the name is not printable", [&](PeerMetadata& metadata) { metadata.name = name; });
  }
}

TEST_CASE("other texts of peer metadata are checked too") {
  check_accepted([](PeerMetadata& metadata) { metadata.model = metadata.local_socket = ""; });
  check_refused("the host has 0 bytes", [](PeerMetadata& metadata) { metadata.host = ""; });
  check_refused("the host is not printable", [](PeerMetadata& metadata) { metadata.host = "a\tb"; });
  check_refused("the model is not printable", [](PeerMetadata& metadata) { metadata.model = "\x01"; });
  check_refused("at most 1024", [](PeerMetadata& metadata) { metadata.model.assign(1025, 'm'); });
  check_refused("the local socket is not printable", [](PeerMetadata& metadata) { metadata.local_socket = "\x9F"; });
  check_refused("at most 107", [](PeerMetadata& metadata) { metadata.local_socket.assign(108, 'd'); });
  check_refused("at most 262144", [](PeerMetadata& metadata) { metadata.ucx.resize(kMetadataUcxBytesMax + 1); });
}

TEST_CASE("routes are few, known by name and distinct") {
  check_accepted([](PeerMetadata& metadata) { metadata.routes = {}; });
  check_accepted([](PeerMetadata& metadata) { metadata.routes = {"one of a later version"}; });
  check_refused("named twice", [](PeerMetadata& metadata) { metadata.routes = {"shm", "sock", "shm"}; });
  check_refused("name of a route has 0", [](PeerMetadata& metadata) { metadata.routes = {""}; });
  check_refused("at most 32", [](PeerMetadata& metadata) { metadata.routes = {std::string(33, 'r')}; });
  check_refused("number of routes is 17", [](PeerMetadata& metadata) { metadata.routes.assign(17, "r"); });
}

TEST_CASE("codes of peer metadata are in their ranges") {
  check_accepted([](PeerMetadata& metadata) { metadata.instance = kInstanceMax; });
  check_refused("the instance is 0", [](PeerMetadata& metadata) { metadata.instance = 0; });
  check_refused("the instance is 16384", [](PeerMetadata& metadata) { metadata.instance = kInstanceMax + 1; });
  check_refused("the incarnation is 0", [](PeerMetadata& metadata) { metadata.incarnation = 0; });
  check_refused("the pid is 0", [](PeerMetadata& metadata) { metadata.pid = 0; });
  check_refused("the pid is 2147483648", [](PeerMetadata& metadata) { metadata.pid = 2147483648; });
  check_refused("the pid is 18446744073709551615", [](PeerMetadata& metadata) { metadata.pid = ~0ULL; });
  check_refused("number of tokens of a block is 0", [](PeerMetadata& metadata) { metadata.block_tokens = 0; });
  check_refused("number of tokens of a block is 65537", [](PeerMetadata& metadata) { metadata.block_tokens = 65537; });
  PeerMetadata metadata = sample_metadata();
  Bytes bytes = written(metadata);
  bytes[3] = std::byte{0x80};
  WireReader in(bytes);
  CHECK(refusal([&] { read_metadata(in); }).find("reserved bits") != std::string::npos);
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

TEST_CASE("a child process has the same host name, which is valid in peer metadata") {
  const std::string host = host_id();
  CHECK_FALSE(host.empty());
  CHECK(host_id() == host);
  check_accepted([&](PeerMetadata& metadata) { metadata.host = host; });
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(host_id() == host ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
