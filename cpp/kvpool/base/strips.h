// Turns lists of source and destination blocks into the byte ranges of a copy, a write or a gather list.
//
// A transfer moves the same part of each of its blocks: a list of strips, each a range of the source block's content
// that becomes a range of the destination block's content. A whole block is one strip, and so is a layer of it; the
// heads for another tensor-parallel rank are one strip for each layer's K and V. Segments (segment.h) lay contents out
// in memory, and may be cut at different places on the two sides, so strips are cut at the ends of both:
//
//   source segments        |----------A---------|------B------|
//   strip                       [==================)
//   destination segments   |-------X-------|---------Y--------|
//   pieces                      [==========)[====)[=)
//
// Thread-safety: the functions are pure; a plan belongs to one thread.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/segment.h"

namespace kvpool {

// [from, from + bytes) of the source block's content becomes [to, to + bytes) of the destination block's.
struct BlockStrip {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t bytes;
};

// Bytes that are contiguous on both sides: for block pair (a, b), `bytes` from `from + a * from_stride` to
// `to + b * to_stride`.
struct PlannedStrip {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
  std::size_t from_stride;
  std::size_t to_stride;
  // Whether blocks that are neighbours on both sides form one run of bytes.
  bool joins() const noexcept { return bytes == from_stride && bytes == to_stride; }
};

// Appends the plan of these strips to `plan`. `merge`: joins strips that are contiguous on both sides. Media without
// blocks have no plan. REQUIRES: the strips lie within the content of both sides, whose blocks are not cut.
void plan_strips(const MediumSpan& from, const MediumSpan& to, std::span<const BlockStrip> strips, bool merge,
                 std::vector<PlannedStrip>& plan);

// How many pairs at the front form a run: block a + k goes to block b + k. REQUIRES: equal lengths, not empty.
std::size_t run_length(std::span<const Address> from, std::span<const Address> to) noexcept;

// Passes pieces on in full batches; only the last may be smaller. Never allocates.
class PieceBatch {
 public:
  using Call = bool (*)(void* context, std::span<const CopyPiece> pieces);  // false: stop

  // `room` and `context` outlive the batch. REQUIRES: `room` is not empty.
  PieceBatch(std::span<CopyPiece> room, Call call, void* context) noexcept
      : room_(room), call_(call), context_(context) {}

  // Adds one piece, or the pieces of `run` neighbouring block pairs. Returns false when the call did: stop then.
  bool add(const CopyPiece& piece) {
    room_[used_++] = piece;
    if (used_ < room_.size()) return true;
    used_ = 0;
    return call_(context_, room_);
  }
  bool add_run(std::span<const PlannedStrip> plan, std::size_t source, std::size_t target, std::size_t run);
  // Passes on the rest.
  bool finish() { return used_ == 0 || call_(context_, room_.first(used_)); }

 private:
  const std::span<CopyPiece> room_;
  const Call call_;
  void* const context_;
  std::size_t used_ = 0;
};

inline constexpr std::size_t kPieceBatch = 1024;

// The pieces to write for pairs of blocks, of any media. Both spans outlive the plan.
class StripPlan {
 public:
  // `merge`: joins what is contiguous on both sides. REQUIRES: as plan_strips, for every pair of media that emit()
  // gets.
  StripPlan(const MediaSpans& from, const MediaSpans& to, std::span<const BlockStrip> strips, bool merge) noexcept
      : from_(from), to_(to), strips_(strips), merge_(merge) {}

  // Calls sink(std::span<const CopyPiece>) -> bool, with at most kPieceBatch pieces at a time, until it returns false;
  // then returns false too. Pieces come block by block, runs together. REQUIRES: from.size() == to.size(), and the
  // addresses name blocks of the spans.
  template <class Sink>
  bool emit(std::span<const Address> from, std::span<const Address> to, Sink&& sink) {
    using Plain = std::remove_reference_t<Sink>;
    const auto call = [](void* context, std::span<const CopyPiece> pieces) -> bool {
      return (*static_cast<Plain*>(context))(pieces);
    };
    return emit_to(from, to, call, const_cast<std::remove_const_t<Plain>*>(&sink));
  }

  // How many pieces emit() makes.
  std::uint64_t count(std::span<const Address> from, std::span<const Address> to);

