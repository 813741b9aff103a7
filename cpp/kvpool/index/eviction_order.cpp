#include "kvpool/index/eviction_order.h"

#include <utility>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::size_t slot_of(ValueClass value_class) noexcept { return static_cast<std::size_t>(value_class); }

// Halves of one node that was cut share their stamp; the lower one goes first.
bool is_ancestor(const PromptNode* above, const PromptNode* node) noexcept {
  for (node = node->parent; node != nullptr && node->payload.stamp == above->payload.stamp; node = node->parent) {
    if (node == above) return true;
  }
  return false;
}

bool colder(const PromptNode* a, const PromptNode* b) noexcept {
  if (a->payload.stamp != b->payload.stamp) return a->payload.stamp < b->payload.stamp;
  return is_ancestor(b, a);
}

class RecencyOrder final : public EvictionOrder {
 public:
  void reserve(std::size_t) override {}

  void add(PromptNode* node) noexcept override {
    List& list = lists_[slot_of(node->payload.value_class)].used;
    node->payload.arrived = false;
    insert_after(list, list.newest, node);
  }

  void add_unused(PromptNode* node) noexcept override {
    List& list = lists_[slot_of(node->payload.value_class)].arrived;
    PromptNode* before = list.newest;
    while (before != nullptr && colder(node, before)) before = before->payload.older;
    node->payload.arrived = true;
    insert_after(list, before, node);
  }

  void add_upper(PromptNode* lower, PromptNode* upper) noexcept override {
    upper->payload.arrived = lower->payload.arrived;
    insert_after(list_of(lower), lower, upper);
  }

  void remove(PromptNode* node) noexcept override {
    List& list = list_of(node);
    PromptPayload& own = node->payload;
    (own.older != nullptr ? own.older->payload.newer : list.oldest) = own.newer;
    (own.newer != nullptr ? own.newer->payload.older : list.newest) = own.older;
    own.older = own.newer = nullptr;
    own.ordered = false;
  }

  PromptNode* coldest(ValueClass value_class) const noexcept override {
    const Lists& lists = lists_[slot_of(value_class)];
    PromptNode* used = lists.used.oldest;
    PromptNode* arrived = lists.arrived.oldest;
    if (used == nullptr || arrived == nullptr) return used != nullptr ? used : arrived;
    return colder(arrived, used) ? arrived : used;
  }

  std::size_t count_checked(ValueClass value_class) const override {
    const Lists& lists = lists_[slot_of(value_class)];
    return count_checked(lists.used, value_class, false) + count_checked(lists.arrived, value_class, true);
  }

 private:
  struct List {
    PromptNode* oldest = nullptr;
    PromptNode* newest = nullptr;
  };
  struct Lists {
    List used;     // in the order of their release
    List arrived;  // sorted by stamp
  };

  List& list_of(const PromptNode* node) noexcept {
    Lists& lists = lists_[slot_of(node->payload.value_class)];
    return node->payload.arrived ? lists.arrived : lists.used;
  }

  static void insert_after(List& list, PromptNode* at, PromptNode* node) noexcept {
    PromptPayload& own = node->payload;
    own.older = at;
    own.newer = at != nullptr ? at->payload.newer : list.oldest;
    (at != nullptr ? at->payload.newer : list.oldest) = node;
    (own.newer != nullptr ? own.newer->payload.older : list.newest) = node;
    own.ordered = true;
  }

  static std::size_t count_checked(const List& list, ValueClass value_class, bool arrived) {
    std::size_t count = 0;
    const PromptNode* before = nullptr;
    for (const PromptNode* node = list.oldest; node != nullptr; node = node->payload.newer) {
      const PromptPayload& own = node->payload;
      if (own.older != before || !own.ordered || own.value_class != value_class || own.arrived != arrived ||
          (before != nullptr && own.stamp < before->payload.stamp)) {
        throw Error(ErrorCode::kAudit, "the recency list of a class is broken");
      }
      before = node;
      ++count;
    }
    if (list.newest != before) {
      throw Error(ErrorCode::kAudit, "the recency list of a class does not end at its newest node");
    }
    return count;
  }

