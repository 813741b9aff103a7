#include "kvpool/transport/card.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "card_kit.h"
#include "kvpool/base/address.h"
#include "kvpool/transport/meeting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

using Change = std::function<void(PeerCard&)>;

// The bytes of a card, without the checks of write_card: as somebody writes them who means harm.
Bytes forged(const PeerCard& card) {
  Bytes out;
  WireWriter writer(out);
  writer.number(std::uint32_t{0}).number(card.instance).number(card.epoch).number(card.pid).number(card.block_tokens);
  writer.text(card.name).text(card.host).text(card.model).text(card.door);
  writer.array(std::span<const std::uint64_t>(card.piece_bytes)).number(static_cast<std::uint32_t>(card.routes.size()));
  for (const std::string& route : card.routes) writer.text(route);
  for (const CardMedium& medium : card.media) {
    writer.number(medium.blocks).number(static_cast<std::uint8_t>(medium.kind)).number(medium.mapped_bytes);
    writer.array(std::span<const CardSegment>(medium.segments));
    writer.array(std::span<const CardAllocation>(medium.allocations));
  }
  writer.blob(card.ucx);
  writer.number(card.format.kv_heads).number(card.format.head_dim);
  writer.number(static_cast<std::uint8_t>(card.format.dtype));
  writer.number(static_cast<std::uint8_t>(card.format.tokens_first));
  writer.number(static_cast<std::uint8_t>(card.format.fused));
  writer.number(card.meeting).number(card.rank_of).number(card.rank).text(card.address).number(card.tp);
  writer.array(std::span<const std::uint32_t>(card.stage_layers));
  writer.number(static_cast<std::uint32_t>(card.ranks.size()));
  for (const CardRank& rank : card.ranks) writer.number(rank.rank).number(rank.epoch).text(rank.address);
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

// Neither side lets such a card pass, and both say why.
void check_refused(const char* says, const Change& change, PeerCard card = sample_card()) {
  change(card);
  const Bytes bytes = forged(card);
  CAPTURE(says);
  WireReader in(bytes);
  const std::string at_reading = refusal([&] { read_card(in); });
  CHECK_MESSAGE(at_reading.find(says) != std::string::npos, at_reading);
  const std::string at_writing = refusal([&] { written(card); });
  CHECK_MESSAGE(at_writing.find("card of a peer") != std::string::npos, at_writing);
}

void check_accepted(const Change& change) {
  PeerCard card = sample_card();
  change(card);
  const Bytes bytes = written(card);
  WireReader in(bytes);
  CHECK_NOTHROW(read_card(in));
}

}  // namespace

TEST_CASE("a card is read as it was written, to its last byte") {
  const PeerCard card = sample_card();
  const Bytes bytes = written(card);
  CHECK(bytes == forged(card));
  WireReader in(bytes);
  const PeerCard read = read_card(in);
  CHECK(in.left() == 0);
  CHECK(read.name == card.name);
  CHECK(read.instance == card.instance);
  CHECK(read.epoch == card.epoch);
  CHECK(read.pid == card.pid);
  CHECK(read.host == card.host);
  CHECK(read.block_tokens == card.block_tokens);
  CHECK(read.piece_bytes == card.piece_bytes);
  CHECK(read.model == card.model);
  CHECK(read.routes == card.routes);
  CHECK(read.door == card.door);
  CHECK(read.ucx == card.ucx);
  CHECK(read.meeting == 77);
  CHECK(read.rank_of == card.rank_of);
  CHECK(read.address == card.address);
  CHECK(read.media[0].mapped_bytes == card.media[0].mapped_bytes);
  REQUIRE(read.media[1].segments.size() == 16);
  CHECK(read.media[1].blocks == 32);
  CHECK(std::memcmp(read.media[1].segments.data(), card.media[1].segments.data(), 16 * sizeof(CardSegment)) == 0);
  CHECK(written(read) == bytes);
}

TEST_CASE("a card says which memory is a GPU's, and no other kind") {
  PeerCard card = sample_card();
  card.media[0].kind = MemoryKind::kGpu;
  const Bytes bytes = written(card);
  WireReader in(bytes);
  const PeerCard read = read_card(in);
  CHECK(read.media[0].kind == MemoryKind::kGpu);
  CHECK(read.media[1].kind == MemoryKind::kHost);
  check_refused("kind of a medium's memory is 2", [](PeerCard& other) { other.media[0].kind = MemoryKind{2}; });
  check_refused("a medium without blocks has memory", [](PeerCard& other) {
    other.media[0] = {};
    other.media[0].kind = MemoryKind::kGpu;
  });
}