 private:
  struct Range {
    std::uint32_t first = 0;
    std::uint32_t end = 0;
    std::uint32_t joining = 0;  // of these, strips that join
    bool planned = false;
  };

  bool emit_to(std::span<const Address> from, std::span<const Address> to, PieceBatch::Call call, void* context);
  const Range& range_of(Address from, Address to);
  bool cut(Address from, Address to) const noexcept;
  // visit(piece) -> bool for each piece of these pairs from `i` on, as far as a side of them may be cut, until it
  // returns false, then false too. `i` is behind them then.
  template <class Visit>
  bool for_each_cut(std::span<const Address> from, std::span<const Address> to, std::size_t& i, Visit&& visit) const;

  const MediaSpans& from_;
  const MediaSpans& to_;
  const std::span<const BlockStrip> strips_;
  const bool merge_;
  std::vector<PlannedStrip> plan_;
  MediumPairMap<Range> ranges_{};  // of plan_, by medium of source and destination
};

// The number of runs: [i, i + k) is a run when its blocks are neighbours on both sides.
std::uint64_t count_runs(std::span<const Address> from, std::span<const Address> to) noexcept;

// A range of a block's content.
struct ContentRange {
  std::uint64_t at;
  std::uint64_t bytes;
};

// One side's view of a transfer: where the bytes that it sends or places lie, in the order in which they travel: range
// by range, within a range block by block in list order, within a block by content. The order depends only on the
// ranges and the number of blocks, so both sides compute the same order, whatever their layouts.
class ContentPlan {
 public:
  // REQUIRES: the ranges lie within the content of every medium that emit() gets. Both outlive the plan.
  ContentPlan(const MediaSpans& spans, std::span<const ContentRange> ranges) noexcept
      : spans_(spans), ranges_(ranges) {}

  // Appends to `pieces`. `merge`: joins pieces that are neighbours both in memory and in that order.
  // REQUIRES: the addresses name blocks of the spans.
  void emit(std::span<const Address> blocks, bool merge, std::vector<iovec>& pieces) const;

 private:
  const MediaSpans& spans_;
  const std::span<const ContentRange> ranges_;
};

// A share of a transfer's work: some of its blocks, and some strips of these.
struct TransferPart {
  std::span<const BlockStrip> strips;
  std::size_t first_block;  // of the list
  std::size_t blocks;
  std::uint64_t bytes() const noexcept;
};

struct PartLimits {
  std::uint64_t bytes_max;
  std::size_t blocks_max = SIZE_MAX;
  std::size_t strips_max = SIZE_MAX;
  std::size_t pieces_max = SIZE_MAX;  // strips times blocks
};

// Cuts a transfer into parts of about equal work. Every byte is in one part; parts are in list order, and a block
// longer than a part is cut. Thread-safe after construction.
class TransferParts {
 public:
  // REQUIRES: all limits are at least 1, and strips_max is not above pieces_max.
  TransferParts(std::span<const BlockStrip> strips, std::size_t blocks, const PartLimits& limits);
  std::size_t size() const noexcept;
  TransferPart operator[](std::size_t index) const noexcept;

 private:
  struct Group {  // strips that stay together
    std::size_t first;
    std::size_t count;
  };
  std::vector<BlockStrip> strips_;
  std::vector<Group> groups_;
  std::size_t blocks_;
  std::size_t blocks_each_ = 1;  // in a part
};

// Checks of input from another program. Their sums cannot overflow.

// Whether every address names a block of these media. Does not check who owns it.
bool blocks_exist(std::span<const Address> addresses, const MediaSpans& spans) noexcept;
// Whether every strip is not empty and lies within contents of these lengths.
bool strips_fit(std::span<const BlockStrip> strips, std::uint64_t from_bytes, std::uint64_t to_bytes) noexcept;
// Whether every range is not empty and lies within a content of this length.
bool ranges_fit(std::span<const ContentRange> ranges, std::uint64_t content_bytes) noexcept;
// Whether two ranges share a byte. REQUIRES: ranges_fit.
bool ranges_overlap(std::span<const ContentRange> ranges);
// Sum of the strips' bytes. REQUIRES: strips_fit.
std::uint64_t strip_bytes(std::span<const BlockStrip> strips) noexcept;

}  // namespace kvpool
