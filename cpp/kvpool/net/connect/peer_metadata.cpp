#include "kvpool/net/connect/peer_metadata.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string_view>

#include "kvpool/base/address.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kPidMax = INT32_MAX;

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "the metadata of a peer is malformed: " + what);
}

// a + b * c, or nothing when it does not fit.
std::uint64_t add_product(std::uint64_t a, std::uint64_t b, std::uint64_t c, const char* what) {
  std::uint64_t product;
  std::uint64_t sum;
  if (__builtin_mul_overflow(b, c, &product) || __builtin_add_overflow(a, product, &sum)) {
    fail(std::string(what) + " overflows");
  }
  return sum;
}

// ---- texts

// Takes one character of UTF-8 off the front; 0 when that is no character, or one in more bytes than it needs.
char32_t take_character(std::string_view& text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t length = first < 0x80 ? 1 : first >> 5 == 6 ? 2 : first >> 4 == 14 ? 3 : first >> 3 == 30 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  char32_t character = length == 1 ? first : first & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
    character = character << 6 | (byte(i) & 0x3FU);
  }
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (character < kLeast[length] || character > 0x10FFFF || (character >= 0xD800 && character <= 0xDFFF)) return 0;
  text.remove_prefix(length);
  return character;
}

// Names end up in logs and on terminals: no control characters, and nothing that turns the direction of writing.
bool printable(char32_t character) noexcept {
  const bool control = character < 0x20 || (character >= 0x7F && character < 0xA0);
  const bool breaks_line = character == 0x2028 || character == 0x2029;
  const bool turns = (character >= 0x202A && character <= 0x202E) || (character >= 0x2066 && character <= 0x2069);
  return !control && !breaks_line && !turns;
}

void check_text(std::string_view text, std::size_t bytes_min, std::size_t bytes_max, const char* what) {
  if (text.size() < bytes_min || text.size() > bytes_max) {
    fail(std::string("the ") + what + " has " + std::to_string(text.size()) + " bytes; it can have " +
         std::to_string(bytes_min) + " to " + std::to_string(bytes_max));
  }
  while (!text.empty()) {
    if (!printable(take_character(text))) fail(std::string("the ") + what + " is not printable UTF-8");
  }
}

// ---- numbers

void check_range(std::uint64_t value, std::uint64_t min, std::uint64_t max, const char* what) {
  if (value < min || value > max) {
    fail(std::string("the ") + what + " is " + std::to_string(value) + "; it can be " + std::to_string(min) + " to " +
         std::to_string(max));
  }
}

std::uint64_t check_pieces(const std::vector<std::uint64_t>& piece_bytes) {
  check_range(piece_bytes.size(), 1, kMetadataSegmentsMax, "number of pieces of a block");
  std::uint64_t block_bytes = 0;
  for (const std::uint64_t bytes : piece_bytes) {
    check_range(bytes, 1, UINT64_MAX, "length of a piece");
    block_bytes = add_product(block_bytes, bytes, 1, "the sum of a block's pieces");
  }
  return block_bytes;
}

// All pieces of a segment's blocks: [address, end of it). REQUIRES: blocks > 0.
std::uint64_t check_segment(const MetadataSegment& segment, std::uint32_t blocks) {
  check_range(segment.bytes, 1, UINT64_MAX, "length of a segment's piece");
  check_range(segment.stride, 1, UINT64_MAX, "stride of a segment");
  check_range(segment.address, 1, UINT64_MAX, "address of a segment");
  add_product(segment.address, segment.stride, blocks, "a segment");
  return add_product(segment.address + segment.stride * (blocks - 1), segment.bytes, 1, "a segment");
}

// One past the end of the memory of this medium that the address lies in; 0: in none. REQUIRES: they have been checked.
std::uint64_t allocation_end(const MetadataMedium& medium, std::uint64_t address) noexcept {
  const auto after = std::ranges::upper_bound(medium.allocations, address, {}, &MetadataAllocation::address);
  if (after == medium.allocations.begin()) return 0;
  const MetadataAllocation& found = *std::prev(after);
  return address - found.address < found.bytes ? found.address + found.bytes : 0;
}

