// Arenas over memory that an engine owns.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

__extension__ using Wide = __int128;

Wide floor_div(Wide numerator, Wide denominator) noexcept {
  return numerator / denominator - (numerator % denominator < 0 ? 1 : 0);
}
Wide ceil_div(Wide numerator, Wide denominator) noexcept { return -floor_div(-numerator, denominator); }

// The sum of floor((step * x + offset) / modulus) over x in [0, count), in O(log) steps: what is left after the whole
// parts is a count of lattice points below a line, and seen from the other axis that is the same problem with smaller
// numbers. REQUIRES: step >= 0, modulus > 0; |step * count + offset| * count fits 126 bits.
Wide floor_sum(Wide count, Wide modulus, Wide step, Wide offset) noexcept {
  const Wide whole = floor_div(offset, modulus);
  Wide sum = whole * count;
  offset -= whole * modulus;
  while (true) {
    sum += step / modulus * (count * (count - 1) / 2);
    step %= modulus;
    sum += offset / modulus * count;
    offset %= modulus;
    const Wide reach = step * count + offset;
    if (reach < modulus) {
      return sum;
    }
    count = reach / modulus;
    offset = reach % modulus;
    std::swap(modulus, step);
  }
}

std::uintptr_t address(const Segment& segment) noexcept { return reinterpret_cast<std::uintptr_t>(segment.base); }

// One past the last byte of a segment.
Wide end_of(const Segment& segment, std::uint32_t blocks) noexcept {
  return Wide{address(segment)} + Wide{segment.stride} * (blocks - 1) + segment.bytes;
}

// Whether any piece of `a` overlaps any piece of `b`, exactly, however they interleave.
//
// Piece x of a and piece y of b overlap when low <= a.stride * x - b.stride * y <= high for
//     low = b.base - a.base - a.bytes + 1     and     high = b.base - a.base + b.bytes - 1.
// So a multiple of b.stride has to lie in [a.stride * x - high, a.stride * x - low], that is, the remainder of
// a.stride * x - low by b.stride has to be high - low at most; and y has to be in [0, blocks), which an x of the range
// [first, last] below grants. How many such x there are is a difference of two floor sums.
bool segments_overlap(const Segment& a, const Segment& b, std::uint32_t blocks) noexcept {
  const Wide distance = Wide{address(b)} - Wide{address(a)};
  const Wide low = distance - Wide{a.bytes} + 1;
  const Wide high = distance + Wide{b.bytes} - 1;
  const Wide a_stride = blocks == 1 ? 1 : Wide{a.stride};
  const Wide b_stride = blocks == 1 ? 1 : Wide{b.stride};
  const Wide last_block = blocks - 1;
  const Wide first = std::max<Wide>(0, ceil_div(low, a_stride));
  const Wide last = std::min(last_block, floor_div(b_stride * last_block + high, a_stride));
  if (first > last) {
    return false;
  }
  const Wide width = high - low;
  if (width + 1 >= b_stride) {
    return true;
  }
  const Wide count = last - first + 1;
  const Wide offset = a_stride * first - low;
  return floor_sum(count, b_stride, a_stride, offset) > floor_sum(count, b_stride, a_stride, offset - width - 1);
}

[[noreturn]] void throw_mismatch(const std::string& text, std::size_t segment, std::size_t other) {
  throw Error(ErrorCode::kLayoutMismatch, text,
              {{"segment", static_cast<std::int64_t>(segment)}, {"other_segment", static_cast<std::int64_t>(other)}});
}

void check_segments(std::uint32_t blocks, const std::vector<Segment>& segments) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const std::string name = "segment " + std::to_string(i);
    if (segment.bytes == 0) {
      throw_mismatch(name + " has pieces of zero bytes", i, i);
    }
    if (blocks == 0) {
      continue;
    }
    if (segment.base == nullptr) {
      throw_mismatch(name + " has no memory", i, i);
    }
    if (blocks > 1 && segment.stride < segment.bytes) {
      throw_mismatch("the pieces of " + name + " overlap each other: its stride of " + std::to_string(segment.stride) +
                         " bytes is less than their " + std::to_string(segment.bytes),
                     i, i);
    }
    // Both conditions bound the numbers of the overlap test as well.
    if (segment.stride > SIZE_MAX / 4 || end_of(segment, blocks) > Wide{SIZE_MAX}) {
      throw_mismatch(name + " reaches beyond the end of the address space", i, i);
    }
  }
}

void check_overlaps(std::uint32_t blocks, const std::vector<Segment>& segments) {
  // By ascending address, so that a segment is compared only with those that begin before it ends.
  std::vector<std::size_t> order(segments.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t i, std::size_t j) { return address(segments[i]) < address(segments[j]); });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Segment& segment = segments[order[i]];
    const Wide end = end_of(segment, blocks);
    for (std::size_t j = i + 1; j < order.size() && Wide{address(segments[order[j]])} < end; ++j) {
      if (segments_overlap(segment, segments[order[j]], blocks)) {
        const auto [first, second] = std::minmax(order[i], order[j]);
        throw_mismatch("pieces of segments " + std::to_string(first) + " and " + std::to_string(second) + " overlap",
                       first, second);
      }
    }
  }
}

class AdoptedArena final : public Arena {
 public:
  AdoptedArena(Medium medium, std::uint32_t blocks, std::vector<Segment> segments, std::shared_ptr<void> keepalive,
               std::shared_ptr<const CudaContext> context)
      : keepalive_(std::move(keepalive)) {
    if (blocks > kBlocksMax) {
      throw Error(
          ErrorCode::kArgument,
          std::to_string(blocks) + " blocks are more than a medium can have (" + std::to_string(kBlocksMax) + ")",
          {{"blocks", blocks}, {"blocks_max", kBlocksMax}});
    }
    if (segments.empty()) {
      throw Error(ErrorCode::kArgument, "a block needs at least one piece");
    }
    check_segments(blocks, segments);
    if (blocks > 0) {
      check_overlaps(blocks, segments);
    }
    medium_ = medium;
    blocks_ = blocks;
    for (const Segment& segment : segments) {
      block_bytes_ += segment.bytes;
    }
    segments_ = std::move(segments);
    context_ = std::move(context);
  }

 private:
  std::shared_ptr<void> keepalive_;
};

class AbsentArena final : public Arena {
 public:
  AbsentArena(Medium medium, std::uint32_t blocks, std::size_t block_bytes) {
    medium_ = medium;
    blocks_ = blocks;
    block_bytes_ = block_bytes;
  }
};

}  // namespace

std::shared_ptr<Arena> make_absent_arena(Medium medium, std::uint32_t blocks, std::size_t block_bytes) {
  return std::make_shared<AbsentArena>(medium, blocks, block_bytes);
}

std::shared_ptr<Arena> make_adopted_arena(Medium medium, std::uint32_t blocks, std::vector<Segment> segments,
                                          std::shared_ptr<void> keepalive, std::shared_ptr<const CudaContext> context) {
  return std::make_shared<AdoptedArena>(medium, blocks, std::move(segments), std::move(keepalive), std::move(context));
}

}  // namespace kvpool