TEST_CASE("a card with handles of a GPU's memory is read as it was written") {
  const PeerCard card = sample_gpu_card();
  const Bytes bytes = written(card);
  CHECK(bytes == forged(card));
  WireReader in(bytes);
  const PeerCard read = read_card(in);
  CHECK(in.left() == 0);
  REQUIRE(read.media[0].allocations.size() == 2);
  CHECK(read.media[1].allocations.empty());
  CHECK(std::memcmp(read.media[0].allocations.data(), card.media[0].allocations.data(), 2 * sizeof(CardAllocation)) ==
        0);
  CHECK(has_handles(read));
  CHECK_FALSE(has_handles(sample_card()));
  CHECK(written(read) == bytes);
}

TEST_CASE("handles are of memory that the segments lie in, each in one, and of no other kind") {
  const auto refused = [](const char* says, const std::function<void(CardMedium&)>& change) {
    check_refused(says, [&](PeerCard& card) { change(card.media[0]); }, sample_gpu_card());
  };
  refused("a segment lies in no allocation", [](CardMedium& medium) { medium.allocations.pop_back(); });
  refused("a segment lies in no allocation", [](CardMedium& medium) { medium.allocations[1].bytes -= 1; });
  refused("a segment lies in no allocation", [](CardMedium& medium) { medium.segments[0].address -= 513; });
  // What begins in the one and ends in the other cannot be opened as it lies.
  refused("a segment lies in no allocation",
          [](CardMedium& medium) { medium.segments[0].address = medium.allocations[1].address - 1; });
  refused("address of an allocation", [](CardMedium& medium) { medium.allocations[0].bytes += 1; });
  refused("address of an allocation",
          [](CardMedium& medium) { std::swap(medium.allocations[0], medium.allocations[1]); });
  refused("address of an allocation is 0", [](CardMedium& medium) { medium.allocations[0].address = 0; });
  refused("length of an allocation is 0", [](CardMedium& medium) { medium.allocations[1].bytes = 0; });
  refused("an allocation overflows", [](CardMedium& medium) { medium.allocations[1].bytes = ~0ULL; });
  refused("at most 8192", [](CardMedium& medium) { medium.allocations.resize(8193, medium.allocations[1]); });
  refused("passed in another way", [](CardMedium& medium) { medium.kind = MemoryKind::kHost; });
  refused("passed in another way", [](CardMedium& medium) { medium.mapped_bytes = std::uint64_t{1} << 30; });
  refused("a medium without blocks has memory", [](CardMedium& medium) {
    CardMedium empty;
    empty.allocations = medium.allocations;
    medium = empty;
  });
  check_refused(
      "a logical instance has memory of its own",
      [](PeerCard& card) { card.media[0].allocations = sample_gpu_card().media[0].allocations; }, sample_group_card());
}

TEST_CASE("a card that ends too early is refused at every byte") {
  for (const PeerCard& card : {sample_card(), sample_gpu_card()}) {
    const Bytes bytes = written(card);
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      WireReader in(std::span<const std::byte>(bytes).first(length));
      REQUIRE(refusal([&] { read_card(in); }) != "nothing was refused");
    }
  }
}

TEST_CASE("what a card may have at most fits a frame") {
  PeerCard card = sample_card();
  card.name.assign(kNameBytesMax, 'n');
  card.model.assign(kCardModelBytesMax, 'm');
  card.door.assign(kCardDoorBytesMax, 'd');
  card.ucx.assign(kCardUcxBytesMax, std::byte{1});
  card.piece_bytes.assign(kCardSegmentsMax, 64);
  card.format = {1, 2, DType::kBfloat16, false, false};
  for (CardMedium& medium : card.media) medium = {1, 0, std::vector<CardSegment>(kCardSegmentsMax, {64, 64, 64})};
  card.media[0].kind = MemoryKind::kGpu;
  for (std::size_t i = 0; i < kCardAllocationsMax; ++i) card.media[0].allocations.push_back({64 + 64 * i, 64, {}});
  const Bytes bytes = written(card);
  CHECK(bytes.size() < kCardBytesMax);
  WireReader in(bytes);
  CHECK(read_card(in).piece_bytes.size() == kCardSegmentsMax);
}