void check_allocations(const MetadataMedium& medium) {
  check_range(medium.allocations.size(), 0, kMetadataAllocationsMax, "number of allocations");
  if (medium.allocations.empty()) return;
  if (medium.kind != MemoryKind::kGpu || medium.mapped_bytes != 0) {
    fail("allocations of a medium that is passed in another way");
  }
  std::uint64_t end = 1;
  for (const MetadataAllocation& allocation : medium.allocations) {
    check_range(allocation.address, end, UINT64_MAX, "address of an allocation");
    check_range(allocation.bytes, 1, UINT64_MAX, "length of an allocation");
    end = add_product(allocation.address, allocation.bytes, 1, "an allocation");
  }
  for (const MetadataSegment& segment : medium.segments) {
    if (check_segment(segment, medium.blocks) > allocation_end(medium, segment.address)) {
      fail("a segment lies in no allocation");
    }
  }
}

// The scheduler of a logical instance counts blocks; their memory is its ranks'.
bool has_memory(const MetadataMedium& medium) noexcept {
  return !medium.segments.empty() || medium.mapped_bytes != 0 || medium.kind != MemoryKind::kHost ||
         !medium.allocations.empty();
}

void check_kind(std::uint8_t kind) {
  check_range(kind, 0, static_cast<std::uint8_t>(MemoryKind::kGpu), "kind of a medium's memory");
}

void check_medium(const MetadataMedium& medium, std::uint64_t block_bytes, bool group) {
  check_kind(static_cast<std::uint8_t>(medium.kind));
  check_range(medium.blocks, 0, kBlocksMax, "number of blocks");
  if (group || medium.blocks == 0) {
    if (!has_memory(medium)) return;
    fail(group ? "the scheduler of a logical instance has memory" : "a medium without blocks has memory");
  }
  check_range(medium.segments.size(), 1, kMetadataSegmentsMax, "number of segments");
  std::uint64_t segments_bytes = 0;
  std::uint64_t lowest = UINT64_MAX;
  std::uint64_t end = 0;
  for (const MetadataSegment& segment : medium.segments) {
    end = std::max(end, check_segment(segment, medium.blocks));
    lowest = std::min(lowest, segment.address);
    segments_bytes = add_product(segments_bytes, segment.bytes, 1, "the sum of a medium's segments");
  }
  if (segments_bytes != block_bytes) {
    fail("a block has " + std::to_string(block_bytes) + " bytes, and " + std::to_string(segments_bytes) +
         " in a medium");
  }
  if (medium.mapped_bytes != 0 && end - lowest > medium.mapped_bytes) {
    fail("segments of " + std::to_string(end - lowest) + " bytes in a mapping of " +
         std::to_string(medium.mapped_bytes));
  }
  check_allocations(medium);
}

void check_routes(const std::vector<std::string>& routes) {
  check_range(routes.size(), 0, kMetadataRoutesMax, "number of routes");
  for (std::size_t i = 0; i < routes.size(); ++i) {
    check_text(routes[i], 1, kMetadataRouteBytesMax, "name of a route");
    if (std::find(routes.begin(), routes.begin() + static_cast<std::ptrdiff_t>(i), routes[i]) !=
        routes.begin() + static_cast<std::ptrdiff_t>(i)) {
      fail("the route " + routes[i] + " is named twice");
    }
  }
}

void check_flag(std::uint8_t value, const char* what) { check_range(value, 0, 1, what); }

void check_dtype(std::uint8_t dtype) { check_range(dtype, 0, static_cast<std::uint8_t>(kDTypeMax), "element type"); }

// The format says how long a piece is, and must not contradict the pieces. REQUIRES: the pieces, the tokens of a block
// and the dtype have been checked.
void check_format(const PeerMetadata& metadata) {
  const PageFormat& format = metadata.format;
  if (!format.known()) {
    if (format != PageFormat{}) fail("blocks of raw bytes have a page format");
    return;
  }
  check_range(format.kv_heads, 1, kMetadataShapeMax, "number of KV heads");
  check_range(format.head_dim, 1, kMetadataShapeMax, "head dimension");
  check_range(static_cast<std::uint64_t>(format.dtype), 1, static_cast<std::uint64_t>(kDTypeMax), "element type");
  if (metadata.piece_bytes.size() % format.pieces_per_layer() != 0) {
    fail(std::to_string(metadata.piece_bytes.size()) + " pieces are no whole layers");
  }
  // At most 2^20 heads of rows of 2^23 bytes, for 2^16 tokens: it fits 64 bits.
  const std::uint64_t piece = std::uint64_t{format.kv_heads} * format.row_bytes() * metadata.block_tokens;
  for (const std::uint64_t bytes : metadata.piece_bytes) {
    if (bytes != piece) {
      fail("a piece has " + std::to_string(bytes) + " bytes, and by its page format " + std::to_string(piece));
    }
  }
}

