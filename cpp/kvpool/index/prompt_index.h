// The prompt index: which prefixes of prompts are cached, and at which addresses.
//
// Invariants
//   P1  A pin covers a prefix: it counts on its last node and on every node above. So a node has at least as many pins
//       as each child, and everything below an unpinned node is unpinned.
//   P2  Matches and insertions cut runs where they end. All pages of a node therefore share one history of use, and the
//       eviction order by nodes is the exact order by pages.
//   P3  A node is in the eviction order exactly while it is neither pinned nor held.
//   P4  A node's values are all of one class.
//   P5  A call that throws has changed nothing but, at most, where runs are cut.
//   P6  A node that is forgotten while it is pinned leaves the tree, so that nobody finds it, and keeps its pins, its
//       parent and its values until the last pin goes.
//
// Thread-safety: none; the owner locks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kvpool/index/event_log.h"
#include "kvpool/index/eviction_order.h"
#include "kvpool/index/hash_seed.h"
#include "kvpool/index/prompt_node.h"

namespace kvpool {

// Tells the owner of the values about changes. Called in the middle of a change: implementations must not call the
// index.
class IndexObserver {
 public:
  virtual ~IndexObserver() = default;
  // This node has got all its values: by an insertion, or by a cut of another node.
  virtual void placed(PromptNode& node) noexcept = 0;
  // These values left the index (evicted, deleted).
  virtual void dropped(const Address* values, std::size_t n) noexcept = 0;
  // A node with `has_limbo` lost the pin that was taken at clock `stamp`.
  virtual void unpinned(PromptNode& node, std::uint64_t stamp) noexcept = 0;
};

struct IndexPin {
  PromptNode* node = nullptr;  // last node of the prefix; null when nothing is pinned
  std::uint64_t stamp = 0;     // the index's clock when it was taken
};

struct IndexHit {
  IndexPin pin;
  std::size_t pages = 0;
  std::size_t partial_tokens = 0;  // matching tokens in the next page
};

struct IndexInsertion {
  IndexPin pin;
  std::size_t pages_present = 0;  // of the prompt, from its start, that were cached before
};

struct IndexErasure {
  std::size_t pages = 0;         // removed
  std::size_t pages_pinned = 0;  // pages to remove that are pinned; if not 0, nothing was removed
};

// Why a match ended.
enum class MatchEnd : std::uint8_t {
  kComplete,       // every whole page of the tokens is cached
  kNoNamespace,    // nothing was ever stored under that namespace
  kDiverges,       // cached prompts continue with other tokens
  kNothingBeyond,  // no cached prompt continues
};

class PromptIndex {
 public:
  using Node = PromptNode;

  // How values are classified: as opaque, or by the address's instance and medium.
  enum class Values : std::uint8_t { kOpaque, kAddresses };

  // `observer` may be null; it must outlive the index. Throws Error kArgument for page_tokens == 0.
  PromptIndex(std::uint32_t page_tokens, EvictionPolicy policy, Values values, IndexObserver* observer,
              std::uint64_t seed = random_hash_seed());
  ~PromptIndex();
  PromptIndex(const PromptIndex&) = delete;
  PromptIndex& operator=(const PromptIndex&) = delete;

  std::uint32_t page_tokens() const noexcept { return tree_.page_tokens(); }
  void set_instance(std::uint32_t instance) noexcept { instance_ = instance; }

  // Longest cached prefix in whole pages; pins it and writes its values to `out` (room for n_tokens / page_tokens).
  IndexHit match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out);

