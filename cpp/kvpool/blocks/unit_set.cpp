#include "kvpool/blocks/unit_set.h"

#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr BlockState kTaken = BlockState::kActive;

constexpr int kBlockShift = 32;  // above the owner

// Of the first unit of an extent that is taken.
std::uint32_t taken_length(const BlockMeta& first) noexcept { return first.mark; }

[[noreturn]] void units_failed(const char* name, const char* what, std::uint32_t unit) {
  throw Error(ErrorCode::kAudit, std::string(name) + " units: " + what + " (unit " + std::to_string(unit) + ")",
              {{"unit", unit}});
}

}  // namespace

UnitSet::UnitSet(std::uint32_t units)
    : meta_(make_meta(units)), units_(units), free_units_(units), free_(meta_.get(), units, &bin_runs_) {}

std::uint32_t UnitSet::longest_free() const noexcept {
  const std::uint32_t head = free_.longest();
  return head == FreeSet::kNone ? 0 : free_.length(head);
}

std::size_t UnitSet::fits(std::uint32_t size, std::size_t most) const noexcept {
  if (size == 1) return free_units_ < most ? free_units_ : most;
  return size > free_units_ ? 0 : free_.fits(size, most);
}

void UnitSet::take_run(std::uint32_t first, std::uint32_t size, std::uint32_t n, std::uint32_t owner) noexcept {
  free_.remove_front(first, size * n);
  free_units_ -= size * n;
  for (std::uint32_t i = 0; i < n; ++i, first += size) {
    meta_[first + size - 1].set_state(kTaken);
    BlockMeta& head = meta_[first];
    head.set_state(kTaken);
    head.mark = size;
    head.tag = std::uint64_t{first} << kBlockShift | owner;
  }
}

void UnitSet::give_back(std::uint32_t first, std::uint32_t size, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(n > 0);
  for (std::uint32_t i = 0; i < n; ++i) {
    BlockMeta& head = meta_[first + i * size];
    KVPOOL_DCHECK(!head.is_free() && head.mark == size);
    head.overwrite(0);
    meta_[first + i * size + size - 1].overwrite(0);
  }
  free_.insert(first, size * n);
  free_units_ += size * n;
}

void UnitSet::abandon(std::uint32_t first) noexcept {
  KVPOOL_DCHECK(is_head(first) && !meta_[first].is_free());
  meta_[first].tag = UnitExtent::kNobody;
}

void UnitSet::set_block(std::uint32_t first, std::uint32_t block) noexcept {
  KVPOOL_DCHECK(is_head(first) && !meta_[first].is_free());
  meta_[first].tag = std::uint64_t{block} << kBlockShift | static_cast<std::uint32_t>(meta_[first].tag);
}

UnitExtent UnitSet::at(std::uint32_t first) const noexcept {
  KVPOOL_DCHECK(is_head(first));
  const BlockMeta& head = meta_[first];
  if (head.is_free()) return {first, head.mark};
  return {first, head.mark, static_cast<std::uint32_t>(head.tag), static_cast<std::uint32_t>(head.tag >> kBlockShift)};
}

// Only the ends of extents have marks or states. The last unit of a taken one has no mark, unless it is the first as
// well. That of a free one has, and follows a free unit; the first one never does, since free runs are maximal.
bool UnitSet::is_head(std::uint32_t unit) const noexcept {
  const BlockMeta& meta = meta_[unit];
  if (meta.mark == 0) return false;
  return !meta.is_free() || unit == 0 || !meta_[unit - 1].is_free();
}

std::uint32_t UnitSet::head_of(std::uint32_t unit) const noexcept {
  while (!is_head(unit)) --unit;
  return unit;
}

void UnitSet::audit(const char* name) const {
  free_.audit(name, taken_length);
  std::uint32_t free = 0;
  for (std::uint32_t unit = 0; unit < units_;) {
    if (!is_head(unit)) units_failed(name, "no extent begins where one ends (Z5)", unit);
    const UnitExtent extent = at(unit);
    if (extent.length == 0 || extent.length > units_ - unit) {
      units_failed(name, "an extent has a wrong length (Z6)", unit);
    }
    if (extent.free()) {
      free += extent.length;
    } else if (meta_[extent.end() - 1].is_free()) {
      units_failed(name, "the last unit of a block is free (Z6)", unit);
    }
    for (std::uint32_t inner = unit + 1; inner + 1 < extent.end(); ++inner) {
      if (meta_[inner].word != 0 || meta_[inner].mark != 0 || meta_[inner].tag != 0) {
        units_failed(name, "a unit within an extent has metadata of one (Z6)", inner);
      }
    }
    unit = extent.end();
  }
  if (free != free_units_) units_failed(name, "a wrong count of free units (Z5)", free);
}

}  // namespace kvpool