TEST_CASE("the card of a scheduler of several ranks is read as it was written") {
  const PeerCard card = sample_group_card();
  const Bytes bytes = written(card);
  CHECK(bytes == forged(card));
  WireReader in(bytes);
  const PeerCard read = read_card(in);
  CHECK(read.is_group());
  CHECK(read.tp == 2);
  CHECK(read.stage_layers == card.stage_layers);
  REQUIRE(read.ranks.size() == 2);
  CHECK(read.ranks[1].rank == 3);
  CHECK(read.ranks[1].epoch == 0xABCE);
  CHECK(read.ranks[1].address == "tcp:10.0.0.2:1");
  CHECK(read.media[1].blocks == 32);
  CHECK(written(read) == bytes);
}

TEST_CASE("what a card says of ranks fits together") {
  const auto group = [](const char* says, const Change& change) { check_refused(says, change, sample_group_card()); };
  group("a logical instance has memory of its own", [](PeerCard& card) { card.media[0] = sample_card().media[0]; });
  group("a logical instance has memory of its own", [](PeerCard& card) { card.media[0].mapped_bytes = 4096; });
  group("number of pipeline stages is 0", [](PeerCard& card) { card.stage_layers = {}; });
  group("number of ranks is 8194", [](PeerCard& card) { card.tp = 4097; });
  group("the rank is 4; it can be 0 to 3", [](PeerCard& card) { card.ranks[1].rank = 4; });
  group("its ranks are not in order", [](PeerCard& card) { card.ranks[1].rank = 1; });
  group("epoch of a rank is 0", [](PeerCard& card) { card.ranks[0].epoch = 0; });
  group("address of a rank has 0 bytes", [](PeerCard& card) { card.ranks[0].address = ""; });
  group("a rank has ranks", [](PeerCard& card) {
    card.rank_of = 1;
    card.address = "unix:@x";
  });
  check_refused("a pool of one rank names other ranks", [](PeerCard& card) { card.ranks = {{0, 1, "unix:@x"}}; });
  check_refused("a pool of one rank names other ranks", [](PeerCard& card) { card.stage_layers = {8}; });
  check_refused("address of a rank has 0 bytes", [](PeerCard& card) { card.address = ""; });
  check_refused("address of a rank is not printable", [](PeerCard& card) { card.address = "a\nb"; });
  check_refused("the rank is 4096", [](PeerCard& card) { card.rank = 4096; });
}

TEST_CASE("a card's page format describes its pieces, or nothing at all") {
  for (const bool tokens_first : {false, true}) {
    for (std::uint8_t dtype = 1; dtype <= static_cast<std::uint8_t>(kDTypeMax); ++dtype) {
      PeerCard card = sample_card();
      card.format = {8, 24 / dtype_bytes(DType{dtype}), DType{dtype}, tokens_first, false};
      const Bytes split = written(card);
      WireReader in(split);
      CHECK(read_card(in).format == card.format);
      // As many bytes in as many pieces, of another content.
      card.format.head_dim /= 2;
      card.format.fused = true;
      const Bytes fused = written(card);
      WireReader again(fused);
      CHECK(read_card(again).format == card.format);
    }
  }
  check_accepted([](PeerCard& card) { card.format = {}; });
  check_refused("number of KV heads is 1048577", [](PeerCard& card) { card.format.kv_heads = (1U << 20) + 1; });
  check_refused("head dimension is 0", [](PeerCard& card) { card.format.head_dim = 0; });
  check_refused("element type is 0", [](PeerCard& card) { card.format.dtype = DType::kNone; });
  check_refused("element type is 8", [](PeerCard& card) { card.format.dtype = DType{8}; });
  check_refused("a piece has 3072 bytes, and by its page format 6144",
                [](PeerCard& card) { card.format.dtype = DType::kFloat32; });
  check_refused("by its page format 6144", [](PeerCard& card) { card.format.fused = true; });
  check_refused("by its page format 1536", [](PeerCard& card) { card.format.kv_heads = 4; });
  check_refused("15 pieces are no whole layers", [](PeerCard& card) {
    card.piece_bytes.resize(15);
    card.media[0] = card.media[1] = {};
  });
  check_refused("raw bytes have a page format", [](PeerCard& card) { card.format.kv_heads = 0; });
  check_refused("raw bytes have a page format", [](PeerCard& card) {
    card.format = {};
    card.format.tokens_first = true;
  });
  PeerCard card = sample_card();
  for (const std::size_t behind : {1U, 2U}) {  // the flags: the last bytes of the format
    Bytes bytes = written(card);
    Bytes without;
    WireWriter tail(without);
    tail.number(card.meeting).number(card.rank_of).number(card.rank).text(card.address).number(card.tp);
    tail.number(std::uint64_t{0});  // two empty lists
    bytes[bytes.size() - without.size() - behind] = std::byte{2};
    WireReader in(bytes);
    CHECK(refusal([&] { read_card(in); }).find("is 2; it can be 0 to 1") != std::string::npos);
  }
}