void check_ranks(const PeerMetadata& metadata) {
  check_range(metadata.rank, 0, kMetadataRanksMax - 1, "rank");
  check_text(metadata.address, metadata.rank_of == 0 ? 0 : 1, kMetadataAddressBytesMax, "address of a rank");
  if (metadata.rank_of != 0 && metadata.is_group()) fail("a rank has ranks");
  if (!metadata.is_group()) {
    if (!metadata.stage_layers.empty() || !metadata.ranks.empty()) fail("a pool of one rank names other ranks");
    return;
  }
  check_range(metadata.stage_layers.size(), 1, kMetadataRanksMax, "number of pipeline stages");
  check_range(std::uint64_t{metadata.tp} * metadata.stage_layers.size(), 1, kMetadataRanksMax, "number of ranks");
  for (std::size_t i = 0; i < metadata.ranks.size(); ++i) {
    const MetadataRank& rank = metadata.ranks[i];
    check_range(rank.rank, 0, metadata.tp * metadata.stage_layers.size() - 1, "rank");
    if (i > 0 && rank.rank <= metadata.ranks[i - 1].rank) fail("its ranks are not in order");
    check_range(rank.incarnation, 1, UINT64_MAX, "incarnation of a rank");
    check_text(rank.address, 1, kMetadataAddressBytesMax, "address of a rank");
  }
}

void check_metadata(const PeerMetadata& metadata) {
  check_text(metadata.name, 1, kNameBytesMax, "name");
  check_text(metadata.host, 1, kNameBytesMax, "host");
  check_text(metadata.model, 0, kMetadataModelBytesMax, "model");
  check_text(metadata.local_socket, 0, kMetadataLocalSocketBytesMax, "local socket");
  check_range(metadata.instance, 1, kInstanceMax, "instance");
  check_range(metadata.incarnation, 1, UINT64_MAX, "incarnation");
  check_range(metadata.pid, 1, kPidMax, "pid");
  check_range(metadata.block_tokens, 1, kMetadataBlockTokensMax, "number of tokens of a block");
  check_range(metadata.ucx.size(), 0, kMetadataUcxBytesMax, "length of the UCX part");
  check_routes(metadata.routes);
  const std::uint64_t block_bytes = check_pieces(metadata.piece_bytes);
  check_format(metadata);
  for (const MetadataMedium& medium : metadata.media) check_medium(medium, block_bytes, metadata.is_group());
  // No release keeps blocks there.
  check_range(metadata.media[Medium::kDisk].blocks, 0, 0, "number of blocks on DISK");
  check_ranks(metadata);
}

MetadataMedium read_medium(WireReader& in) {
  MetadataMedium medium;
  medium.blocks = in.number<std::uint32_t>();
  const auto kind = in.number<std::uint8_t>();
  check_kind(kind);
  medium.kind = static_cast<MemoryKind>(kind);
  medium.mapped_bytes = in.number<std::uint64_t>();
  medium.segments = in.array<MetadataSegment>(kMetadataSegmentsMax);
  medium.allocations = in.array<MetadataAllocation>(kMetadataAllocationsMax);
  return medium;
}

void write_format(const PageFormat& format, WireWriter& out) {
  out.number(format.kv_heads).number(format.head_dim).number(static_cast<std::uint8_t>(format.dtype));
  out.number(static_cast<std::uint8_t>(format.tokens_first)).number(static_cast<std::uint8_t>(format.fused));
}

PageFormat read_format(WireReader& in) {
  PageFormat format;
  format.kv_heads = in.number<std::uint32_t>();
  format.head_dim = in.number<std::uint32_t>();
  const auto dtype = in.number<std::uint8_t>();
  check_dtype(dtype);
  format.dtype = static_cast<DType>(dtype);
  const auto tokens_first = in.number<std::uint8_t>();
  check_flag(tokens_first, "order of heads and tokens");
  format.tokens_first = tokens_first == 1;
  const auto fused = in.number<std::uint8_t>();
  check_flag(fused, "page format");
  format.fused = fused == 1;
  return format;
}

