// From the operations of a batch to I/Os: spans are cut at pieces, and what is adjacent in the file goes together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/disk/batch.h"
#include "kvpool/disk/disk_store.h"

namespace kvpool {

struct BlockShape {
  std::uint64_t block_bytes;
  std::uint64_t slot_bytes;

  explicit BlockShape(std::uint64_t bytes) noexcept
      : block_bytes(bytes), slot_bytes((bytes + kDiskAlignment - 1) / kDiskAlignment * kDiskAlignment) {}
  std::uint32_t pieces() const noexcept {
    return static_cast<std::uint32_t>((block_bytes + kDiskPieceBytes - 1) / kDiskPieceBytes);
  }
  std::size_t piece_bytes(std::uint32_t piece) const noexcept;   // without padding
  std::size_t stored_bytes(std::uint32_t piece) const noexcept;  // with it
  std::uint64_t offset(std::uint32_t slot, std::uint32_t piece) const noexcept {
    return kDiskAlignment + slot * slot_bytes + piece * kDiskPieceBytes;
  }
};

// Each throws kArgument (position: `i`), when the spans do not match.
void plan_write(Op& op, const BlockShape& shape, const DiskWrite& write, std::size_t i);
void plan_read(Op& op, const BlockShape& shape, const DiskRead& read, std::size_t i);

// Makes the batch's I/Os, of at most `bytes_max` each; counts them in the operations. A write has all pieces of its
// block, a read those of its spans.
void plan_ios(Batch& batch, const BlockShape& shape, std::uint64_t bytes_max, bool write);

// The spans of this piece. REQUIRES: they are in order, as plan_write() and plan_read() make them.
std::span<const PieceSpan> spans_of(const Op& op, std::uint32_t piece) noexcept;

}  // namespace kvpool
