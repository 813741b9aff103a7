#include "kvpool/transfer/placements.h"

#include <algorithm>
#include <utility>

namespace kvpool {

std::uint64_t Placements::begin(std::uint64_t transfer, std::uint64_t content, std::vector<Address> blocks) {
  under_way_.push_back({last_ + 1, transfer, content, {}});
  std::size_t counted = 0;
  try {
    for (; counted < blocks.size(); ++counted) ++placed_in_[without_instance(blocks[counted])];
  } catch (...) {
    forget(std::span(blocks).first(counted));
    under_way_.pop_back();
    throw;
  }
  under_way_.back().blocks = std::move(blocks);
  return ++last_;
}

std::optional<Placements::Ended> Placements::end(std::uint64_t number) noexcept {
  const auto placement = std::ranges::find(under_way_, number, &UnderWay::number);
  if (placement == under_way_.end()) return std::nullopt;
  const Ended ended{placement->transfer, placement->content, !placement->blocks.empty()};
  forget(placement->blocks);
  under_way_.erase(placement);
  return ended;
}

bool Placements::is_placed_now(std::span<const Address> blocks) const noexcept {
  return !placed_in_.empty() &&
         std::ranges::any_of(blocks, [this](Address block) { return placed_in_.contains(without_instance(block)); });
}

void Placements::forget(std::span<const Address> blocks) noexcept {
  for (const Address block : blocks) {
    const auto entry = placed_in_.find(without_instance(block));
    if (--entry->second == 0) placed_in_.erase(entry);
  }
}

}  // namespace kvpool
