#include "kvpool/disk/plan.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

[[noreturn]] void throw_position(const std::string& what, std::size_t i) {
  throw Error(ErrorCode::kArgument, "operation " + std::to_string(i) + ": " + what,
              {{"position", static_cast<std::int64_t>(i)}});
}

// Adds [offset, offset + bytes) of the block, cut at pieces.
void add_spans(Op& op, std::uint64_t offset, std::uint64_t bytes, std::byte* memory) {
  while (bytes > 0) {
    const std::uint64_t within = offset % kDiskPieceBytes;
    const std::uint64_t part = std::min(bytes, kDiskPieceBytes - within);
    op.spans.push_back({static_cast<std::uint32_t>(offset / kDiskPieceBytes), static_cast<std::uint32_t>(within),
                        static_cast<std::uint32_t>(part), memory});
    offset += part;
    memory += part;
    bytes -= part;
  }
}

// Consecutive pieces of an operation.
struct Extent {
  std::uint64_t offset;
  std::size_t bytes;
  Op* op;
  std::uint32_t piece;
  std::uint32_t pieces;
};

void add_extents(std::vector<Extent>& extents, Op& op, const BlockShape& shape, std::uint64_t bytes_max, bool write) {
  std::uint32_t last = ~std::uint32_t{0};
  const auto add = [&](std::uint32_t piece) {
    const std::size_t bytes = shape.stored_bytes(piece);
    if (last != ~std::uint32_t{0} && piece == last + 1 && extents.back().bytes + bytes <= bytes_max) {
      ++extents.back().pieces;
      extents.back().bytes += bytes;
    } else {
      extents.push_back({shape.offset(op.slot, piece), bytes, &op, piece, 1});
    }
    last = piece;
  };
  if (write) {
    for (std::uint32_t piece = 0; piece < shape.pieces(); ++piece) add(piece);
  } else {
    for (const PieceSpan& span : op.spans) {
      if (span.piece != last) add(span.piece);
    }
  }
}

}  // namespace

std::size_t BlockShape::piece_bytes(std::uint32_t piece) const noexcept {
  return std::min(kDiskPieceBytes, block_bytes - piece * kDiskPieceBytes);
}

std::size_t BlockShape::stored_bytes(std::uint32_t piece) const noexcept {
  return std::min(kDiskPieceBytes, slot_bytes - piece * kDiskPieceBytes);
}

void plan_write(Op& op, const BlockShape& shape, const DiskWrite& write, std::size_t i) {
  if (write.meta.size() > kDiskMetaBytesMax) throw_position("more meta than an entry may have", i);
  std::uint64_t offset = 0;
  for (const std::span<const std::byte> span : write.spans) {
    if (span.size() > shape.block_bytes - offset) throw_position("its spans are more than a block", i);
    add_spans(op, offset, span.size(), const_cast<std::byte*>(span.data()));
    offset += span.size();
  }
  if (offset != shape.block_bytes) throw_position("its spans are less than a block", i);
  op.kind = OpKind::kWrite;
  op.slot = write.slot;
  op.generation = write.generation;
  op.meta.assign(write.meta.begin(), write.meta.end());
  op.checksums.resize(shape.pieces());
}

void plan_read(Op& op, const BlockShape& shape, const DiskRead& read, std::size_t i) {
  const DiskRange whole{0, shape.block_bytes};
  const std::span<const DiskRange> ranges = read.ranges.empty() ? std::span(&whole, 1) : std::span(read.ranges);
  std::size_t at = 0;  // the span that is being filled, and how much of it is
  std::size_t filled = 0;
  for (const DiskRange& range : ranges) {
    if (range.bytes == 0 || range.bytes > shape.block_bytes || range.offset > shape.block_bytes - range.bytes) {
      throw_position("a range is empty or not in the block", i);
    }
    for (std::uint64_t done = 0; done < range.bytes;) {
      while (at < read.spans.size() && filled == read.spans[at].size()) ++at, filled = 0;
      if (at == read.spans.size()) throw_position("its spans are less than its ranges", i);
      const std::uint64_t part = std::min<std::uint64_t>(range.bytes - done, read.spans[at].size() - filled);
      add_spans(op, range.offset + done, part, read.spans[at].data() + filled);
      filled += part;
      done += part;
    }
  }
  while (at < read.spans.size() && filled == read.spans[at].size()) ++at, filled = 0;
  if (at != read.spans.size()) throw_position("its spans are more than its ranges", i);
  std::stable_sort(op.spans.begin(), op.spans.end(),
                   [](const PieceSpan& a, const PieceSpan& b) { return a.piece < b.piece; });
  op.kind = OpKind::kRead;
  op.slot = read.slot;
  op.generation = read.generation;
}

void plan_ios(Batch& batch, const BlockShape& shape, std::uint64_t bytes_max, bool write) {
  std::vector<Extent> extents;
  for (Op& op : batch.ops) {
    if (!op.ended()) add_extents(extents, op, shape, bytes_max, write);
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (const Extent& extent : extents) {
    StoreIo* io = batch.planned.empty() ? nullptr : &batch.planned.back();
    if (io == nullptr || io->offset + io->bytes != extent.offset || io->bytes + extent.bytes > bytes_max) {
      StoreIo* const last = io;
      io = &batch.planned.emplace_back();
      io->write = write;
      io->offset = extent.offset;
      if (last != nullptr) last->next_io = io;
    }
    if (extent.op->ios == 0) extent.op->first_io = io;
    io->parts.push_back({extent.op, extent.piece, extent.pieces, io->bytes});
    io->bytes += extent.bytes;
    ++extent.op->ios;
    ++extent.op->ios_planned;
  }
  batch.queued.reserve(batch.planned.size());
}

std::span<const PieceSpan> spans_of(const Op& op, std::uint32_t piece) noexcept {
  const auto before = [](const PieceSpan& span, std::uint32_t value) { return span.piece < value; };
  const auto first = std::lower_bound(op.spans.begin(), op.spans.end(), piece, before);
  auto last = first;
  while (last != op.spans.end() && last->piece == piece) ++last;
  return {first, last};
}

}  // namespace kvpool
