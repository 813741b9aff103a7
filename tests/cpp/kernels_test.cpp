// Copies that the kernels' front refuses, the runs of staging, and the reference against the definition.
#include "kvpool/cuda/kernels.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/driver.h"
#include "kvpool/cuda/kernel_plan.h"
#include "thrown.h"

namespace kvpool::cuda {
namespace {

using testing::Dice;

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t bytes, Dice& dice) {
  Bytes result(bytes);
  for (std::byte& one : result) one = static_cast<std::byte>(dice.below(256));
  return result;
}

// Refused by the reference and by the planner alike, before anything is done.
std::string refusal(const CopyJob& job) {
  const auto never = [](void*, const TableLaunch&) -> int {
    FAIL("launched");
    return 0;
  };
  std::string text;
  CHECK(testing::code_of([&] { launch_job(job, {}, never, nullptr); }, &text) == ErrorCode::kArgument);
  CHECK(testing::text_of([&] { reference_kernels().copy(job, nullptr, {}); }) == text);
  return text;
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

struct Place {
  alignas(16) std::byte from[4096] = {};
  alignas(16) std::byte to[4096] = {};
};

TEST_CASE("an impossible copy is refused with the reason") {
  Place place;
  const std::vector<BlockPair> one{{0, 0}};
  const std::vector<BlockPair> two{{0, 0}, {1, 1}};
  const auto refused = [](const PlannedStrip& strip, const std::vector<BlockPair>& pairs) {
    const std::vector<PlannedStrip> strips{strip};
    return refusal({strips, pairs});
  };
  CHECK(has(refused({nullptr, place.to, 16, 16, 16}, one), "no source"));
  CHECK(has(refused({place.from, nullptr, 16, 16, 16}, one), "no destination"));
  CHECK(has(refused({place.from, place.to, 0, 16, 16}, one), "empty"));
  CHECK(has(refused({place.from, place.to, 32, 32, 16}, two), "next block"));
  const std::size_t far = std::size_t{1} << 62;
  CHECK(has(refused({place.from, place.to, far, far, far}, one), "bytes long"));
  CHECK(has(refused({place.from, place.to, 16, far, 16}, one), "beyond all memory"));
  CHECK(has(refused({place.from, reinterpret_cast<std::byte*>(far), 16, 16, 16}, one), "beyond all memory"));
  const std::vector<BlockPair> last{{std::numeric_limits<std::uint32_t>::max(), 0}};
  CHECK(has(refused({place.from, place.to, 16, std::size_t{1} << 40, 16}, last), "beyond all memory"));
  const auto error = testing::error_of([&] {
    const std::vector<PlannedStrip> strips{{place.from, place.to, 16, 16, 16}, {place.from, place.to, 0, 16, 16}};
    check_job(CopyJob{strips, one});
  });
  REQUIRE(error);
  REQUIRE(error->fields().size() == 1);
  CHECK(error->fields()[0].second == 1);  // which strip
}

// As in a space, where a block's number is its first unit.
TEST_CASE("blocks that are longer than the stride are written where they do not overlap") {
  Place place;
  const std::vector<PlannedStrip> strips{{place.from, place.to, 40, 16, 16}};
  const auto launches = [](void* count, const TableLaunch&) {
    ++*static_cast<int*>(count);
    return 0;
  };
  for (const std::size_t i : {0, 1, 2, 3, 4}) place.from[i * 16] = static_cast<std::byte>(i + 1);
  const std::vector<BlockPair> apart{{1, 7}, {4, 0}, {0, 4}};  // 3 units each
  int launched = 0;
  CHECK(launch_job(CopyJob{strips, apart}, {}, launches, &launched) == 0);
  CHECK(launched == 1);
  REQUIRE(reference_kernels().copy({strips, apart}, nullptr, {}) == 0);
  for (const BlockPair& pair : apart) {
    CHECK(std::equal(place.from + pair.from * 16, place.from + pair.from * 16 + 40, place.to + pair.to * 16));
  }
  CHECK(place.to[3 * 16] == std::byte{0});
  CHECK(has(refusal({strips, std::vector<BlockPair>{{1, 7}, {4, 0}, {0, 2}}}), "next block is 32 bytes on"));
  CHECK(has(refusal({strips, std::vector<BlockPair>{{1, 7}, {4, 7}}}), "next block is 0 bytes on"));
  const std::vector<PlannedStrip> fixed{{place.from, place.to, 40, 16, 0}};
  CHECK(has(refusal({fixed, apart}), "next block"));
}

TEST_CASE("a copy without strips or pairs does nothing") {
  Place place;
  const std::vector<PlannedStrip> strips{{place.from, place.to, 16, 16, 16}};
  const std::vector<BlockPair> pairs{{0, 0}};
  const auto never = [](void*, const TableLaunch&) { return 1; };
  CHECK(launch_job(CopyJob{{}, pairs}, {}, never, nullptr) == 0);
  CHECK(launch_job(CopyJob{strips, {}}, {}, never, nullptr) == 0);
  CHECK(reference_kernels().copy({{}, {}}, nullptr, {}) == 0);
}

TEST_CASE("overlapping pieces are detected") {
  Place place;
  const std::vector<BlockPair> two{{0, 0}, {1, 1}};
  const std::vector<BlockPair> same{{0, 1}, {2, 1}};
  const std::vector<PlannedStrip> strips{{place.from, place.to, 64, 64, 64}};
  CHECK_FALSE(overlaps(CopyJob{strips, two}));
  CHECK(overlaps(CopyJob{strips, same}));  // block 1 is written twice
  const std::vector<PlannedStrip> within{{place.from, place.from + 64, 64, 64, 64}};
  CHECK(overlaps(CopyJob{within, two}));  // block 1 is read and written
  CHECK_FALSE(overlaps(CopyJob{within, std::vector<BlockPair>{{0, 0}}}));
  CHECK_FALSE(overlaps(CopyJob{strips, std::vector<BlockPair>{{0, 0}, {0, 1}}}));  // read twice
#ifdef KVPOOL_DEBUG
  CHECK(testing::text_of([&] { check_job(CopyJob{strips, same}); }).find("another piece") != std::string::npos);
#endif
}

// Two media of the same content, cut into segments at different places, in two buffers of noise.
struct Arena {
  Arena(std::vector<std::size_t> cuts, std::uint32_t blocks, Dice& dice) {
    std::size_t total = 0;
    for (const std::size_t bytes : cuts) total += blocks * (bytes + 16);
    memory = random_bytes(total, dice);
    std::byte* at = memory.data();
    span.blocks = blocks;
    for (const std::size_t bytes : cuts) {
      span.segments.push_back(Segment{at, bytes + 16, bytes});
      at += blocks * (bytes + 16);
    }
  }
  std::byte* byte_of(std::uint32_t block, std::size_t at) {
    for (const Segment& segment : span.segments) {
      if (at < segment.bytes) return segment.base + block * segment.stride + at;
      at -= segment.bytes;
    }
    FAIL("no such byte");
    return nullptr;
  }
  Bytes memory;
  MediumSpan span;
};

TEST_CASE("a gather follows the order of the wire, and a scatter reverses it") {
  Dice dice(11);
  const std::uint32_t blocks = 7;
  const std::vector<ContentRange> ranges{{96, 64}, {0, 48}, {160, 8}};
  const std::vector<BlockPair> pairs{{5, 0}, {0, 1}, {3, 2}};
  for (const StagingOrder order : {StagingOrder::kByBlock, StagingOrder::kByRange}) {
    Arena arena({32, 32, 32, 64, 16}, blocks, dice);
    Bytes staging(3 * 120, std::byte{0xEE});
    const auto strips = plan_staging(arena.span, ranges, pairs.size(), order, staging.data());
    REQUIRE(reference_kernels().copy({strips, pairs}, nullptr, {}) == 0);
    Bytes expected;
    const auto add = [&](const ContentRange& range, std::uint32_t block) {
      for (std::size_t i = 0; i < range.bytes; ++i) expected.push_back(*arena.byte_of(block, range.at + i));
    };
    if (order == StagingOrder::kByBlock) {
      for (const BlockPair& pair : pairs) {
        for (const ContentRange& range : ranges) add(range, pair.from);
      }
    } else {
      for (const ContentRange& range : ranges) {
        for (const BlockPair& pair : pairs) add(range, pair.from);
      }
      // Both sides of a transfer compute this order by themselves.
      MediaSpans media;
      media[0] = arena.span;
      std::vector<Address> addresses;
      for (const BlockPair& pair : pairs) addresses.push_back(make_address(0, Medium::kHbm, 0, pair.from));
      std::vector<iovec> pieces;
      ContentPlan(media, ranges).emit(addresses, false, pieces);
      Bytes wire;
      for (const iovec& piece : pieces) {
        const auto* begin = static_cast<const std::byte*>(piece.iov_base);
        wire.insert(wire.end(), begin, begin + piece.iov_len);
      }
      CHECK(wire == expected);
    }
    CHECK(staging == expected);

    const Bytes before = arena.memory;
    for (const BlockPair& pair : pairs) {
      for (const ContentRange& range : ranges) {
        for (std::size_t i = 0; i < range.bytes; ++i) *arena.byte_of(pair.from, range.at + i) = std::byte{0};
      }
    }
    REQUIRE(arena.memory != before);
    std::vector<BlockPair> back;
    for (const BlockPair& pair : pairs) back.push_back({pair.to, pair.from});
    REQUIRE(reference_kernels().copy({reverse(strips), back}, nullptr, {}) == 0);
    CHECK(arena.memory == before);
  }
}

TEST_CASE("discrete blocks become aggregated ones, and slices of heads are copied to their places") {
  Dice dice(12);
  Arena discrete({64, 64, 64, 64}, 6, dice);
  Arena aggregated({256}, 9, dice);
  const std::vector<BlockPair> pairs{{2, 8}, {5, 0}, {0, 3}};
  std::vector<PlannedStrip> plan;
  const BlockStrip whole{0, 0, 256};
  plan_strips(discrete.span, aggregated.span, std::span(&whole, 1), true, plan);
  REQUIRE(reference_kernels().copy({plan, pairs}, nullptr, {}) == 0);
  for (const BlockPair& pair : pairs) {
    for (std::size_t at = 0; at < 256; ++at) {
      REQUIRE(*aggregated.byte_of(pair.to, at) == *discrete.byte_of(pair.from, at));
    }
  }
  // The second half of the heads of every piece, to a rank that has only those.
  Arena narrow({128}, 9, dice);
  std::vector<BlockStrip> slices;
  for (std::uint64_t piece = 0; piece < 4; ++piece) slices.push_back({piece * 64 + 32, piece * 32, 32});
  plan.clear();
  plan_strips(discrete.span, narrow.span, slices, true, plan);
  REQUIRE(reference_kernels().copy({plan, pairs}, nullptr, {}) == 0);
  for (const BlockPair& pair : pairs) {
    for (std::size_t at = 0; at < 128; ++at) {
      REQUIRE(*narrow.byte_of(pair.to, at) == *discrete.byte_of(pair.from, at / 32 * 64 + 32 + at % 32));
    }
  }
}

TEST_CASE("a build says whether it has kernels, and for which GPUs") {
  const KernelSet* kernels = gpu_kernels();
  CHECK((kernels != nullptr) == !std::string(kernel_targets()).empty());
  CHECK(std::string(reference_kernels().name) == "reference");
  CHECK(std::string(reference_kernels().result_name(0)) == "success");
  if (kernels == nullptr) return;
  CHECK(std::string(kernels->name) == "gpu");
  CHECK(std::string(kernels->result_name(700)) == "cudaErrorIllegalAddress");
  // The same checks stand before a launch, without a GPU too.
  Place place;
  const std::vector<PlannedStrip> strips{{place.from, place.to, 0, 16, 16}};
  const std::vector<BlockPair> pairs{{0, 0}};
  CHECK(testing::code_of([&] { kernels->copy({strips, pairs}, nullptr, {}); }) == ErrorCode::kArgument);
  // Without a GPU loading them is an answer, too, by which a pool does without.
  const CudaFault fault = fault_of(kernels->load());
  CHECK((fault == CudaFault::kNone || fault == CudaFault::kUnsupported));
}

}  // namespace
}  // namespace kvpool::cuda
