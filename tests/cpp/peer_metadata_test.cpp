// What a peer says about itself: what is written is read, and what cannot be is refused at both ends.
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
  const auto group = [](const char* says, const MetadataChange& change) {
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
