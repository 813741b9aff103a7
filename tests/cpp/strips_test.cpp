#include "kvpool/base/strips.h"

#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "block_memory.h"

namespace kvpool {
namespace {

using testing::BlockMemory;
using testing::Dice;
using testing::plain_shape;
using testing::SpanShape;

struct Emitted {
  std::uint64_t pieces = 0;
  std::uint64_t bytes = 0;
};

Emitted copy_by_plan(StripPlan& plan, const std::vector<Address>& from, const std::vector<Address>& to) {
  Emitted emitted;
  const bool whole = plan.emit(from, to, [&](std::span<const CopyPiece> pieces) {
    CHECK(pieces.size() <= kPieceBatch);
    for (const CopyPiece& piece : pieces) {
      std::memcpy(piece.dst, piece.src, piece.bytes);
      emitted.bytes += piece.bytes;
    }
    emitted.pieces += pieces.size();
    return true;
  });
  CHECK(whole);
  return emitted;
}

MediaSpans hbm_only(const SpanShape& shape, std::byte* base) {
  MediaSpans spans;
  spans[Medium::kHbm] = shape.span(base);
  return spans;
}

std::vector<Address> hbm_blocks(std::initializer_list<std::uint32_t> blocks) {
  std::vector<Address> addresses;
  for (const std::uint32_t block : blocks) addresses.push_back(make_address(0, Medium::kHbm, 1, block));
  return addresses;
}

TEST_CASE("a plan moves the bytes that a naive copy moves, whatever the layouts, media and strips") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("strips", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(60); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint32_t blocks = 1 + dice.below(40);
      const std::size_t from_bytes = 1 + dice.below(200);
      const std::size_t to_bytes = dice.one_in(2) ? from_bytes : 1 + dice.below(200);
      const BlockMemory source = BlockMemory::random(dice, blocks, from_bytes);
      BlockMemory target = BlockMemory::random(dice, blocks, to_bytes);
      const BlockMemory expected(target);
      const auto strips = testing::random_strips(dice, from_bytes, to_bytes);
      REQUIRE(strips_fit(strips, from_bytes, to_bytes));
      const std::size_t count = dice.below(2 * blocks + 1);
      const auto from = testing::random_blocks(dice, blocks, count);
      const auto to = testing::random_blocks(dice, blocks, count);
      testing::naive_write(source.spans(), expected.spans(), strips, from, to);
      StripPlan plan(source.spans(), target.spans(), strips, dice.one_in(2));
      const Emitted emitted = copy_by_plan(plan, from, to);
      CHECK(target == expected);
      CHECK(emitted.bytes == strip_bytes(strips) * count);
      CHECK(emitted.pieces == plan.count(from, to));
    }
  }
}

TEST_CASE("merged: a run of aggregated blocks is one piece; a run of discrete ones is one for each segment") {
  constexpr std::uint32_t kBlocks = 8;
  constexpr std::size_t kLayers = 3;
  const std::vector<std::size_t> pieces(2 * kLayers, 16);
  const SpanShape discrete = plain_shape(kBlocks, pieces);
  const SpanShape aggregated = plain_shape(kBlocks, {2 * kLayers * 16});
  std::vector<std::byte> a(discrete.memory_bytes);
  std::vector<std::byte> b(discrete.memory_bytes);
  const BlockStrip whole{0, 0, 2 * kLayers * 16};
  const auto count = [&](const SpanShape& from, const SpanShape& to, bool merge, const std::vector<Address>& sources,
                         const std::vector<Address>& targets) {
    const MediaSpans from_spans = hbm_only(from, a.data());
    const MediaSpans to_spans = hbm_only(to, b.data());
    return StripPlan(from_spans, to_spans, {&whole, 1}, merge).count(sources, targets);
  };
  const auto row = hbm_blocks({2, 3, 4, 5});
  const auto scattered = hbm_blocks({7, 0, 5, 2});
  CHECK(count(aggregated, aggregated, true, row, row) == 1);
  CHECK(count(aggregated, aggregated, true, row, scattered) == 4);
  CHECK(count(aggregated, aggregated, false, row, row) == 4);
  CHECK(count(discrete, discrete, true, row, row) == 2 * kLayers);
  CHECK(count(discrete, discrete, false, row, row) == 2 * kLayers * 4);
  CHECK(count(discrete, discrete, true, scattered, row) == 2 * kLayers * 4);
  CHECK(count(discrete, aggregated, true, row, row) == 2 * kLayers * 4);
  CHECK(count_runs(row, row) == 1);
  CHECK(count_runs(row, scattered) == 4);
  CHECK(count_runs(hbm_blocks({0, 1, 4, 5, 6}), hbm_blocks({3, 4, 5, 6, 7})) == 2);
  CHECK(count_runs({}, {}) == 0);
}

