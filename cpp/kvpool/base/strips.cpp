#include "kvpool/base/strips.h"

#include <algorithm>

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

// Of an address only what says where the block lies. A run of neighbours may not cross into another medium: block
// 2^24 - 1 plus one carries into the generation's bits, which are zero here.
constexpr Address kPlaceMask = (((Address{1} << kMediumBits) - 1) << kMediumShift) | (kBlocksMax - 1);

constexpr Address place_of(Address address) noexcept { return address & kPlaceMask; }

// Walks along a block's content.
class Cursor {
 public:
  Cursor(const MediumSpan& span, std::uint64_t at) noexcept : segments_(span.segments) {
    while (segment_ < segments_.size() && at >= segments_[segment_].bytes) at -= segments_[segment_++].bytes;
    at_ = static_cast<std::size_t>(at);
    KVPOOL_DCHECK(segment_ < segments_.size());
  }
  // Bytes until the segment ends.
  std::size_t left() const noexcept { return segments_[segment_].bytes - at_; }
  std::byte* base() const noexcept { return segments_[segment_].base + at_; }
  std::size_t stride() const noexcept { return segments_[segment_].stride; }
  void advance(std::size_t bytes) noexcept {
    at_ += bytes;
    if (at_ == segments_[segment_].bytes) {
      ++segment_;
      at_ = 0;
    }
  }

 private:
  std::span<const Segment> segments_;
  std::size_t segment_ = 0;
  std::size_t at_ = 0;
};

// The same in one block, which may be cut: see MediumSpan::places.
class PlacedCursor {
 public:
  PlacedCursor(const MediumSpan& span, std::uint32_t block, std::uint64_t at) noexcept : span_(span), block_(block) {
    if (span.places != nullptr) {  // its parts are of one size, and there may be many
      const std::size_t bytes = span.segments[0].bytes / span.places->pieces();
      index_ = static_cast<std::size_t>(at / bytes);
      at %= bytes;
    }
    enter();
    while (at >= bytes_) {
      at -= bytes_;
      ++index_;
      enter();
    }
    at_ = static_cast<std::size_t>(at);
  }
  std::size_t left() const noexcept { return bytes_ - at_; }
  std::byte* base() const noexcept { return base_ + at_; }
  void advance(std::size_t bytes) noexcept {
    at_ += bytes;
    if (at_ < bytes_) return;
    at_ = 0;
    ++index_;
    enter();
  }

 private:
  // The part of the content with this index; behind the last one nothing.
  void enter() noexcept {
    if (index_ >= (span_.places == nullptr ? span_.segments.size() : span_.places->pieces())) return;
    const Segment& segment = span_.segments[span_.places == nullptr ? index_ : 0];
    std::uint32_t place = block_;
    bytes_ = segment.bytes;
    if (span_.places != nullptr) {
      place = span_.places->unit_of(block_, static_cast<std::uint32_t>(index_));
      bytes_ /= span_.places->pieces();
    }
    base_ = segment.base + place * segment.stride;
  }

  const MediumSpan& span_;
  const std::uint32_t block_;
  std::size_t index_ = 0;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t at_ = 0;
};

std::byte* end_of(const iovec& piece) noexcept { return static_cast<std::byte*>(piece.iov_base) + piece.iov_len; }

}  // namespace

std::size_t run_length(std::span<const Address> from, std::span<const Address> to) noexcept {
  const Address source = place_of(from[0]);
  const Address target = place_of(to[0]);
  std::size_t run = 1;
  while (run < from.size() && place_of(from[run]) == source + run && place_of(to[run]) == target + run) ++run;
  return run;
}

bool PieceBatch::add_run(std::span<const PlannedStrip> plan, std::size_t source, std::size_t target, std::size_t run) {
  for (const PlannedStrip& strip : plan) {
    const std::byte* a = strip.from + source * strip.from_stride;
    std::byte* b = strip.to + target * strip.to_stride;
    if (run == 1 || strip.joins()) {
      if (!add(CopyPiece{b, a, strip.bytes * run})) return false;
      continue;
    }
    for (std::size_t k = 0; k < run; ++k) {
      if (!add(CopyPiece{b + k * strip.to_stride, a + k * strip.from_stride, strip.bytes})) return false;
    }
  }
  return true;
}

void plan_strips(const MediumSpan& from, const MediumSpan& to, std::span<const BlockStrip> strips, bool merge,
                 std::vector<PlannedStrip>& plan) {
  if (from.blocks == 0 || to.blocks == 0) return;
  KVPOOL_CHECK(from.places == nullptr && to.places == nullptr);
  const std::size_t first = plan.size();
  for (const BlockStrip& strip : strips) {
    if (strip.bytes == 0) continue;
    Cursor source(from, strip.from);
    Cursor target(to, strip.to);
    for (std::uint64_t left = strip.bytes; left > 0;) {
      const std::size_t bytes = std::min({static_cast<std::size_t>(left), source.left(), target.left()});
      const PlannedStrip next{source.base(), target.base(), bytes, source.stride(), target.stride()};
      PlannedStrip* last = merge && plan.size() > first ? &plan.back() : nullptr;
      if (last != nullptr && last->from + last->bytes == next.from && last->to + last->bytes == next.to &&
          last->from_stride == next.from_stride && last->to_stride == next.to_stride) {
        last->bytes += bytes;
      } else {
        plan.push_back(next);
      }
      source.advance(bytes);
      target.advance(bytes);
      left -= bytes;
    }
  }
}