  std::array<Lists, kValueClassCount> lists_{};
};

// A binary heap per class; each node knows its index, so any node can be taken out.
class HeapOrder final : public EvictionOrder {
 public:
  explicit HeapOrder(bool by_hits) : by_hits_(by_hits) {}

  void reserve(std::size_t nodes) override {
    for (auto& heap : heaps_) {
      if (heap.capacity() < nodes) heap.reserve(nodes + nodes / 2);
    }
  }

  void add(PromptNode* node) noexcept override {
    auto& heap = heaps_[slot_of(node->payload.value_class)];
    heap.push_back(Entry{by_hits_ ? node->payload.hits : 0, node->payload.stamp, node});  // reserve() made room
    node->payload.ordered = true;
    rise(heap, heap.size() - 1);
  }

  void add_unused(PromptNode* node) noexcept override { add(node); }

  void add_upper(PromptNode* lower, PromptNode* upper) noexcept override {
    // Equal keys: `before` puts the child first. The stamp of the upper half is the lower half's.
    (void)lower;
    add(upper);
  }

  void remove(PromptNode* node) noexcept override {
    auto& heap = heaps_[slot_of(node->payload.value_class)];
    const std::size_t at = node->payload.heap_index;
    const Entry last = heap.back();
    heap.pop_back();
    node->payload.ordered = false;
    if (last.node == node) return;
    place(heap, at, last);
    rise(heap, at);
    sink(heap, last.node->payload.heap_index);
  }

  PromptNode* coldest(ValueClass value_class) const noexcept override {
    const auto& heap = heaps_[slot_of(value_class)];
    return heap.empty() ? nullptr : heap.front().node;
  }

  std::size_t count_checked(ValueClass value_class) const override {
    const auto& heap = heaps_[slot_of(value_class)];
    for (std::size_t i = 0; i < heap.size(); ++i) {
      const PromptPayload& payload = heap[i].node->payload;
      if (payload.heap_index != i || !payload.ordered || payload.value_class != value_class ||
          (i > 0 && before(heap[i], heap[(i - 1) / 2]))) {
        throw Error(ErrorCode::kAudit, "the eviction heap of a class is broken");
      }
    }
    return heap.size();
  }

 private:
  struct Entry {
    std::uint64_t hits;
    std::uint64_t stamp;
    PromptNode* node;
  };
  using Heap = std::vector<Entry>;

  static bool before(const Entry& a, const Entry& b) noexcept {
    if (a.hits != b.hits) return a.hits < b.hits;
    if (a.stamp != b.stamp) return a.stamp < b.stamp;
    return is_ancestor(b.node, a.node);
  }

  static void place(Heap& heap, std::size_t at, const Entry& entry) noexcept {
    heap[at] = entry;
    entry.node->payload.heap_index = static_cast<std::uint32_t>(at);
  }
  static void rise(Heap& heap, std::size_t at) noexcept {
    const Entry entry = heap[at];
    for (; at > 0 && before(entry, heap[(at - 1) / 2]); at = (at - 1) / 2) place(heap, at, heap[(at - 1) / 2]);
    place(heap, at, entry);
  }
  static void sink(Heap& heap, std::size_t at) noexcept {
    const Entry entry = heap[at];
    for (;;) {
      std::size_t child = 2 * at + 1;
      if (child >= heap.size()) break;
      if (child + 1 < heap.size() && before(heap[child + 1], heap[child])) ++child;
      if (!before(heap[child], entry)) break;
      place(heap, at, heap[child]);
      at = child;
    }
    place(heap, at, entry);
  }

  bool by_hits_;
  std::array<Heap, kValueClassCount> heaps_;
};

}  // namespace

std::unique_ptr<EvictionOrder> make_eviction_order(EvictionPolicy policy) {
  switch (policy) {
    case EvictionPolicy::kLru:
      return std::make_unique<RecencyOrder>();
    case EvictionPolicy::kLfu:
      return std::make_unique<HeapOrder>(true);
    case EvictionPolicy::kFifo:
      return std::make_unique<HeapOrder>(false);
  }
  throw Error(ErrorCode::kArgument, "unknown eviction policy");
}

}  // namespace kvpool