TEST_CASE("merged: strips that lie in a row on both sides are one piece") {
  const SpanShape shape = plain_shape(4, {96});
  std::vector<std::byte> a(shape.memory_bytes);
  std::vector<std::byte> b(shape.memory_bytes);
  const std::vector<BlockStrip> strips{{0, 0, 16}, {16, 16, 32}, {48, 64, 32}};
  const MediaSpans from = hbm_only(shape, a.data());
  const MediaSpans to = hbm_only(shape, b.data());
  const auto blocks = hbm_blocks({3});
  CHECK(StripPlan(from, to, strips, true).count(blocks, blocks) == 2);
  CHECK(StripPlan(from, to, strips, false).count(blocks, blocks) == 3);
}

TEST_CASE("segments that touch at block 0 but have other strides are not merged") {
  Dice dice(1);
  const SpanShape touching{.blocks = 2, .pieces = {16, 16}, .at = {0, 16}, .strides = {100, 40}, .memory_bytes = 116};
  const SpanShape one = plain_shape(2, {32});
  const BlockMemory source(dice, touching, touching);
  BlockMemory target(dice, one, one);
  const BlockMemory expected(target);
  const std::vector<BlockStrip> whole{{0, 0, 32}};
  const auto blocks = hbm_blocks({1, 0});
  testing::naive_write(source.spans(), expected.spans(), whole, blocks, blocks);
  StripPlan plan(source.spans(), target.spans(), whole, true);
  CHECK(copy_by_plan(plan, blocks, blocks).pieces == 4);
  CHECK(target == expected);
}

TEST_CASE("the last block of one medium and the first of the next do not form a run") {
  const auto last_hbm = make_address(0, Medium::kHbm, 0, kBlocksMax - 1);
  const auto first_dram = make_address(0, Medium::kDram, 0, 0);
  const std::vector<Address> blocks{last_hbm, first_dram};
  CHECK(run_length(blocks, blocks) == 1);
}

TEST_CASE("a sink can end the plan early") {
  const SpanShape shape = plain_shape(3000, {8}, 8);
  std::vector<std::byte> a(shape.memory_bytes);
  const MediaSpans spans = hbm_only(shape, a.data());
  std::vector<Address> blocks;
  for (std::uint32_t i = 0; i < 3000; ++i) blocks.push_back(make_address(0, Medium::kHbm, 0, i));
  const BlockStrip whole{0, 0, 8};
  StripPlan plan(spans, spans, {&whole, 1}, true);
  int calls = 0;
  CHECK_FALSE(plan.emit(blocks, blocks, [&](std::span<const CopyPiece> pieces) {
    CHECK(pieces.size() == kPieceBatch);
    return ++calls < 2;
  }));
  CHECK(calls == 2);
}

// Both sides' content plans, side by side: byte k of one goes to byte k of the other.
TEST_CASE("sender and receiver agree on the order of the bytes, whatever the layouts of both") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("content order", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(60); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint32_t blocks = 1 + dice.below(30);
      const std::size_t from_bytes = 1 + dice.below(150);
      const std::size_t to_bytes = 1 + dice.below(150);
      const BlockMemory source = BlockMemory::random(dice, blocks, from_bytes);
      const BlockMemory target = BlockMemory::random(dice, blocks, to_bytes);
      const BlockMemory expected(target);
      const auto strips = testing::random_strips(dice, from_bytes, to_bytes);
      const std::size_t count = dice.below(2 * blocks + 1);
      const auto from = testing::random_blocks(dice, blocks, count);
      const auto to = testing::random_blocks(dice, blocks, count);
      testing::naive_write(source.spans(), expected.spans(), strips, from, to);
      std::vector<ContentRange> sent;
      std::vector<ContentRange> placed;
      for (const BlockStrip& strip : strips) {
        sent.push_back({strip.from, strip.bytes});
        placed.push_back({strip.to, strip.bytes});
      }
      std::vector<iovec> out;
      std::vector<iovec> in;
      ContentPlan(source.spans(), sent).emit(from, dice.one_in(2), out);
      ContentPlan(target.spans(), placed).emit(to, dice.one_in(2), in);
      std::vector<std::byte> payload;
      for (const iovec& piece : out) {
        const auto* first = static_cast<const std::byte*>(piece.iov_base);
        payload.insert(payload.end(), first, first + piece.iov_len);
      }
      REQUIRE(payload.size() == strip_bytes(strips) * count);
      std::size_t at = 0;
      for (const iovec& piece : in) {
        REQUIRE(at + piece.iov_len <= payload.size());
        std::memcpy(piece.iov_base, payload.data() + at, piece.iov_len);
        at += piece.iov_len;
      }
      CHECK(at == payload.size());
      CHECK(target == expected);
    }
  }
}