const StripPlan::Range& StripPlan::range_of(Address from, Address to) {
  KVPOOL_DCHECK(is_medium(medium_bits_of(from)) && is_medium(medium_bits_of(to)));
  const Medium source = medium_of(from);
  const Medium target = medium_of(to);
  Range& range = ranges_[source][target];
  if (!range.planned) {
    range.first = static_cast<std::uint32_t>(plan_.size());
    plan_strips(from_[source], to_[target], strips_, merge_, plan_);
    range.end = static_cast<std::uint32_t>(plan_.size());
    for (std::uint32_t i = range.first; i < range.end; ++i) range.joining += plan_[i].joins() ? 1 : 0;
    range.planned = true;
  }
  return range;
}

bool StripPlan::cut(Address from, Address to) const noexcept {
  return from_[medium_of(from)].places != nullptr || to_[medium_of(to)].places != nullptr;
}

template <class Visit>
bool StripPlan::for_each_cut(std::span<const Address> from, std::span<const Address> to, std::size_t& i,
                             Visit&& visit) const {
  CopyPiece piece{nullptr, nullptr, 0};  // what comes next may join it
  for (; i < from.size() && cut(from[i], to[i]); ++i) {
    for (const BlockStrip& strip : strips_) {
      if (strip.bytes == 0) continue;
      PlacedCursor source(from_[medium_of(from[i])], block_of(from[i]), strip.from);
      PlacedCursor target(to_[medium_of(to[i])], block_of(to[i]), strip.to);
      for (std::uint64_t left = strip.bytes; left > 0;) {
        const std::size_t bytes = std::min({static_cast<std::size_t>(left), source.left(), target.left()});
        if (merge_ && piece.bytes > 0 && piece.src + piece.bytes == source.base() &&
            piece.dst + piece.bytes == target.base()) {
          piece.bytes += bytes;
        } else {
          if (piece.bytes > 0 && !visit(piece)) return false;
          piece = {target.base(), source.base(), bytes};
        }
        source.advance(bytes);
        target.advance(bytes);
        left -= bytes;
      }
    }
  }
  return piece.bytes == 0 || visit(piece);
}

bool StripPlan::emit_to(std::span<const Address> from, std::span<const Address> to, PieceBatch::Call call,
                        void* context) {
  KVPOOL_DCHECK(from.size() == to.size());
  std::array<CopyPiece, kPieceBatch> room;
  PieceBatch batch(room, call, context);
  for (std::size_t i = 0; i < from.size();) {
    if (cut(from[i], to[i])) [[unlikely]] {
      if (!for_each_cut(from, to, i, [&](const CopyPiece& piece) { return batch.add(piece); })) return false;
      continue;
    }
    const Range& range = range_of(from[i], to[i]);
    const auto plan = std::span<const PlannedStrip>(plan_).subspan(range.first, range.end - range.first);
    const std::size_t run = merge_ ? run_length(from.subspan(i), to.subspan(i)) : 1;
    if (!batch.add_run(plan, block_of(from[i]), block_of(to[i]), run)) return false;
    i += run;
  }
  return batch.finish();
}

std::uint64_t StripPlan::count(std::span<const Address> from, std::span<const Address> to) {
  std::uint64_t pieces = 0;
  for (std::size_t i = 0; i < from.size();) {
    if (cut(from[i], to[i])) [[unlikely]] {
      for_each_cut(from, to, i, [&](const CopyPiece&) { return ++pieces > 0; });
      continue;
    }
    const Range& range = range_of(from[i], to[i]);
    const std::size_t run = merge_ ? run_length(from.subspan(i), to.subspan(i)) : 1;
    pieces += range.joining + (range.end - range.first - range.joining) * run;
    i += run;
  }
  return pieces;
}

std::uint64_t count_runs(std::span<const Address> from, std::span<const Address> to) noexcept {
  std::uint64_t runs = 0;
  for (std::size_t i = 0; i < from.size(); i += run_length(from.subspan(i), to.subspan(i))) ++runs;
  return runs;
}

