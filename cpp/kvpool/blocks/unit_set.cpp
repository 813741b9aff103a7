#include "kvpool/blocks/unit_set.h"

#include <algorithm>
#include <string>

#include "kvpool/base/address.h"
#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// The word of a taken extent's first unit: see UnitNodes.
constexpr int kOwnerShift = 3;
constexpr std::uint64_t kOwnerMask = 31;
constexpr std::uint64_t kNobodysOwner = kOwnerMask;
static_assert(kNobodysOwner == UnitSet::kOwnersMax);
constexpr int kBlockShift = 40;

constexpr std::uint64_t extent_word(std::uint32_t size, std::uint64_t owner, std::uint32_t block) noexcept {
  return UnitNodes::kTaken | owner << kOwnerShift | std::uint64_t{size} << UnitNodes::kLengthShift |
         std::uint64_t{block} << kBlockShift;
}
constexpr bool is_taken(std::uint64_t word) noexcept { return (word & UnitNodes::kTaken) != 0; }

[[noreturn]] void units_failed(const char* name, const char* what, std::uint32_t unit) {
  throw Error(ErrorCode::kAudit, std::string(name) + " units: " + what + " (unit " + std::to_string(unit) + ")",
              {{"unit", unit}});
}

}  // namespace

// calloc, because large zeroed memory comes from the kernel untouched.
UnitSet::Words UnitSet::zeros(std::uint32_t units) {
  KVPOOL_CHECK(units <= kBlocksMax);
  const std::size_t entries = std::max(units, 1U);
  Words words(static_cast<std::uint64_t*>(std::calloc(entries, sizeof(std::uint64_t))));
  if (words == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "no memory for the metadata of " + std::to_string(units) + " units",
                {{"bytes", static_cast<std::int64_t>(entries * sizeof(std::uint64_t))}});
  }
  return words;
}

UnitSet::UnitSet(std::uint32_t units)
    : words_(zeros(units)), units_(units), free_units_(units), free_(words_.get(), units, &bin_runs_) {}

std::uint32_t UnitSet::longest_free() const noexcept {
  const std::uint32_t head = free_.longest();
  return head == UnitFreeSet::kNone ? 0 : free_.length(head);
}

std::size_t UnitSet::fits(std::uint32_t size, std::size_t most) const noexcept {
  if (size == 1) return free_units_ < most ? free_units_ : most;
  return size > free_units_ ? 0 : free_.fits(size, most);
}

void UnitSet::take_run(std::uint32_t first, std::uint32_t size, std::uint32_t n, std::uint32_t owner) noexcept {
  KVPOOL_DCHECK(owner < kNobodysOwner);
  free_.remove_front(first, size * n);
  free_units_ -= size * n;
  std::uint64_t* const words = words_.get();
  std::uint64_t word = extent_word(size, owner, first);
  for (const std::uint32_t end = first + n * size; first < end; first += size) {
    words[first] = word;
    word += std::uint64_t{size} << kBlockShift;
  }
}

void UnitSet::give_back(std::uint32_t first, std::uint32_t size, std::uint32_t n) noexcept {
  KVPOOL_DCHECK(n > 0);
  std::uint64_t* const words = words_.get();
  for (std::uint32_t unit = first; unit < first + n * size; unit += size) {
    KVPOOL_DCHECK(is_taken(words[unit]) && UnitNodes::length_in(words[unit]) == size);
    words[unit] = 0;
  }
  free_.insert(first, size * n);
  free_units_ += size * n;
}

void UnitSet::take_pieces(std::uint32_t size, std::span<std::uint32_t> firsts, std::uint32_t owner) noexcept {
  KVPOOL_DCHECK(owner < kNobodysOwner);
  // Until all pieces are known, their words are those of units inside an extent.
  for (std::size_t piece = free_.take_exact(size, firsts); piece < firsts.size();) {
    const std::uint32_t head = free_.best_fit(size);
    const std::size_t here = std::min<std::size_t>(free_.length(head) / size, firsts.size() - piece);
    free_.remove_front(head, size * static_cast<std::uint32_t>(here));
    for (std::size_t i = 0; i < here; ++i) firsts[piece++] = head + static_cast<std::uint32_t>(i) * size;
  }
  free_units_ -= size * static_cast<std::uint32_t>(firsts.size());
  // Mostly they come in order. Pieces that lie one after another are read one after another.
  if (!std::ranges::is_sorted(firsts)) std::ranges::sort(firsts);
  const std::uint64_t word = extent_word(size, owner, firsts.front());
  for (const std::uint32_t first : firsts) words_[first] = word;
}

void UnitSet::give_back_pieces(std::uint32_t size, std::span<const std::uint32_t> firsts) noexcept {
  for (const std::uint32_t first : firsts) {
    KVPOOL_DCHECK(is_taken(words_[first]) && UnitNodes::length_in(words_[first]) == size);
    words_[first] = 0;
  }
  free_.insert_each(size, firsts);
  free_units_ += size * static_cast<std::uint32_t>(firsts.size());
}

void UnitSet::abandon(std::uint32_t first) noexcept {
  KVPOOL_DCHECK(is_taken(words_[first]));
  words_[first] |= kNobodysOwner << kOwnerShift;
}

UnitExtent UnitSet::at(std::uint32_t first) const noexcept {
  KVPOOL_DCHECK(is_head(first));
  const std::uint64_t word = words_[first];
  if (!is_taken(word)) return {first, free_.length(first)};
  const std::uint64_t owner = word >> kOwnerShift & kOwnerMask;
  return {first, UnitNodes::length_in(word),
          owner == kNobodysOwner ? UnitExtent::kNobody : static_cast<std::uint32_t>(owner),
          static_cast<std::uint32_t>(word >> kBlockShift)};
}

bool UnitSet::is_head(std::uint32_t unit) const noexcept {
  return (words_[unit] & (UnitNodes::kTaken | UnitNodes::kHead)) != 0;
}

std::uint32_t UnitSet::head_of(std::uint32_t unit) const noexcept {
  while (!is_head(unit)) --unit;
  return unit;
}

void UnitSet::audit(const char* name) const {
  free_.audit(name);
  std::uint32_t free = 0;
  for (std::uint32_t unit = 0; unit < units_;) {
    if (!is_head(unit)) units_failed(name, "no extent begins where one ends (Z5)", unit);
    const UnitExtent extent = at(unit);
    if (extent.length == 0 || extent.length > units_ - unit) {
      units_failed(name, "an extent has a wrong length (Z6)", unit);
    }
    if (extent.free()) free += extent.length;
    unit = extent.end();
  }
  if (free != free_units_) units_failed(name, "a wrong count of free units (Z5)", free);
}

}  // namespace kvpool