TEST_CASE("parts keep their limits and hold every byte once") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("parts", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(100); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::size_t bytes = 1 + dice.below(300);
      const auto strips = testing::random_strips(dice, bytes, bytes);
      const std::size_t blocks = dice.below(20);
      PartLimits limits{.bytes_max = 1 + dice.below(400)};
      if (dice.one_in(2)) limits.blocks_max = 1 + dice.below(5);
      if (dice.one_in(2)) limits.strips_max = 1 + dice.below(4);
      if (dice.one_in(2) && limits.strips_max < 5) limits.pieces_max = 4 + dice.below(10);
      const TransferParts parts(strips, blocks, limits);
      std::map<std::pair<std::size_t, std::uint64_t>, std::uint64_t> seen;  // (block, to) -> from
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const TransferPart part = parts[i];
        CHECK(part.blocks > 0);
        CHECK(part.bytes() > 0);
        CHECK(part.bytes() <= limits.bytes_max);
        CHECK(part.blocks <= limits.blocks_max);
        CHECK(part.strips.size() <= limits.strips_max);
        CHECK(part.strips.size() * part.blocks <= limits.pieces_max);
        for (std::size_t b = part.first_block; b < part.first_block + part.blocks; ++b) {
          for (const BlockStrip& strip : part.strips) {
            for (std::uint64_t k = 0; k < strip.bytes; ++k) {
              CHECK(seen.emplace(std::pair(b, strip.to + k), strip.from + k).second);
            }
          }
        }
      }
      std::size_t expected = 0;
      for (const BlockStrip& strip : strips) {
        for (std::size_t b = 0; b < blocks; ++b) {
          for (std::uint64_t k = 0; k < strip.bytes; ++k, ++expected) {
            REQUIRE(seen.contains({b, strip.to + k}));
            CHECK(seen[{b, strip.to + k}] == strip.from + k);
          }
        }
      }
      CHECK(seen.size() == expected);
    }
  }
}

TEST_CASE("strips and ranges that reach beyond a content are detected, even if their sums overflow") {
  constexpr std::uint64_t kHuge = UINT64_MAX;
  const auto fits = [](BlockStrip strip) { return strips_fit({&strip, 1}, 100, 50); };
  CHECK(fits({50, 0, 50}));
  CHECK_FALSE(fits({51, 0, 50}));
  CHECK_FALSE(fits({0, 1, 50}));
  CHECK_FALSE(fits({0, 0, 0}));
  CHECK_FALSE(fits({kHuge, 0, 2}));
  CHECK_FALSE(fits({0, kHuge - 1, 2}));
  CHECK_FALSE(fits({0, 0, kHuge}));
  const auto range_fits = [](ContentRange range) { return ranges_fit({&range, 1}, 100); };
  CHECK(range_fits({0, 100}));
  CHECK(range_fits({99, 1}));
  CHECK_FALSE(range_fits({99, 2}));
  CHECK_FALSE(range_fits({0, 0}));
  CHECK_FALSE(range_fits({kHuge, 2}));
  CHECK_FALSE(range_fits({2, kHuge}));
  CHECK_FALSE(ranges_overlap(std::vector<ContentRange>{{10, 5}, {0, 10}, {15, 1}}));
  CHECK(ranges_overlap(std::vector<ContentRange>{{10, 5}, {0, 11}}));
  CHECK(ranges_overlap(std::vector<ContentRange>{{10, 5}, {0, 5}, {10, 5}}));
}

TEST_CASE("addresses of blocks that do not exist are detected") {
  const SpanShape shape = plain_shape(4, {8});
  std::vector<std::byte> a(shape.memory_bytes);
  const MediaSpans spans = hbm_only(shape, a.data());
  CHECK(blocks_exist(hbm_blocks({0, 3}), spans));
  CHECK_FALSE(blocks_exist(hbm_blocks({0, 4}), spans));
  CHECK_FALSE(blocks_exist(std::vector<Address>{make_address(0, Medium::kDram, 0, 0)}, spans));
  CHECK_FALSE(blocks_exist(std::vector<Address>{0}, spans));
  CHECK_FALSE(blocks_exist(std::vector<Address>{UINT64_MAX}, spans));
}

}  // namespace
}  // namespace kvpool
