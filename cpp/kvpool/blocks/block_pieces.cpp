#include "kvpool/blocks/block_pieces.h"

#include <algorithm>
#include <string>
#include <vector>

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
      list_of_(zeros(pieces == 1 ? 0 : numbers / piece_units + 1)),
      lists_(zeros(pieces == 1 ? 0 : std::size_t{blocks} * pieces)) {}

std::span<const std::uint32_t> BlockPieces::units_of(std::uint32_t block) const noexcept {
  KVPOOL_DCHECK(block < numbers_ && !whole(block));
  return {list(list_of_[slot_of(block)]), pieces_};
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
  list_of_[slot_of(block)] = number;
  ++scattered_;
}

void BlockPieces::forget(std::uint32_t block) noexcept {
  KVPOOL_DCHECK(block < numbers_ && !whole(block));
  const std::uint32_t number = list_of_[slot_of(block)];
  list(number)[0] = free_list_;
  free_list_ = number;
  list_of_[slot_of(block)] = 0;
  --scattered_;
}

void BlockPieces::audit(const char* name, const std::function<bool(std::uint32_t block)>& has_units) const {
  const auto fail = [&](const char* what, std::uint32_t block) {
    throw Error(ErrorCode::kAudit, std::string(name) + " pieces: " + what + " (block " + std::to_string(block) + ")",
                {{"block", block}});
  };
  if (pieces_ == 1) return;
  std::vector<bool> seen(std::size_t{lists_used_} + 1);
  std::uint32_t scattered = 0;
  for (std::uint32_t slot = 0; slot <= numbers_ / piece_units_; ++slot) {
    const std::uint32_t number = list_of_[slot];
    if (number == 0) continue;
    if (number > lists_used_ || seen[number]) fail("two blocks have one list, or a block has none", slot);
    seen[number] = true;
    ++scattered;
    const std::uint32_t block = list(number)[0];
    if (slot_of(block) != slot) fail("a block has the list of another", block);
    if (!has_units(block)) fail("a free block is scattered", block);
    if (std::ranges::min(std::span(list(number), pieces_)) != block) {
      fail("a block is not the least of its units", block);
    }
  }
  if (scattered != scattered_) fail("a wrong count of scattered blocks", scattered);
  std::uint32_t free = 0;
  for (std::uint32_t number = free_list_; number != 0; number = list(number)[0]) {
    if (number > lists_used_ || seen[number]) fail("a free list is used", number);
    seen[number] = true;
    ++free;
  }
  if (free + scattered != lists_used_) fail("a list is neither used nor free", free);
}

std::uint64_t BlockPieces::metadata_bytes() const noexcept {
  if (pieces_ == 1) return 0;
  return (std::uint64_t{numbers_ / piece_units_ + 1} + std::uint64_t{lists_used_} * pieces_) * sizeof(std::uint32_t);
}

}  // namespace kvpool