TEST_CASE("a name is 1 to 255 bytes of UTF-8 that can be shown") {
  check_accepted([](PeerCard& card) { card.name = "x"; });
  check_accepted([](PeerCard& card) { card.name = "\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF\xC2\xA0"; });
  check_refused("the name has 0 bytes", [](PeerCard& card) { card.name = ""; });
  check_refused("256 bytes; at most 255", [](PeerCard& card) { card.name.assign(256, 'n'); });
  for (const std::string_view name :
       {std::string_view("line\nbreak"), std::string_view("\x1B[2J"), std::string_view("zero\0byte", 9),
        std::string_view("\x7F"), std::string_view("\xC2\x85"),              // control characters
        std::string_view("\xE2\x80\xA8"), std::string_view("\xE2\x80\xAE"),  // a line separator, right to left
        std::string_view("\x80"), std::string_view("\xC3"), std::string_view("\xFF"), std::string_view("\xC1\x81"),
        std::string_view("\xE0\x81\x81"),  // an A in too many bytes
        std::string_view("\xF0\x80\x81\x81"), std::string_view("\xED\xA0\x80"), std::string_view("\xF4\x90\x80\x80"),
        std::string_view("\xF8\x88\x80\x80\x80"), std::string_view("\xE2\x82"), std::string_view("\xE2\x28\xA1")}) {
    check_refused("the name is not printable", [&](PeerCard& card) { card.name = name; });
  }
}

TEST_CASE("the other texts of a card are checked too") {
  check_accepted([](PeerCard& card) { card.model = card.door = ""; });
  check_refused("the host has 0 bytes", [](PeerCard& card) { card.host = ""; });
  check_refused("the host is not printable", [](PeerCard& card) { card.host = "a\tb"; });
  check_refused("the model is not printable", [](PeerCard& card) { card.model = "\x01"; });
  check_refused("at most 1024", [](PeerCard& card) { card.model.assign(1025, 'm'); });
  check_refused("the door is not printable", [](PeerCard& card) { card.door = "\x9F"; });
  check_refused("at most 107", [](PeerCard& card) { card.door.assign(108, 'd'); });
  check_refused("at most 262144", [](PeerCard& card) { card.ucx.resize(kCardUcxBytesMax + 1); });
}

TEST_CASE("routes are few, named and different") {
  check_accepted([](PeerCard& card) { card.routes = {}; });
  check_accepted([](PeerCard& card) { card.routes = {"one of a later version"}; });
  check_refused("named twice", [](PeerCard& card) { card.routes = {"shm", "sock", "shm"}; });
  check_refused("name of a route has 0", [](PeerCard& card) { card.routes = {""}; });
  check_refused("at most 32", [](PeerCard& card) { card.routes = {std::string(33, 'r')}; });
  check_refused("number of routes is 17", [](PeerCard& card) { card.routes.assign(17, "r"); });
}

TEST_CASE("numbers that stand for something are in its range") {
  check_accepted([](PeerCard& card) { card.instance = kInstanceMax; });
  check_refused("the instance is 0", [](PeerCard& card) { card.instance = 0; });
  check_refused("the instance is 16384", [](PeerCard& card) { card.instance = kInstanceMax + 1; });
  check_refused("the epoch is 0", [](PeerCard& card) { card.epoch = 0; });
  check_refused("the pid is 0", [](PeerCard& card) { card.pid = 0; });
  check_refused("the pid is 2147483648", [](PeerCard& card) { card.pid = 2147483648; });
  check_refused("the pid is 18446744073709551615", [](PeerCard& card) { card.pid = ~0ULL; });
  check_refused("number of tokens of a block is 0", [](PeerCard& card) { card.block_tokens = 0; });
  check_refused("number of tokens of a block is 65537", [](PeerCard& card) { card.block_tokens = 65537; });
  PeerCard card = sample_card();
  Bytes bytes = written(card);
  bytes[3] = std::byte{0x80};
  WireReader in(bytes);
  CHECK(refusal([&] { read_card(in); }).find("reserved bits") != std::string::npos);
}

