#include "kvpool/sequences/block_runs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {

// The first run that ends behind `block`: it has the block, or begins behind it.
std::vector<BlockRuns::Run>::const_iterator BlockRuns::run_behind(std::uint64_t block) const noexcept {
  return std::ranges::upper_bound(runs_, block, {}, &Run::end);
}

void BlockRuns::add(std::uint64_t first, std::span<const Address> addresses) {
  if (addresses.empty()) return;
  const std::uint64_t end = first + addresses.size();
  const auto behind = run_behind(first);
  if (behind != runs_.end() && behind->first < end) {
    const std::uint64_t taken = std::max(first, behind->first);
    throw Error(ErrorCode::kArgument, "block " + std::to_string(taken) + " of the sequence has an address already",
                {{"block", static_cast<std::int64_t>(taken)}});
  }
  // The most common change of all: the sequence grows at its end.
  if (behind == runs_.end() && !runs_.empty() && runs_.back().end() == first) {
    runs_.back().addresses.insert(runs_.back().addresses.end(), addresses.begin(), addresses.end());
    blocks_ += addresses.size();
    return;
  }
  Run joined{first, {addresses.begin(), addresses.end()}};
  auto from = behind;  // runs [from, to) are joined with the new one
  auto to = behind;
  if (from != runs_.begin() && std::prev(from)->end() == first) {
    --from;
    joined.first = from->first;
    joined.addresses.insert(joined.addresses.begin(), from->addresses.begin(), from->addresses.end());
  }
  if (to != runs_.end() && to->first == end) {
    joined.addresses.insert(joined.addresses.end(), to->addresses.begin(), to->addresses.end());
    ++to;
  }
  std::vector<Run> runs;
  runs.reserve(runs_.size() + 1);
  runs.insert(runs.end(), runs_.cbegin(), from);
  runs.push_back(std::move(joined));
  runs.insert(runs.end(), to, runs_.cend());
  runs_ = std::move(runs);
  blocks_ += addresses.size();
}

std::vector<Address> BlockRuns::remove(const std::vector<BlockRange>& ranges) {
  std::vector<Address> removed;
  std::vector<Run> left;
  left.reserve(runs_.size() + ranges.size());
  auto range = ranges.begin();
  for (const Run& run : runs_) {
    const auto at = [&](std::uint64_t block) {
      return run.addresses.begin() + static_cast<std::ptrdiff_t>(block - run.first);
    };
    std::uint64_t kept = run.first;  // what is before it has been looked at
    while (range != ranges.end() && range->end() <= run.first) ++range;
    for (auto one = range; one != ranges.end() && one->first < run.end(); ++one) {
      const std::uint64_t begin = std::max(one->first, kept);
      const std::uint64_t end = std::min(one->end(), run.end());
      if (begin >= end) continue;
      if (begin > kept) left.push_back({kept, {at(kept), at(begin)}});
      removed.insert(removed.end(), at(begin), at(end));
      kept = end;
    }
    if (kept < run.end()) left.push_back({kept, {at(kept), run.addresses.end()}});
  }
  runs_ = std::move(left);
  blocks_ -= removed.size();
  return removed;
}

std::optional<std::span<const Address>> BlockRuns::find(const BlockRange& range) const noexcept {
  const auto run = run_behind(range.first);
  if (run == runs_.end() || run->first > range.first || run->end() < range.end()) return std::nullopt;
  return std::span(run->addresses).subspan(range.first - run->first, range.count);
}

bool BlockRuns::has_any(const BlockRange& range) const noexcept {
  const auto run = run_behind(range.first);
  return run != runs_.end() && run->first < range.end();
}

std::vector<BlockRange> BlockRuns::places_of(const std::unordered_set<Address>& addresses) const {
  std::vector<BlockRange> ranges;
  for (const Run& run : runs_) {
    for (std::size_t i = 0; i < run.addresses.size(); ++i) {
      if (!addresses.contains(run.addresses[i])) continue;
      const std::uint64_t block = run.first + i;
      if (!ranges.empty() && ranges.back().end() == block) {
        ++ranges.back().count;
      } else {
        ranges.push_back({block, 1});
      }
    }
  }
  return ranges;
}

}  // namespace kvpool
