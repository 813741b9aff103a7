#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// Addresses that are never read: the arena only computes with them.
std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::shared_ptr<Arena> adopt(std::uint32_t blocks, std::vector<Segment> segments) {
  return make_adopted_arena(Medium::kHbm, blocks, std::move(segments), nullptr);
}

// kAudit stands for "no error".
ErrorCode code_of(std::uint32_t blocks, const std::vector<Segment>& segments) {
  try {
    adopt(blocks, segments);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kAudit;
}

bool fits(std::uint32_t blocks, const std::vector<Segment>& segments) {
  const ErrorCode code = code_of(blocks, segments);
  CHECK((code == ErrorCode::kAudit || code == ErrorCode::kLayoutMismatch));
  return code == ErrorCode::kAudit;
}

// The same by looking at every byte.
bool fits_naively(std::uint32_t blocks, const std::vector<Segment>& segments) {
  std::vector<bool> taken(1 << 16);
  for (const Segment& segment : segments) {
    for (std::uint32_t block = 0; block < blocks; ++block) {
      for (std::size_t i = 0; i < segment.bytes; ++i) {
        auto byte = taken.at(reinterpret_cast<std::uintptr_t>(segment.base) + block * segment.stride + i);
        if (byte) {
          return false;
        }
        byte = true;
      }
    }
  }
  return true;
}

TEST_CASE("an adopted arena is the engine's memory, kept alive") {
  std::vector<std::byte> memory(1000);
  auto owner = std::make_shared<int>(5);
  const std::weak_ptr<int> alive = owner;
  {
    const auto arena = make_adopted_arena(Medium::kHbm, 10, {{memory.data(), 100, 50}, {memory.data() + 50, 100, 20}},
                                          std::move(owner));
    CHECK(arena->medium() == Medium::kHbm);
    CHECK(arena->blocks() == 10);
    CHECK(arena->block_bytes() == 70);
    CHECK(arena->payload_bytes() == 700);
    CHECK(arena->mapped_bytes() == 0);
    CHECK(arena->huge_page_bytes() == 0);
    CHECK(arena->memfd() == -1);
    CHECK_FALSE(arena->owned());
    REQUIRE(arena->segments().size() == 2);
    CHECK(arena->segments()[1].base == memory.data() + 50);
    CHECK(arena->segments()[1].stride == 100);
    CHECK_FALSE(alive.expired());
  }
  CHECK(alive.expired());
}

TEST_CASE("refused memory is released") {
  auto owner = std::make_shared<int>(5);
  const std::weak_ptr<int> alive = owner;
  CHECK_THROWS_AS(make_adopted_arena(Medium::kHbm, 2, {{at(4096), 10, 20}}, std::move(owner)), Error);
  CHECK(alive.expired());
}

TEST_CASE("keys and values of one layer may interleave") {
  // [block, k/v, ...] and [k/v, block, ...], as engines have them.
  CHECK(fits(1000, {{at(1 << 20), 200, 100}, {at((1 << 20) + 100), 200, 100}}));
  CHECK(fits(1000, {{at(1 << 20), 100, 100}, {at((1 << 20) + 100000), 100, 100}}));
  CHECK_FALSE(fits(1000, {{at(1 << 20), 200, 100}, {at((1 << 20) + 99), 200, 100}}));
  CHECK_FALSE(fits(1000, {{at(1 << 20), 200, 101}, {at((1 << 20) + 100), 200, 100}}));
  CHECK_FALSE(fits(1001, {{at(1 << 20), 100, 100}, {at((1 << 20) + 100000), 100, 100}}));
  CHECK_FALSE(fits(2, {{at(4096), 64, 64}, {at(4096), 64, 64}}));
}

TEST_CASE("pieces of one segment must not overlap each other") {
  CHECK(fits(2, {{at(4096), 64, 64}}));
  CHECK_FALSE(fits(2, {{at(4096), 63, 64}}));
  CHECK_FALSE(fits(2, {{at(4096), 0, 64}}));
  CHECK(fits(1, {{at(4096), 0, 64}}));  // a stride means nothing to a single block
}

TEST_CASE("memory without an address, without bytes or beyond the address space is refused") {
  CHECK(code_of(1, {}) == ErrorCode::kArgument);
  CHECK(code_of(kBlocksMax + 1, {{at(4096), 64, 64}}) == ErrorCode::kArgument);
  CHECK(code_of(1, {{nullptr, 64, 64}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(1, {{at(4096), 64, 0}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(0, {{at(4096), 64, 0}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(2, {{at(4096), SIZE_MAX, 64}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(kBlocksMax, {{at(4096), SIZE_MAX / 4, 64}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(1, {{at(UINTPTR_MAX - 10), 64, 64}}) == ErrorCode::kLayoutMismatch);
  CHECK(code_of(1, {{at(4096), 64, SIZE_MAX}}) == ErrorCode::kLayoutMismatch);
}

TEST_CASE("an adopted arena may have no blocks") {
  const auto arena = adopt(0, {{nullptr, 64, 64}});
  CHECK(arena->blocks() == 0);
  CHECK(arena->payload_bytes() == 0);
}

TEST_CASE("the overlap check agrees with a check of every byte") {
  int overlapping = 0;
  int separate = 0;
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    std::mt19937_64 random(seed);
    const auto blocks = static_cast<std::uint32_t>(1 + random() % 20);
    const std::size_t common_stride = 1 + random() % 200;
    std::vector<Segment> segments(1 + random() % 4);
    for (Segment& segment : segments) {
      segment.stride = random() % 3 == 0 ? 1 + random() % 200 : common_stride * (1 + random() % 2);
      segment.bytes = 1 + random() % std::max<std::size_t>(1, segment.stride / (1 + random() % 8));
      segment.base = at(1 + random() % (random() % 2 == 0 ? 500 : 6000));
    }
    const bool expected = fits_naively(blocks, segments);
    (expected ? separate : overlapping) += 1;
    CAPTURE(seed);
    REQUIRE(fits(blocks, segments) == expected);
  }
  CHECK(overlapping > 400);
  CHECK(separate > 400);
}

TEST_CASE("the overlap check is exact for a large model with the largest number of blocks") {
  constexpr std::size_t kLayers = 128;
  constexpr std::size_t kPiece = 1 << 12;
  // [block, layer, k/v]: every segment reaches over all of the memory, 256 x 16 million pieces. A look at each would
  // not end.
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    segments.push_back({at((std::uintptr_t{1} << 40) + i * kPiece), 2 * kLayers * kPiece, kPiece});
  }
  CHECK(fits(kBlocksMax, segments));
  // One piece of one block a byte too long: the last block's last one runs out of the memory, the others collide.
  segments[200].bytes += 1;
  CHECK_FALSE(fits(kBlocksMax, segments));
  segments[200].bytes -= 1;
  // Strides that share no factor meet somewhere among so many blocks, and only there.
  segments[200].stride += 1;
  CHECK_FALSE(fits(kBlocksMax, segments));
}

TEST_CASE("pieces whose strides have no common factor meet where arithmetic says") {
  // Piece x of the first begins at 1000003 x, piece y of the second at 999983 y + 499999: both one byte. They meet when
  // 1000003 x - 999983 y = 499999 has a solution below the number of blocks.
  std::uint64_t first_meeting = 0;
  for (std::uint64_t x = 0; first_meeting == 0; ++x) {
    if (1000003 * x >= 499999 && (1000003 * x - 499999) % 999983 == 0) {
      first_meeting = std::max(x, (1000003 * x - 499999) / 999983);
    }
  }
  const std::vector<Segment> segments = {{at(1 << 20), 1000003, 1}, {at((1 << 20) + 499999), 999983, 1}};
  REQUIRE(first_meeting < kBlocksMax);
  CHECK(fits(static_cast<std::uint32_t>(first_meeting), segments));
  CHECK_FALSE(fits(static_cast<std::uint32_t>(first_meeting) + 1, segments));
}

}  // namespace
}  // namespace kvpool