  // The same without pinning, without counting as a use, and without cutting runs. `out` may be null.
  IndexHit peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out,
                MatchEnd* end = nullptr) const noexcept;

  // Stores values for `pages` pages. Pages that are present keep their values; `canonical` receives the resulting
  // values of all pages. Pins the whole prompt.
  IndexInsertion insert(std::string_view name_space, const Token* tokens, std::size_t pages, const Address* values,
                        Address* canonical);

  // Undoes an insertion that no other caller has seen yet. REQUIRES: it was the last change to the index.
  void undo(const IndexInsertion& insertion) noexcept;

  void unpin(const IndexPin& pin) noexcept;
  IndexPin pin(Node* node) noexcept;

  // Removes the pages of this prompt that no longer prompt shares; with `descendants` also everything below it.
  // REQUIRES: no node is held.
  IndexErasure erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens, bool descendants);

  // Drops up to n pages of a class, coldest first, from the ends of prompts. Also drops pages of other classes below
  // them, which do not count.
  std::size_t evict(ValueClass value_class, std::size_t n) noexcept;

  // Drops the pages of a node and everything below it: what is pinned is found no more from now on, and dropped with
  // its last pin. Returns how many pages. REQUIRES: no node is held; this one was not forgotten.
  std::size_t forget(Node* node) noexcept;
  // Pages of this class that were forgotten, and that pins still hold. They count as no others.
  std::size_t forgotten(ValueClass value_class) const noexcept {
    return forgotten_[static_cast<std::size_t>(value_class)];
  }

  // Takes the coldest node of a class out of the order and marks it held. Cuts it so that it has at most `pages_max`
  // pages, its last ones. Null when no node is evictable, and for pages_max == 0. End the hold with release_hold().
  Node* hold_coldest(ValueClass value_class, std::size_t pages_max);
  void release_hold(Node* node) noexcept;

  // Cuts `node` so that its pages [first, first + count) become a separate node, and returns that.
  Node* isolate(Node* node, std::uint32_t first, std::uint32_t count);

  // The coldest node of a class that is neither pinned nor held; null without one.
  Node* coldest(ValueClass value_class) const noexcept { return order_->coldest(value_class); }

  // Replaces the values of a node; the new ones are of one class. The caller handles the old values.
  void redirect(Node* node, const Address* values) noexcept;

  // Pages of the node's class in everything below it; stops counting above `most`.
  std::size_t pages_below(Node* node, std::size_t most) const noexcept;

  std::size_t pages(ValueClass value_class) const noexcept { return pages_[static_cast<std::size_t>(value_class)]; }
  // Pages of this class that are neither pinned nor held.
  std::size_t evictable(ValueClass value_class) const noexcept {
    return evictable_[static_cast<std::size_t>(value_class)];
  }
  // Pages of this class that are held and not pinned.
  std::size_t held(ValueClass value_class) const noexcept { return held_[static_cast<std::size_t>(value_class)]; }
  std::size_t node_count() const noexcept { return tree_.node_count(); }
  std::size_t namespace_count() const noexcept { return tree_.namespace_count(); }
  std::size_t bytes() const noexcept { return tree_.bytes(); }
  std::uint64_t tick() noexcept { return ++clock_; }

  // A stream of the events from now on. With include_cached it begins with the current content, as kStored events with
  // the sequence number of the last event. Throws std::bad_alloc.
  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens, bool include_cached);
  EventLog& events() noexcept { return events_; }

  // visit(const Node&) for every node.
  template <class Visit>
  void for_each_node(Visit&& visit) const {
    tree_.for_each_root([&](RadixTree<PromptPayload>::Root& root) {
      tree_.for_each_below(&root, [&](Node& node) {
        if (!node.is_root()) visit(node);
      });
    });
  }
  // visit(Node&) for a node and every node below it, parents first. REQUIRES: it was not forgotten.
  template <class Visit>
  void for_each_below(Node* node, Visit&& visit) const {
    tree_.for_each_below(node, visit);
  }
  // visit(const Node&) for every child of a node. REQUIRES: it was not forgotten.
  template <class Visit>
  void for_each_child(Node* node, Visit&& visit) const {
    const auto look = [&](const Node* child) {
      visit(*child);
      return false;
    };
    tree_.walk_below(node, look, [](const Node*) {});
  }
  // visit(const Node&) for every node that was forgotten, and that pins still hold.
  template <class Visit>
  void for_each_forgotten(Visit&& visit) const {
    for (const Node* node = first_forgotten_; node != nullptr; node = node->payload.newer) visit(*node);
  }
  // visit(name, pages) for every namespace: how many pages of the tokens each holds.
  template <class Visit>
  void for_each_namespace(const Token* tokens, std::size_t n_tokens, Visit&& visit) const {
    tree_.for_each_root([&](const RadixTree<PromptPayload>::Root& root) {
      visit(root.name, peek(root.name, tokens, n_tokens, nullptr).pages);
    });
  }

  // Checks P1, P3, P4, P6 and the counters. Throws Error kAudit.
  void audit() const;

 private:
  using Tree = RadixTree<PromptPayload>;

  ValueClass class_of(Address value) const noexcept;
  Node* cut(Node* node, std::uint32_t pages_before);
  void enter_order(Node* node, bool used_now) noexcept;
  void leave_order(Node* node) noexcept;
  void drop_tail(Node* leaf, std::uint32_t count, bool observed) noexcept;
  void set_aside(Node* leaf) noexcept;
  void drop_forgotten(Node* node) noexcept;
  void audit_forgotten() const;
  std::size_t& pages_of(ValueClass value_class) noexcept { return pages_[static_cast<std::size_t>(value_class)]; }
  std::size_t& evictable_of(ValueClass value_class) noexcept {
    return evictable_[static_cast<std::size_t>(value_class)];
  }
  std::size_t& held_of(ValueClass value_class) noexcept { return held_[static_cast<std::size_t>(value_class)]; }
  std::shared_ptr<Event> make_event(EventKind kind, std::uint64_t sequence, const Node* node, std::uint32_t first,
                                    std::uint32_t count, const Address* old_values) const;
  void publish(EventKind kind, const Node* node, std::uint32_t first, std::uint32_t count,
               const Address* old_values) noexcept;

  Tree tree_;
  EvictionPolicy policy_;
  Values values_;
  IndexObserver* observer_;
  std::unique_ptr<EvictionOrder> order_;
  EventLog events_;
  std::uint32_t instance_ = 0;
  std::uint64_t clock_ = 0;
  std::array<std::size_t, kValueClassCount> pages_{};
  std::array<std::size_t, kValueClassCount> evictable_{};
  std::array<std::size_t, kValueClassCount> held_{};
  std::array<std::size_t, kValueClassCount> forgotten_{};
  Node* first_forgotten_ = nullptr;
  Tree::Root above_forgotten_;  // the parent of those whose parent was a root, which may go
};

}  // namespace kvpool