void ContentPlan::emit(std::span<const Address> blocks, bool merge, std::vector<iovec>& pieces) const {
  struct Part {  // of a range, within one segment
    std::byte* base;
    std::size_t stride;
    std::size_t bytes;
  };
  MediumMap<std::vector<Part>> parts;
  const auto add = [&](std::byte* base, std::size_t bytes) {
    if (merge && !pieces.empty() && end_of(pieces.back()) == base) {
      pieces.back().iov_len += bytes;
    } else {
      pieces.push_back(iovec{base, bytes});
    }
  };
  for (const ContentRange& range : ranges_) {
    for (std::vector<Part>& of_medium : parts) of_medium.clear();
    for (const Address address : blocks) {
      KVPOOL_DCHECK(is_medium(medium_bits_of(address)));
      const Medium medium = medium_of(address);
      if (spans_[medium].places != nullptr) [[unlikely]] {
        PlacedCursor cursor(spans_[medium], block_of(address), range.at);
        for (std::uint64_t left = range.bytes; left > 0;) {
          const std::size_t bytes = std::min(static_cast<std::size_t>(left), cursor.left());
          add(cursor.base(), bytes);
          cursor.advance(bytes);
          left -= bytes;
        }
        continue;
      }
      if (parts[medium].empty()) {
        Cursor cursor(spans_[medium], range.at);
        for (std::uint64_t left = range.bytes; left > 0;) {
          const std::size_t bytes = std::min(static_cast<std::size_t>(left), cursor.left());
          parts[medium].push_back(Part{cursor.base(), cursor.stride(), bytes});
          cursor.advance(bytes);
          left -= bytes;
        }
      }
      const std::size_t block = block_of(address);
      for (const Part& part : parts[medium]) add(part.base + block * part.stride, part.bytes);
    }
  }
}

std::uint64_t TransferPart::bytes() const noexcept { return strip_bytes(strips) * blocks; }

TransferParts::TransferParts(std::span<const BlockStrip> strips, std::size_t blocks, const PartLimits& limits)
    : blocks_(blocks) {
  KVPOOL_DCHECK(limits.bytes_max > 0 && limits.blocks_max > 0 && limits.strips_max > 0);
  KVPOOL_DCHECK(limits.strips_max <= limits.pieces_max);
  std::uint64_t group_bytes = limits.bytes_max;  // of the last group: full, so that the first strip begins one
  const auto open_group = [&] {
    groups_.push_back(Group{strips_.size(), 0});
    group_bytes = 0;
  };
  for (BlockStrip strip : strips) {
    while (strip.bytes > 0) {
      const std::uint64_t room = limits.bytes_max - group_bytes;
      // Short strips stay whole.
      const bool whole_in_next = strip.bytes > room && strip.bytes <= limits.bytes_max / 4;
      if (room == 0 || whole_in_next || groups_.back().count == limits.strips_max) open_group();
      const std::uint64_t bytes = std::min(strip.bytes, limits.bytes_max - group_bytes);
      strips_.push_back(BlockStrip{strip.from, strip.to, bytes});
      ++groups_.back().count;
      group_bytes += bytes;
      strip = BlockStrip{strip.from + bytes, strip.to + bytes, strip.bytes - bytes};
    }
  }
  if (groups_.size() == 1) {
    const std::size_t by_bytes = static_cast<std::size_t>(limits.bytes_max / group_bytes);
    const std::size_t by_pieces = limits.pieces_max / groups_[0].count;
    blocks_each_ = std::min({by_bytes, by_pieces, limits.blocks_max});
  }
}

std::size_t TransferParts::size() const noexcept {
  return (blocks_ + blocks_each_ - 1) / blocks_each_ * groups_.size();
}

TransferPart TransferParts::operator[](std::size_t index) const noexcept {
  const Group& group = groups_[index % groups_.size()];
  const std::size_t first = index / groups_.size() * blocks_each_;
  return TransferPart{std::span(strips_).subspan(group.first, group.count), first,
                      std::min(blocks_each_, blocks_ - first)};
}

bool blocks_exist(std::span<const Address> addresses, const MediaSpans& spans) noexcept {
  std::array<std::uint32_t, std::size_t{1} << kMediumBits> limits{};  // by an address's medium bits
  for (std::size_t i = 0; i < spans.size(); ++i) limits[i + 1] = spans[i].blocks;
  bool exist = true;
  for (const Address address : addresses) exist &= block_of(address) < limits[medium_bits_of(address)];
  return exist;
}

bool strips_fit(std::span<const BlockStrip> strips, std::uint64_t from_bytes, std::uint64_t to_bytes) noexcept {
  return std::all_of(strips.begin(), strips.end(), [&](const BlockStrip& strip) {
    return strip.bytes > 0 && strip.bytes <= from_bytes && strip.from <= from_bytes - strip.bytes &&
           strip.bytes <= to_bytes && strip.to <= to_bytes - strip.bytes;
  });
}

bool ranges_fit(std::span<const ContentRange> ranges, std::uint64_t content_bytes) noexcept {
  return std::all_of(ranges.begin(), ranges.end(), [&](const ContentRange& range) {
    return range.bytes > 0 && range.bytes <= content_bytes && range.at <= content_bytes - range.bytes;
  });
}

bool ranges_overlap(std::span<const ContentRange> ranges) {
  std::vector<ContentRange> sorted(ranges.begin(), ranges.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i - 1].at + sorted[i - 1].bytes > sorted[i].at) return true;
  }
  return false;
}

std::uint64_t strip_bytes(std::span<const BlockStrip> strips) noexcept {
  std::uint64_t bytes = 0;
  for (const BlockStrip& strip : strips) bytes += strip.bytes;
  return bytes;
}

}  // namespace kvpool
