// Byte ranges of blocks that are cut, beside a naive model: where each byte of a block's content lies.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/strips.h"
#include "kvpool/blocks/block_pieces.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kUnitBytes = 8;
constexpr std::uint32_t kPieces = 4;
constexpr std::uint32_t kPieceUnits = 2;
constexpr std::uint32_t kPieceBytes = kPieceUnits * kUnitBytes;
constexpr std::uint32_t kBlockBytes = kPieces * kPieceBytes;
constexpr std::uint32_t kBlocks = 8;
constexpr std::uint32_t kUnits = kBlocks * kPieces * kPieceUnits;

using Bytes = std::vector<std::byte>;

// Eight blocks in one memory, of a medium.
class Side {
 public:
  virtual ~Side() = default;
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  // Where a byte of the content of the block with this index lies.
  virtual std::size_t at(std::size_t index, std::uint64_t byte) const = 0;

  MediaSpans spans;
  std::vector<Address> blocks;
  Bytes memory;

 protected:
  Side(std::mt19937& random, std::size_t bytes) : memory(bytes) {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }
  void add(std::uint32_t number) { blocks.push_back(make_address(0, Medium::kHbm, 1, number)); }
};

// Three blocks are whole, and five lie in pieces.
class Cut final : public Side {
 public:
  explicit Cut(std::mt19937& random)
      : Side(random, kUnits * kUnitBytes),
        table_(std::make_shared<BlockPieces>(kUnits - kPieces * kPieceUnits + 1, kBlocks, kPieces, kPieceUnits)) {
    std::vector<std::uint32_t> places;
    for (std::uint32_t place = 0; place < kBlocks * kPieces; ++place) places.push_back(place * kPieceUnits);
    std::shuffle(places.begin() + 3 * kPieces, places.end(), random);
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      std::vector<std::uint32_t> units(places.begin() + block * kPieces, places.begin() + (block + 1) * kPieces);
      std::ranges::sort(units);
      if (block >= 3) table_->scatter(units[0], units);
      add(units[0]);
      units_.push_back(std::move(units));
    }
    spans[Medium::kHbm] = {kUnits, {{memory.data(), kUnitBytes, kBlockBytes}}, table_};
  }
  std::size_t at(std::size_t index, std::uint64_t byte) const override {
    return units_[index][byte / kPieceBytes] * kUnitBytes + byte % kPieceBytes;
  }

 private:
  std::shared_ptr<BlockPieces> table_;
  std::vector<std::vector<std::uint32_t>> units_;
};

// Three runs a block, which end elsewhere than pieces do.
class Whole final : public Side {
 public:
  explicit Whole(std::mt19937& random) : Side(random, std::size_t{kBlocks} * kBlockBytes) {
    std::size_t base = 0;
    for (const std::size_t bytes : kRuns) {
      spans[Medium::kHbm].segments.push_back({memory.data() + base, bytes, bytes});
      base += kBlocks * bytes;
    }
    spans[Medium::kHbm].blocks = kBlocks;
    for (std::uint32_t block = 0; block < kBlocks; ++block) add(block);
  }
  std::size_t at(std::size_t index, std::uint64_t byte) const override {
    std::size_t base = 0;
    for (const std::size_t bytes : kRuns) {
      if (byte < bytes) return base + index * bytes + static_cast<std::size_t>(byte);
      byte -= bytes;
      base += kBlocks * bytes;
    }
    FAIL("no such byte");
    return 0;
  }

 private:
  static constexpr std::array<std::size_t, 3> kRuns{24, 30, 10};
};

std::unique_ptr<Side> side(bool cut, std::mt19937& random) {
  if (cut) return std::make_unique<Cut>(random);
  return std::make_unique<Whole>(random);
}

std::vector<BlockStrip> some_strips(std::mt19937& random) {
  if (random() % 3 == 0) return {{0, 0, kBlockBytes}};
  const std::uint64_t first = random() % 40;
  const std::uint64_t bytes = 1 + random() % 20;
  if (random() % 2 == 0) return {{first, 10, bytes}};
  return {{first, 0, bytes}, {30, 24, 30}};
}

// Which blocks of each side, in any order.
std::vector<std::size_t> some_blocks(std::mt19937& random) {
  std::vector<std::size_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  if (random() % 2 == 0) std::ranges::shuffle(all, random);
  all.resize(1 + random() % all.size());
  return all;
}

std::vector<Address> addresses(const Side& of, const std::vector<std::size_t>& which) {
  std::vector<Address> named;
  for (const std::size_t index : which) named.push_back(of.blocks[index]);
  return named;
}

}  // namespace

