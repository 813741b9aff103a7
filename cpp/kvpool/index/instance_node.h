// The payload of a node in a router's tree: the instances that hold its pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kvpool/index/radix_tree.h"

namespace kvpool {

// The last use of a lasting page: later than any time.
inline constexpr std::uint64_t kLasting = std::numeric_limits<std::uint64_t>::max();

struct Holder {
  std::uint32_t instance;
  std::uint64_t last_used;  // by an insertion, or kLasting; see InstancePayload::matched
};

struct InstancePayload {
  std::vector<Holder> holders;  // sorted by instance

  // In the order of last uses, by any instance.
  RadixNode<InstancePayload>* newer = nullptr;
  RadixNode<InstancePayload>* older = nullptr;

  // When a match last went through the node. A match is a use by every holder; recording it once here, and not with
  // each holder, makes its cost proportional to the path.
  std::uint64_t matched = 0;

  std::vector<Holder>::iterator place_of(std::uint32_t instance) noexcept {
    return std::lower_bound(holders.begin(), holders.end(), instance,
                            [](const Holder& holder, std::uint32_t wanted) { return holder.instance < wanted; });
  }
  // Null when the instance does not hold the node.
  Holder* find(std::uint32_t instance) noexcept {
    const auto at = place_of(instance);
    return at != holders.end() && at->instance == instance ? &*at : nullptr;
  }
  std::uint64_t last_use(const Holder& holder) const noexcept { return std::max(holder.last_used, matched); }

  struct Cut {
    std::vector<Holder> holders;
  };

  void prepare_cut(SpanHeap&, std::uint32_t, std::uint32_t, Cut& cut) const { cut.holders = holders; }

  // Every holder of the whole node holds both halves, and each use was a use of both.
  static void commit_cut(Cut& cut, InstancePayload& upper, InstancePayload& lower, std::uint32_t,
                         std::uint32_t) noexcept {
    upper.holders = std::move(cut.holders);
    upper.matched = lower.matched;
  }
};

using InstanceNode = RadixNode<InstancePayload>;

}  // namespace kvpool
