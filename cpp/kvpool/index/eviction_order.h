// The order in which nodes of a class are evicted. It contains all nodes that are neither pinned nor held.
//
// Every policy orders a node before its ancestors (a use of a child is a use of its whole prefix), so the coldest node
// of a class has no descendants of that class, and eviction works from the ends of prompts inwards.
//
//   LRU   a list: the node released last is last. O(1), no comparisons. Nodes that come from another class keep the
//         time of their last use: they are in a second list, sorted by this time, and the colder of the two heads is
//         evicted first. They arrive coldest first, so each is appended: O(1) again.
//   LFU   a heap by (hits, last use).
//   FIFO  a heap by last insertion: matches do not refresh.
//
// Thread-safety: none. After reserve(n), n nodes can be added without allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/index/prompt_node.h"

namespace kvpool {

enum class EvictionPolicy : std::uint8_t { kLru, kLfu, kFifo };

class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;

  // Makes room for `nodes` nodes in all classes together. Throws std::bad_alloc.
  virtual void reserve(std::size_t nodes) = 0;

  // Enters a node that has just been used. REQUIRES: not ordered.
  virtual void add(PromptNode* node) noexcept = 0;

  // Enters a node that was used at its stamp, not now: it was held, or of another class. REQUIRES: not ordered.
  virtual void add_unused(PromptNode* node) noexcept = 0;

  // Enters the upper half of a node that was cut. REQUIRES: lower is ordered, upper is not.
  virtual void add_upper(PromptNode* lower, PromptNode* upper) noexcept = 0;

  virtual void remove(PromptNode* node) noexcept = 0;

  // Null when the class has no evictable node.
  virtual PromptNode* coldest(ValueClass value_class) const noexcept = 0;

  // Number of nodes in the order, by a full walk that also checks the structure. For audits.
  virtual std::size_t count_checked(ValueClass value_class) const = 0;
};

std::unique_ptr<EvictionOrder> make_eviction_order(EvictionPolicy policy);

}  // namespace kvpool