TEST_CASE("copies between blocks that are cut and others move each byte of the content to its place, and no other") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    for (int round = 0; round < testing::fuzz_length(400); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const auto from = side(round % 4 != 0, random);
      const auto to = side(round % 4 != 1, random);
      const std::vector<BlockStrip> strips = some_strips(random);
      const std::vector<std::size_t> sources = some_blocks(random);
      std::vector<std::size_t> targets = some_blocks(random);
      while (targets.size() < sources.size()) targets = some_blocks(random);
      targets.resize(sources.size());
      const bool merge = random() % 2 == 0;

      Bytes wanted = to->memory;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        for (const BlockStrip& strip : strips) {
          for (std::uint64_t byte = 0; byte < strip.bytes; ++byte) {
            wanted[to->at(targets[i], strip.to + byte)] = from->memory[from->at(sources[i], strip.from + byte)];
          }
        }
      }
      StripPlan plan(from->spans, to->spans, strips, merge);
      const std::vector<Address> source = addresses(*from, sources);
      const std::vector<Address> target = addresses(*to, targets);
      std::uint64_t pieces = 0;
      plan.emit(source, target, [&](std::span<const CopyPiece> batch) {
        for (const CopyPiece& piece : batch) std::copy_n(piece.src, piece.bytes, piece.dst);
        pieces += batch.size();
        return true;
      });
      REQUIRE(to->memory == wanted);
      REQUIRE(plan.count(source, target) == pieces);
    }
  }
}

TEST_CASE("a whole block of a pool whose blocks may be cut is one piece, one that is cut has as many as its runs") {
  std::mt19937 random(1);
  const Cut from(random);
  const Cut to(random);
  const BlockStrip whole{0, 0, kBlockBytes};
  StripPlan plan(from.spans, to.spans, {&whole, 1}, true);
  CHECK(plan.count(std::span(from.blocks).first(1), std::span(to.blocks).subspan(1, 1)) == 1);
  CHECK(plan.count(std::span(from.blocks).first(3), std::span(to.blocks).first(3)) == 1);  // neighbours on both sides
  StripPlan apart(from.spans, to.spans, {&whole, 1}, false);
  CHECK(apart.count(std::span(from.blocks).first(2), std::span(to.blocks).first(2)) == 2 * kPieces);
}

TEST_CASE("to find a late piece of a block asks for no other") {
  struct Counting final : BlockPlaces {
    std::uint32_t pieces() const noexcept override { return 64; }
    std::uint32_t unit_of(std::uint32_t block, std::uint32_t piece) const noexcept override {
      ++asked;
      return block + 2 * piece;
    }
    mutable int asked = 0;
  };
  const auto places = std::make_shared<Counting>();
  Bytes memory(1024);
  MediaSpans spans;
  spans[Medium::kHbm] = {128, {{memory.data(), kUnitBytes, 64 * kUnitBytes}}, places};
  const Address block = make_address(0, Medium::kHbm, 1, 1);
  const ContentRange late{63 * kUnitBytes + 3, 4};
  std::vector<iovec> pieces;
  ContentPlan(spans, {&late, 1}).emit({&block, 1}, true, pieces);
  REQUIRE(pieces.size() == 1);
  CHECK(static_cast<std::byte*>(pieces[0].iov_base) == memory.data() + (1 + 2 * 63) * kUnitBytes + 3);
  CHECK(pieces[0].iov_len == 4);
  CHECK(places->asked == 1);
}

TEST_CASE("the order in which content travels is the same whether or not blocks are cut") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    for (int round = 0; round < testing::fuzz_length(400); ++round) {
      const auto one = side(round % 4 != 0, random);
      const std::vector<std::size_t> which = some_blocks(random);
      std::vector<ContentRange> ranges;
      for (const BlockStrip& strip : some_strips(random)) ranges.push_back({strip.to, strip.bytes});
      Bytes wanted;
      for (const ContentRange& range : ranges) {
        for (const std::size_t index : which) {
          for (std::uint64_t byte = 0; byte < range.bytes; ++byte) {
            wanted.push_back(one->memory[one->at(index, range.at + byte)]);
          }
        }
      }
      std::vector<iovec> pieces;
      ContentPlan(one->spans, ranges).emit(addresses(*one, which), random() % 2 == 0, pieces);
      Bytes found;
      for (const iovec& piece : pieces) {
        const auto* const first = static_cast<const std::byte*>(piece.iov_base);
        found.insert(found.end(), first, first + piece.iov_len);
      }
      REQUIRE(found == wanted);
    }
  }
}

}  // namespace kvpool
