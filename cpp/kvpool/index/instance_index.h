// A router's tree: which instances hold which prefixes of prompts.
//
// The router reports what instances store and lose (from event streams, or from its own decisions), and the index
// answers how much of a prompt each instance holds. The answer may be out of date: pages whose removal was not reported
// stay until they expire, or until the tree is too large and they are the least recently used.
//
// Invariants
//   I1  An instance that holds a page holds everything before it: the holders of a node are among those of its parent.
//       So a node and an ancestor with equally many holders have the same holders.
//   I2  A use of a page is a use of everything before it: no holder's last use of a node is later than its last use of
//       the parent. So the ends of prompts expire first.
//   I3  Every node has a holder.
//   I4  Insertions and matches cut runs where they end: all pages of a node share one history.
//   I5  A call that throws has changed nothing but, at most, where runs are cut.
//   I6  All nodes are in the order of their last uses by any instance; a node is newer than those below it. So the
//       oldest node has nothing below it.
//   I7  At most `pages_max` pages, unless it is 0.
//   I8  A sweep stands at a node of that order; what lies below the nodes that it has passed has lost no less than
//   they.
//
// Cost: insert and match grow with the prompt and with the number of instances that hold its first page, not with the
// tree; evicting to keep I7 takes constant time for each node. remove_instance visits the nodes that the instance holds
// and their siblings; expire visits every node, and expire_some no more than it is told to.
//
// An owner that forgets what was not used for a time need not look for it before each answer: insert and peek take
// `since`, and what no call has used since then counts as not held. So only memory depends on when it is dropped.
//
// The caller supplies times, in any unit; a time before the latest one counts as the latest.
// Thread-safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/hash_seed.h"
#include "kvpool/index/instance_hits.h"
#include "kvpool/index/instance_node.h"

namespace kvpool {

struct InstanceHit {
  std::uint32_t instance;
  std::size_t pages;  // of the prompt, from its start
  bool operator==(const InstanceHit&) const = default;
};

class InstanceIndex {
 public:
  using Node = InstanceNode;

  // `pages_max` 0 is no bound. Throws Error kArgument for page_tokens == 0.
  explicit InstanceIndex(std::uint32_t page_tokens, std::uint64_t seed = random_hash_seed(), std::size_t pages_max = 0);
  InstanceIndex(const InstanceIndex&) = delete;
  InstanceIndex& operator=(const InstanceIndex&) = delete;

  std::uint32_t page_tokens() const noexcept { return tree_.page_tokens(); }

  // The instance holds these pages. Returns how many of them are new. `lasting` pages never expire: use it for
  // instances that report what they lose. Pages that the instance has not used since `since` count as new. If there are
  // then too many pages, drops the least recently used, lasting or not, for all their holders; a prompt that alone is
  // too long loses its end. Throws Error kArgument for an instance above kInstanceMax.
  std::size_t insert(std::string_view name_space, const Token* tokens, std::size_t pages, std::uint32_t instance,
                     std::uint64_t now, bool lasting = false, std::uint64_t since = 0);

  // For every instance that holds the prompt's first page: how many pages it holds. Longest first, then by instance.
  // Counts as a use of these pages by all of them. Replaces the content of `out`.
  void match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, std::uint64_t now,
             std::vector<InstanceHit>& out);