void write_ranks(const PeerMetadata& metadata, WireWriter& out) {
  out.number(metadata.meeting)
      .number(metadata.rank_of)
      .number(metadata.rank)
      .text(metadata.address)
      .number(metadata.tp);
  out.array(std::span<const std::uint32_t>(metadata.stage_layers));
  out.number(static_cast<std::uint32_t>(metadata.ranks.size()));
  for (const MetadataRank& rank : metadata.ranks) out.number(rank.rank).number(rank.incarnation).text(rank.address);
}

void read_ranks(WireReader& in, PeerMetadata& metadata) {
  metadata.meeting = in.number<std::uint64_t>();
  metadata.rank_of = in.number<std::uint64_t>();
  metadata.rank = in.number<std::uint32_t>();
  metadata.address = in.text(kMetadataAddressBytesMax);
  metadata.tp = in.number<std::uint32_t>();
  metadata.stage_layers = in.array<std::uint32_t>(kMetadataRanksMax);
  const auto ranks = in.number<std::uint32_t>();
  check_range(ranks, 0, kMetadataRanksMax, "number of ranks");
  for (std::uint32_t i = 0; i < ranks; ++i) {
    MetadataRank rank;
    rank.rank = in.number<std::uint32_t>();
    rank.incarnation = in.number<std::uint64_t>();
    rank.address = in.text(kMetadataAddressBytesMax);
    metadata.ranks.push_back(std::move(rank));
  }
}

}  // namespace

void write_metadata(const PeerMetadata& metadata, WireWriter& out) {
  static_assert(sizeof(MetadataSegment) == 24 && sizeof(MetadataAllocation) == 80,
                "no padding: they go out as they are");
  check_metadata(metadata);
  out.number(std::uint32_t{0})
      .number(metadata.instance)
      .number(metadata.incarnation)
      .number(metadata.pid)
      .number(metadata.block_tokens);
  out.text(metadata.name).text(metadata.host).text(metadata.model).text(metadata.local_socket);
  out.array(std::span<const std::uint64_t>(metadata.piece_bytes));
  out.number(static_cast<std::uint32_t>(metadata.routes.size()));
  for (const std::string& route : metadata.routes) out.text(route);
  for (const MetadataMedium& medium : metadata.media) {
    out.number(medium.blocks).number(static_cast<std::uint8_t>(medium.kind)).number(medium.mapped_bytes);
    out.array(std::span<const MetadataSegment>(medium.segments));
    out.array(std::span<const MetadataAllocation>(medium.allocations));
  }
  out.blob(metadata.ucx);
  write_format(metadata.format, out);
  write_ranks(metadata, out);
}

PeerMetadata read_metadata(WireReader& in) {
  if (in.number<std::uint32_t>() != 0) fail("reserved bits are set");
  PeerMetadata metadata;
  metadata.instance = in.number<std::uint32_t>();
  metadata.incarnation = in.number<std::uint64_t>();
  metadata.pid = in.number<std::uint64_t>();
  metadata.block_tokens = in.number<std::uint32_t>();
  metadata.name = in.text(kNameBytesMax);
  metadata.host = in.text(kNameBytesMax);
  metadata.model = in.text(kMetadataModelBytesMax);
  metadata.local_socket = in.text(kMetadataLocalSocketBytesMax);
  metadata.piece_bytes = in.array<std::uint64_t>(kMetadataSegmentsMax);
  const auto routes = in.number<std::uint32_t>();
  check_range(routes, 0, kMetadataRoutesMax, "number of routes");
  for (std::uint32_t i = 0; i < routes; ++i) metadata.routes.push_back(in.text(kMetadataRouteBytesMax));
  for (MetadataMedium& medium : metadata.media) medium = read_medium(in);
  const auto ucx = in.blob(kMetadataUcxBytesMax);
  metadata.ucx.assign(ucx.begin(), ucx.end());
  metadata.format = read_format(in);
  read_ranks(in, metadata);
  check_metadata(metadata);
  return metadata;
}

bool has_handles(const PeerMetadata& metadata) noexcept {
  return std::ranges::any_of(metadata.media, [](const MetadataMedium& medium) { return !medium.allocations.empty(); });
}

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat pids{};
  if (boot.empty() || stat("/proc/self/ns/pid", &pids) != 0) {
    std::uint64_t random[2] = {static_cast<std::uint64_t>(getpid()), 0};
    static_cast<void>(getrandom(random, sizeof(random), 0));
    return "unknown-" + std::to_string(random[0]) + "-" + std::to_string(random[1]);
  }
  return boot + "-" + std::to_string(pids.st_ino);
}

}  // namespace kvpool
