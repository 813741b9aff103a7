#include "kvpool/net/connect/caller_queue.h"

#include <algorithm>

#include "kvpool/base/check.h"

namespace kvpool {

CallerQueue::CallerQueue(std::size_t limit) : limit_(limit) {
  KVPOOL_CHECK(limit > 0);
  callers_.reserve(limit + 1);
  counts_.reserve(limit + 1);
}

std::optional<std::uint64_t> CallerQueue::enter(std::uint64_t id, std::uint64_t source) noexcept {
  callers_.push_back({id, source});
  if (callers_.size() <= limit_) return std::nullopt;
  const auto evicted = first_to_go();
  leave(*evicted);
  return evicted;
}

void CallerQueue::leave(std::uint64_t id) noexcept {
  const auto found = std::ranges::find(callers_, id, &Caller::id);
  if (found != callers_.end()) callers_.erase(found);
}

std::optional<std::uint64_t> CallerQueue::first_to_go() noexcept {
  if (callers_.empty()) return std::nullopt;
  counts_.clear();
  for (const Caller& caller : callers_) {
    const auto found = std::ranges::find(counts_, caller.source, &Count::source);
    found == counts_.end() ? counts_.push_back({caller.source, 1}) : static_cast<void>(++found->callers);
  }
  // The first of equals: the source whose oldest caller is the oldest.
  const auto most = std::ranges::max_element(counts_, {}, &Count::callers);
  return std::ranges::find(callers_, most->source, &Caller::source)->id;
}

}  // namespace kvpool
