// Blocks in memory of any layout, and a naive way to read them: for tests of code that moves blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/address.h"
#include "kvpool/base/segment.h"
#include "kvpool/base/strips.h"

namespace kvpool::testing {

using Content = std::vector<std::byte>;

// How the segments of one medium lie in memory, from its beginning.
struct SpanShape {
  std::uint32_t blocks = 0;
  std::vector<std::size_t> pieces;  // bytes of each segment
  std::vector<std::size_t> at;      // where each segment begins
  std::vector<std::size_t> strides;
  std::size_t memory_bytes = 0;

  MediumSpan span(std::byte* base) const {
    MediumSpan made;
    made.blocks = blocks;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      made.segments.push_back(Segment{base == nullptr ? nullptr : base + at[i], strides[i], pieces[i]});
    }
    return made;
  }
};

// Segments one after the other, each with all its blocks: aggregated (one piece) or discrete.
inline SpanShape plain_shape(std::uint32_t blocks, const std::vector<std::size_t>& pieces, std::size_t gap = 0) {
  SpanShape shape{.blocks = blocks, .pieces = pieces, .at = {}, .strides = {}, .memory_bytes = 0};
  for (const std::size_t bytes : pieces) {
    shape.at.push_back(shape.memory_bytes);
    shape.strides.push_back(bytes + gap);
    shape.memory_bytes += blocks * (bytes + gap);
  }
  return shape;
}

// A content of `bytes` cut anywhere; segments with gaps or without, some of them interleaved as K and V of an engine.
inline SpanShape random_shape(Dice& dice, std::uint32_t blocks, std::size_t bytes) {
  std::vector<std::size_t> pieces;
  for (std::size_t left = bytes; left > 0;) {
    const std::size_t piece = dice.one_in(3) ? left : 1 + dice.below(left);
    pieces.push_back(piece);
    left -= piece;
  }
  if (!dice.one_in(3)) return plain_shape(blocks, pieces, dice.one_in(2) ? 0 : dice.below(40));
  // Interleaved: all pieces of a block side by side, then the next block.
  SpanShape shape{.blocks = blocks, .pieces = pieces, .at = {}, .strides = {}, .memory_bytes = 0};
  const std::size_t gap = dice.one_in(2) ? 0 : dice.below(20);
  std::size_t row = 0;
  for (const std::size_t piece : pieces) {
    shape.at.push_back(row);
    row += piece + gap;
  }
  shape.strides.assign(pieces.size(), row);
  shape.memory_bytes = row * blocks;
  return shape;
}

inline void fill_random(Dice& dice, std::byte* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = dice.any();
    std::memcpy(bytes + i, &word, std::min(count - i, sizeof word));
  }
}

// A block's content from byte `at` to the end of its segment.
inline std::span<std::byte> content_piece(const MediumSpan& span, std::uint32_t block, std::size_t at) {
  std::size_t segment = 0;
  while (at >= span.segments[segment].bytes) at -= span.segments[segment++].bytes;
  const Segment& found = span.segments[segment];
  return {found.base + block * found.stride + at, found.bytes - at};
}

inline std::byte& content_byte(const MediumSpan& span, std::uint32_t block, std::size_t at) {
  return content_piece(span, block, at).front();
}

inline const MediumSpan& span_of(const MediaSpans& spans, Address address) { return spans[medium_of(address)]; }

// What a write must do, one piece after the other. Not a byte at a time: the tests of every route call it, and under a
// sanitizer they would spend most of their time here.
inline void naive_write(const MediaSpans& from, const MediaSpans& to, const std::vector<BlockStrip>& strips,
                        const std::vector<Address>& sources, const std::vector<Address>& targets) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    for (const BlockStrip& strip : strips) {
      for (std::size_t k = 0; k < strip.bytes;) {
        const auto source = content_piece(span_of(from, sources[i]), block_of(sources[i]), strip.from + k);
        const auto target = content_piece(span_of(to, targets[i]), block_of(targets[i]), strip.to + k);
        const std::size_t bytes = std::min({source.size(), target.size(), strip.bytes - k});
        std::memcpy(target.data(), source.data(), bytes);
        k += bytes;
      }
    }
  }
}

// Memory of both media.
class BlockMemory {
 public:
  BlockMemory(Dice& dice, SpanShape hbm, SpanShape dram) : shapes_{std::move(hbm), std::move(dram)} {
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      bytes_[i].resize(shapes_[i].memory_bytes);
      fill_random(dice, bytes_[i].data(), bytes_[i].size());
      spans_[i] = shapes_[i].span(bytes_[i].data());
    }
  }
  BlockMemory(const BlockMemory& other) : shapes_(other.shapes_), bytes_(other.bytes_) {
    for (std::size_t i = 0; i < shapes_.size(); ++i) spans_[i] = shapes_[i].span(bytes_[i].data());
  }
  BlockMemory& operator=(const BlockMemory&) = delete;

  static BlockMemory random(Dice& dice, std::uint32_t blocks, std::size_t bytes) {
    SpanShape hbm = random_shape(dice, blocks, bytes);
    SpanShape dram = random_shape(dice, blocks, bytes);
    return {dice, std::move(hbm), std::move(dram)};
  }

  const MediaSpans& spans() const { return spans_; }
  // Gaps between pieces included: nothing else may have been written.
  bool operator==(const BlockMemory& other) const { return bytes_ == other.bytes_; }

 private:
  MediumMap<SpanShape> shapes_;
  MediumMap<Content> bytes_;
  MediaSpans spans_;
};

// `count` different blocks of both media, mostly in short runs, with generations that must not matter.
inline std::vector<Address> random_blocks(Dice& dice, std::uint32_t blocks_each, std::size_t count) {
  std::vector<Address> all;
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    for (std::uint32_t i = 0; i < blocks_each; ++i)
      all.push_back(make_address(dice.below(3), medium, dice.below(9), i));
  }
  // A few rotations of ranges leave runs between them.
  for (int i = 0; i < 6; ++i) {
    const std::size_t middle = dice.below(all.size());
    const std::size_t end = middle + dice.below(all.size() - middle);
    std::rotate(all.begin() + dice.below(middle + 1), all.begin() + static_cast<std::ptrdiff_t>(middle),
                all.begin() + static_cast<std::ptrdiff_t>(end));
  }
  all.resize(std::min(count, all.size()));
  return all;
}

// Strips with destinations that do not overlap, in any order.
inline std::vector<BlockStrip> random_strips(Dice& dice, std::size_t from_bytes, std::size_t to_bytes) {
  std::vector<BlockStrip> strips;
  if (dice.one_in(4) && from_bytes == to_bytes) return {BlockStrip{0, 0, from_bytes}};
  for (std::size_t to = 0; to < to_bytes;) {
    const std::size_t bytes = 1 + dice.below(std::min(from_bytes, to_bytes - to));
    // Half of them go on where the one before ended, on both sides.
    const bool goes_on = !strips.empty() && strips.back().from + strips.back().bytes + bytes <= from_bytes;
    const std::uint64_t from =
        goes_on && dice.one_in(2) ? strips.back().from + strips.back().bytes : dice.below(from_bytes - bytes + 1);
    strips.push_back(BlockStrip{from, to, bytes});
    to += bytes + (dice.one_in(2) ? 0 : dice.below(5));
  }
  if (dice.one_in(2)) std::reverse(strips.begin(), strips.end());
  return strips;
}

}  // namespace kvpool::testing
