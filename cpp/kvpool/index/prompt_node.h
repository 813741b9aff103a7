// The payload of a node in the prompt index.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvpool/base/address.h"
#include "kvpool/index/radix_tree.h"

namespace kvpool {

// Where a value lies, as far as eviction is concerned. A node's values are all of one class.
enum class ValueClass : std::uint8_t {
  kOpaque = 0,  // an index used alone: values mean nothing to it
  kHbm = 1,     // blocks of this pool, by medium: the codes of Medium
  kDram = 2,
  kDisk = 3,
  kRemote,  // addresses on other instances: hints that occupy no memory here
};
inline constexpr int kValueClassCount = static_cast<int>(ValueClass::kRemote) + 1;
static_assert(static_cast<std::size_t>(ValueClass::kRemote) == kMedia.size() + 1, "a class for each medium");

inline constexpr ValueClass value_class_of(Medium medium) noexcept { return static_cast<ValueClass>(medium); }

struct PromptPayload {
  using Node = RadixNode<PromptPayload>;

  Buffer<Address> values;  // one per page

  // Position in the eviction order (eviction_order.h); meaningful while `ordered`. Of a forgotten node: in the list of
  // these.
  Node* older = nullptr;
  Node* newer = nullptr;
  std::uint32_t heap_index = 0;
  bool ordered = false;
  bool arrived = false;  // LRU: in the list of nodes that came with an older stamp

  ValueClass value_class = ValueClass::kOpaque;
  bool held = false;        // its blocks are being copied elsewhere, so it is neither evicted nor moved
  bool forgotten = false;   // out of the tree, because its blocks were pinned when they were to go (P6)
  bool has_limbo = false;   // the observer is told of every unpin
  std::uint32_t pins = 0;   // holders whose prefix covers this node
  std::uint32_t hits = 0;   // matches that went through it
  std::uint64_t stamp = 0;  // the index's clock at its last use (FIFO: last insertion)

  struct Cut {
    Buffer<Address> tail;
  };

  void prepare_cut(SpanHeap& heap, std::uint32_t before, std::uint32_t pages, Cut& cut) const {
    cut.tail = make_buffer<Address>(heap, pages - before);
  }

  // Both halves inherit the state of the whole node: each pin and each hit covered both. The index enters the upper
  // half into the eviction order. Limbo stays with the lower half: every pin of the whole node pins that.
  static void commit_cut(Cut& cut, PromptPayload& upper, PromptPayload& lower, std::uint32_t before,
                         std::uint32_t pages) noexcept {
    std::memcpy(cut.tail.get(), lower.values.get() + before, (pages - before) * sizeof(Address));
    upper.values = std::move(lower.values);
    shrink_buffer(upper.values, before);
    lower.values = std::move(cut.tail);
    upper.value_class = lower.value_class;
    upper.held = lower.held;
    upper.pins = lower.pins;
    upper.hits = lower.hits;
    upper.stamp = lower.stamp;
  }
};

using PromptNode = RadixNode<PromptPayload>;

}  // namespace kvpool