TEST_CASE("a block has at least one piece, none of them empty, and a sum") {
  check_refused("number of pieces of a block is 0", [](PeerCard& card) { card.piece_bytes = {}; });
  check_refused("at most 8192", [](PeerCard& card) { card.piece_bytes.assign(8193, 6); });
  check_refused("length of a piece is 0", [](PeerCard& card) { card.piece_bytes[3] = 0; });
  check_refused("block's pieces overflows",
                [](PeerCard& card) { card.piece_bytes[0] = card.piece_bytes[1] = 1ULL << 63; });
  check_refused("49153 bytes, and 49152 in a medium", [](PeerCard& card) {
    card.piece_bytes[0] += 1;
    card.format = {};
  });
}

TEST_CASE("a medium's blocks and memory go together") {
  check_accepted([](PeerCard& card) { card.media[0] = card.media[1] = {}; });
  check_accepted([](PeerCard& card) {
    card.media[1].blocks = kBlocksMax;
    for (CardSegment& segment : card.media[1].segments) segment.stride = 3072;
  });
  check_refused("number of blocks is 16777217", [](PeerCard& card) { card.media[0].blocks = kBlocksMax + 1; });
  check_refused("without blocks has memory", [](PeerCard& card) { card.media[0].blocks = 0; });
  check_refused("without blocks has memory", [](PeerCard& card) { card.media[0] = {0, 4096, {}}; });
  check_refused("number of segments is 0", [](PeerCard& card) { card.media[0].segments = {}; });
  check_refused("at most 8192", [](PeerCard& card) { card.media[1].segments.resize(8193, {4096, 4096, 1}); });
}

TEST_CASE("segments are what block addresses can be computed from without overflow") {
  const auto segment = [](CardSegment changed) {
    return [changed](PeerCard& card) { card.media[1] = {2, 0, {changed}}; };
  };
  constexpr std::uint64_t kBlock = 16 * 3072;
  check_accepted(segment({1, kBlock, kBlock}));
  check_accepted(segment({~0ULL - 2 * kBlock, kBlock, kBlock}));
  check_refused("a segment overflows", segment({~0ULL - 2 * kBlock + 1, kBlock, kBlock}));
  check_refused("a segment overflows", segment({1, 1ULL << 63, kBlock}));
  check_refused("a segment overflows", segment({1, ~0ULL, kBlock}));
  check_refused("address of a segment is 0", segment({0, kBlock, kBlock}));
  check_refused("stride of a segment is 49151", segment({1, kBlock - 1, kBlock}));
  check_refused("stride of a segment is 0", segment({1, 0, kBlock}));
  check_refused("length of a segment's piece is 0", [](PeerCard& card) { card.media[1].segments[0].bytes = 0; });
  // Two that overflow to the right sum.
  check_refused("sum of a medium's segments overflows", [](PeerCard& card) {
    card.media[1] = {1, 0, {{1, 1ULL << 63, 1ULL << 63}, {1, (1ULL << 63) + kBlock, (1ULL << 63) + kBlock}}};
  });
  check_refused("in a medium", segment({1, kBlock, kBlock - 1}));
}

TEST_CASE("blocks of a mapped medium lie within its memfd") {
  constexpr std::uint64_t kBase = 1 << 20;
  constexpr std::uint64_t kBlock = 16 * 3072;
  check_accepted([](PeerCard& card) { card.media[0].mapped_bytes += 4096; });
  check_refused("in a mapping of 786431", [](PeerCard& card) { card.media[0].mapped_bytes -= 1; });
  check_refused("in a mapping of 1", [](PeerCard& card) { card.media[0].mapped_bytes = 1; });
  // The last piece may end where the mapping does, though its stride goes on.
  const auto two = [](std::uint64_t second, std::uint64_t mapped) {
    return [second, mapped](PeerCard& card) {
      card.media[0] = {2, mapped, {{kBase, kBlock, kBlock / 2}, {second, kBlock, kBlock / 2}}};
    };
  };
  check_accepted(two(kBase + kBlock / 2, 2 * kBlock));
  check_refused("in a mapping of", two(kBase + kBlock / 2, 2 * kBlock - 1));
  check_refused("in a mapping of", two(1ULL << 60, 2 * kBlock));
  // A segment below the first one: its distance counts as well.
  check_refused("in a mapping of", two(kBase - kBlock, 2 * kBlock));
}

TEST_CASE("the host is the same for a child process, and can stand on a card") {
  const std::string host = host_id();
  CHECK_FALSE(host.empty());
  CHECK(host_id() == host);
  check_accepted([&](PeerCard& card) { card.host = host; });
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(host_id() == host ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