  // The same without counting as a use, and without cutting runs.
  void peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
            std::vector<InstanceHit>& out) const;
  // Grouped by length, for a router that asks about few instances. Leaves out what was not used since `since`.
  void peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, InstanceHits& out,
            std::uint64_t since = 0) const;

  // The instance no longer holds this prompt's pages from `first_page` on, nor anything below them. Returns the number
  // of removed pages. Does nothing if the tokens have no such page.
  std::size_t remove(std::string_view name_space, const Token* tokens, std::size_t n_tokens, std::size_t first_page,
                     std::uint32_t instance);

  // The instance is gone. Returns how many pages it held.
  std::size_t remove_instance(std::uint32_t instance) noexcept;

  // Drops every holder of a page that has not used it at `before` or later, except lasting ones. Returns the number of
  // pages, counted once for each instance.
  std::size_t expire(std::uint64_t before) noexcept;

  // A part of the same. A sweep visits all nodes, the longest unused first, and each call goes on where the last one
  // ended; `before` is that of the call with which the sweep began. A call visits `nodes` nodes, and as many as were
  // used since the sweep began and no call has counted yet, but at most kUsedALook * nodes of these. So a sweep over n
  // nodes ends after at most n / nodes calls, unless more are used between two calls than one of them may count: each
  // use beyond that adds a node to a later call. A node of many holders counts as one more for each kHoldersALook of
  // them. Returns as `expire`.
  std::size_t expire_some(std::uint64_t before, std::size_t nodes) noexcept;

  std::size_t pages_max() const noexcept { return pages_max_; }
  // Pages dropped so far to keep I7.
  std::uint64_t pages_evicted() const noexcept { return pages_evicted_; }

  // Pages that the instance holds.
  std::size_t pages(std::uint32_t instance) const noexcept {
    return instance < held_pages_.size() ? held_pages_[instance] : 0;
  }
  // Pages in the tree, however many instances hold each.
  std::size_t pages() const noexcept { return pages_; }
  std::size_t node_count() const noexcept { return tree_.node_count(); }
  std::size_t namespace_count() const noexcept { return tree_.namespace_count(); }
  std::size_t bytes() const noexcept;

  // visit(const Node&) for every node.
  template <class Visit>
  void for_each_node(Visit&& visit) const {
    tree_.for_each_root([&](Tree::Root& root) {
      tree_.for_each_below(&root, [&](Node& node) {
        if (!node.is_root()) visit(node);
      });
    });
  }

  // Checks I1 to I3, I6 to I8 and the counters. Throws Error kAudit.
  void audit() const;

 private:
  using Tree = RadixTree<InstancePayload>;

  std::uint64_t advance(std::uint64_t now) noexcept { return now_ = std::max(now_, now); }
  Node* cut(Node* node, std::uint32_t pages_before);
  void make_room_for_holder(Node* node);
  bool drop_holder(Node* node, std::uint32_t instance) noexcept;
  void drop_holder_below(Node* top, std::uint32_t instance) noexcept;
  void detach_if_unheld(Node* node) noexcept;
  void use(Node* last) noexcept;
  void place_before(Node* node, Node* older) noexcept;
  void take_out(Node* node) noexcept;
  void evict(std::size_t pages) noexcept;
  static std::size_t look_cost(const Node& node) noexcept { return 1 + node.payload.holders.size() / kHoldersALook; }
  std::size_t drop_stale(Node* node, std::uint64_t before) noexcept;
  // add(instance, pages) for every holder that has used them since `since`; reserve(at most their number) before.
  template <class Reserve, class Add>
  static void collect(const Tree::Position& position, std::uint64_t since, Reserve&& reserve, Add&& add);
  static void collect(const Tree::Position& position, std::vector<InstanceHit>& out);

  static constexpr std::size_t kHoldersALook = 64;
  static constexpr std::size_t kUsedALook = 4;

  Tree tree_;
  std::size_t pages_max_;
  std::uint64_t pages_evicted_ = 0;
  Node* newest_ = nullptr;  // I6
  Node* oldest_ = nullptr;
  Node* sweep_ = nullptr;  // the next node that expire_some looks at; null when no sweep is under way
  std::uint64_t sweep_before_ = 0;
  std::size_t used_since_ = 0;  // the cost of looking at nodes that were used, so far as no expire_some has counted it
  std::uint64_t now_ = 0;
  std::size_t pages_ = 0;
  std::size_t holder_room_ = 0;          // sum of the capacities of all nodes' holders
  std::vector<std::size_t> held_pages_;  // by instance
};

}  // namespace kvpool
