#include "kvpool/blocks/block_pieces.h"

#include <algorithm>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {

// calloc, because large zeroed memory comes from the kernel untouched.
BlockPieces::Words BlockPieces::zeros(std::size_t words) {
  if (words == 0) return nullptr;
  Words memory(static_cast<std::uint32_t*>(std::calloc(words, sizeof(std::uint32_t))));
  if (memory == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "no memory for the places of blocks in pieces",
                {{"bytes", static_cast<std::int64_t>(words * sizeof(std::uint32_t))}});
  }
  return memory;
}

BlockPieces::BlockPieces(std::uint32_t numbers, std::uint32_t blocks, std::uint32_t pieces, std::uint32_t piece_units)
    : numbers_(numbers),
      blocks_(blocks),
      pieces_(pieces),
      piece_units_(piece_units),
      list_of_(zeros(pieces == 1 ? 0 : numbers)),
      lists_(zeros(pieces == 1 ? 0 : std::size_t{blocks} * pieces)) {}

std::span<const std::uint32_t> BlockPieces::units_of(std::uint32_t block) const noexcept {
  KVPOOL_DCHECK(block < numbers_ && !whole(block));
  return {list(list_of_[block]), pieces_};
}

void BlockPieces::scatter(std::uint32_t block, std::span<const std::uint32_t> units) noexcept {
  KVPOOL_DCHECK(pieces_ > 1 && block < numbers_ && whole(block) && units.size() == pieces_ && scattered_ < blocks_);
  std::uint32_t number = free_list_;
  if (number == 0) {
    number = ++lists_used_;
  } else {
    free_list_ = list(number)[0];
  }
  std::ranges::copy(units, list(number));
  list_of_[block] = number;
  ++scattered_;
}

void BlockPieces::forget(std::uint32_t block) noexcept {
  KVPOOL_DCHECK(block < numbers_ && !whole(block));
  const std::uint32_t number = list_of_[block];
  list(number)[0] = free_list_;
  free_list_ = number;
  list_of_[block] = 0;
  --scattered_;
}

std::uint64_t BlockPieces::metadata_bytes() const noexcept {
  if (pieces_ == 1) return 0;
  return (std::uint64_t{numbers_} + std::uint64_t{lists_used_} * pieces_) * sizeof(std::uint32_t);
}

}  // namespace kvpool
