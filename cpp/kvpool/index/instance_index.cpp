#include "kvpool/index/instance_index.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/index/read_once.h"

namespace kvpool {
namespace {

std::uint32_t checked_page_tokens(std::uint32_t page_tokens) {
  if (page_tokens == 0) throw Error(ErrorCode::kArgument, "block_tokens must be at least 1");
  return page_tokens;
}

constexpr auto kNoVisit = [](InstanceNode*, std::uint32_t) noexcept {};

}  // namespace

InstanceIndex::InstanceIndex(std::uint32_t page_tokens, std::uint64_t seed, std::size_t pages_max)
    : tree_(checked_page_tokens(page_tokens), seed), pages_max_(pages_max) {}

std::size_t InstanceIndex::insert(std::string_view name_space, const Token* tokens, std::size_t pages,
                                  std::uint32_t instance, std::uint64_t now, bool lasting, std::uint64_t since) {
  if (instance > kInstanceMax) {
    throw Error(ErrorCode::kArgument,
                "instance " + std::to_string(instance) + " is above the largest, " + std::to_string(kInstanceMax),
                {{"instance", instance}, {"largest", kInstanceMax}});
  }
  if (pages == 0) return 0;
  if (held_pages_.size() <= instance) held_pages_.resize(std::size_t{instance} + 1);
  Tree::Root* root = tree_.ensure_root(name_space);
  try {
    const Tree::Position position = tree_.descend(root, tokens, pages, kNoVisit);
    Node* last = position.at_end_of_node() ? position.node : cut(position.node, position.pages_in_node);
    std::unique_ptr<Node> made;
    if (position.pages < pages) {
      made = tree_.make_node(tokens + position.pages * tree_.page_tokens(),
                             static_cast<std::uint32_t>(pages - position.pages));
      made->payload.holders.reserve(1);
      tree_.reserve(1);
    }
    // I1: the nodes that the instance does not hold yet are the last ones.
    for (Node* node = last; !node->is_root() && node->payload.find(instance) == nullptr; node = node->parent) {
      make_room_for_holder(node);
    }

    // From here on nothing throws.
    if (made != nullptr) {
      Node* const parent = last;
      last = made.release();
      tree_.attach(parent, last);
      place_before(last, newest_);
      pages_ += last->pages;
      holder_room_ += last->payload.holders.capacity();
    }
    now = advance(now);
    const std::uint64_t used = lasting ? kLasting : now;
    std::size_t added = 0;
    std::size_t renewed = 0;
    for (Node* node = last; !node->is_root(); node = node->parent) {
      if (Holder* holder = node->payload.find(instance)) {
        if (node->payload.last_use(*holder) < since) renewed += node->pages;
        holder->last_used = std::max(holder->last_used, used);  // what lasts goes on lasting
      } else {
        node->payload.holders.insert(node->payload.place_of(instance), Holder{instance, used});
        added += node->pages;
      }
    }
    held_pages_[instance] += added;
    use(last);
    if (pages_max_ != 0 && pages_ > pages_max_) evict(pages_ - pages_max_);
    return added + renewed;
  } catch (...) {
    tree_.drop_root_if_empty(root);
    throw;
  }
}

void InstanceIndex::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, std::uint64_t now,
                          std::vector<InstanceHit>& out) {
  out.clear();
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return;
  PageCopy copy(tree_.page_tokens());
  const Tree::Position position =
      descend_read_once(tree_, root, tokens, n_tokens / tree_.page_tokens(), copy, kNoVisit);
  if (position.pages == 0) return;
  collect(position, out);
  Node* last = position.at_end_of_node() ? position.node : cut(position.node, position.pages_in_node);
  now = advance(now);
  for (Node* node = last; !node->is_root(); node = node->parent) node->payload.matched = now;
  use(last);
}

void InstanceIndex::peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                         std::vector<InstanceHit>& out) const {
  out.clear();
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return;
  PageCopy copy(tree_.page_tokens());
  const Tree::Position position =
      descend_read_once(tree_, root, tokens, n_tokens / tree_.page_tokens(), copy, kNoVisit);
  if (position.pages > 0) collect(position, out);
}

void InstanceIndex::peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, InstanceHits& out,
                         std::uint64_t since) const {
  out.clear();
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return;
  PageCopy copy(tree_.page_tokens());
  const Tree::Position position =
      descend_read_once(tree_, root, tokens, n_tokens / tree_.page_tokens(), copy, kNoVisit);
  if (position.pages == 0) return;
  collect(
      position, since, [&](std::size_t n) { out.reserve(n); },
      [&](std::uint32_t instance, std::size_t pages) { out.add(instance, pages); });
}

void InstanceIndex::collect(const Tree::Position& position, std::vector<InstanceHit>& out) {
  collect(
      position, 0, [&](std::size_t n) { out.reserve(n); },
      [&](std::uint32_t instance, std::size_t pages) { out.push_back(InstanceHit{instance, pages}); });
}

// From the end of the path upwards, each node adds the holders that no node below it has added. By I2, who has used a
// node lately enough has used the nodes above it, too.
template <class Reserve, class Add>
void InstanceIndex::collect(const Tree::Position& position, std::uint64_t since, Reserve&& reserve, Add&& add) {
  const Node* first = position.node;
  while (!first->parent->is_root()) first = first->parent;
  reserve(first->payload.holders.size());
  const InstancePayload none;
  const InstancePayload* below = &none;
  std::size_t pages = position.pages;
  std::size_t added = 0;
  for (const Node* node = position.node; !node->is_root(); node = node->parent) {
    const InstancePayload& payload = node->payload;
    if (payload.holders.size() != added) {  // else these are the holders (I1)
      auto other = below->holders.begin();
      for (const Holder& holder : payload.holders) {
        bool was_added = false;
        if (other != below->holders.end() && other->instance == holder.instance) {
          was_added = below->last_use(*other) >= since;
          ++other;
        }
        if (was_added || payload.last_use(holder) < since) continue;
        add(holder.instance, pages);
        ++added;
      }
    }
    below = &payload;
    pages -= node == position.node ? position.pages_in_node : node->pages;
  }
}

std::size_t InstanceIndex::remove(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                                  std::size_t first_page, std::uint32_t instance) {
  const std::size_t before = pages(instance);
  if (before == 0 || first_page >= n_tokens / tree_.page_tokens()) return 0;
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return 0;
  const Tree::Position position = tree_.descend(root, tokens, first_page + 1, kNoVisit);
  if (position.pages <= first_page) return 0;
  Node* const node = position.node;
  if (node->payload.find(instance) == nullptr) return 0;

  const std::uint32_t kept = position.pages_in_node - 1;
  if (kept > 0 && node->payload.holders.size() == 1) {
    // No other instance holds the dropped pages: shorten the run in place, which needs no memory.
    drop_holder_below(node, instance);
    const std::uint32_t gone = node->pages - kept;
    held_pages_[instance] -= gone;
    pages_ -= gone;
    tree_.truncate(node, kept);
  } else {
    if (kept > 0) cut(node, kept);  // `node` is now what followed
    drop_holder_below(node, instance);
    drop_holder(node, instance);
    detach_if_unheld(node);
    tree_.drop_root_if_empty(root);
  }
  return before - pages(instance);
}

std::size_t InstanceIndex::remove_instance(std::uint32_t instance) noexcept {
  const std::size_t before = pages(instance);
  if (before == 0) return 0;
  tree_.for_each_root([&](Tree::Root& root) { drop_holder_below(&root, instance); });
  tree_.drop_empty_roots();
  return before;
}

std::size_t InstanceIndex::expire(std::uint64_t before) noexcept {
  std::size_t dropped = 0;
  const auto enter = [&](Node* node) noexcept {
    dropped += drop_stale(node, before);
    return true;
  };
  tree_.for_each_root([&](Tree::Root& root) {
    tree_.walk_below(&root, enter, [this](Node* node) noexcept { detach_if_unheld(node); });
  });
  tree_.drop_empty_roots();
  return dropped;
}

// By I6 the sweep comes to a node after all that lie below it, so I1 holds between two calls: who has lost this node
// has lost those before. What lies below and was used since the sweep passed it was used with this node, after
// `before`.
std::size_t InstanceIndex::expire_some(std::uint64_t before, std::size_t nodes) noexcept {
  if (sweep_ == nullptr) {
    used_since_ = 0;
    sweep_ = oldest_;
    sweep_before_ = std::min(before, now_ + 1);
    advance(sweep_before_);  // so no use from now on is before it
  }
  const std::size_t used = std::min(used_since_, kUsedALook * nodes);
  used_since_ -= used;
  std::size_t left = nodes + used;
  std::size_t dropped = 0;
  while (sweep_ != nullptr && left > 0) {
    Node* const node = sweep_;
    Node* const parent = node->parent;
    sweep_ = node->payload.newer;
    left -= std::min(left, look_cost(*node));
    dropped += drop_stale(node, sweep_before_);
    detach_if_unheld(node);
    if (parent->is_root()) tree_.drop_root_if_empty(static_cast<Tree::Root*>(parent));
  }
  return dropped;
}

// Drops the node's holders that have not used it at `before` or later. Returns how many pages that were.
std::size_t InstanceIndex::drop_stale(Node* node, std::uint64_t before) noexcept {
  InstancePayload& payload = node->payload;
  if (payload.matched >= before) return 0;
  const std::size_t dropped = std::erase_if(payload.holders, [&](const Holder& holder) noexcept {
    if (holder.last_used >= before) return false;
    held_pages_[holder.instance] -= node->pages;
    return true;
  });
  return dropped * node->pages;
}

InstanceIndex::Node* InstanceIndex::cut(Node* lower, std::uint32_t pages_before) {
  Node* upper = tree_.split(lower, pages_before);
  place_before(upper, lower);
  holder_room_ += upper->payload.holders.capacity();
  return upper;
}

void InstanceIndex::make_room_for_holder(Node* node) {
  std::vector<Holder>& holders = node->payload.holders;
  const std::size_t room = holders.capacity();
  if (holders.size() < room) return;
  holders.reserve(2 * room);  // not 0: I3
  holder_room_ += holders.capacity() - room;
}

// False when the instance does not hold the node.
bool InstanceIndex::drop_holder(Node* node, std::uint32_t instance) noexcept {
  const auto at = node->payload.place_of(instance);
  if (at == node->payload.holders.end() || at->instance != instance) return false;
  node->payload.holders.erase(at);
  held_pages_[instance] -= node->pages;
  return true;
}

void InstanceIndex::drop_holder_below(Node* top, std::uint32_t instance) noexcept {
  // I1: where a node is not held, nothing below it is.
  tree_.walk_below(
      top, [&](Node* node) noexcept { return drop_holder(node, instance); },
      [this](Node* node) noexcept { detach_if_unheld(node); });
}

// REQUIRES: an unheld node has no children.
void InstanceIndex::detach_if_unheld(Node* node) noexcept {
  if (!node->payload.holders.empty()) return;
  pages_ -= node->pages;
  holder_room_ -= node->payload.holders.capacity();
  take_out(node);
  tree_.detach(node);
}

// A use of a node is one of everything above it: from its end upwards, so that what is above is newer (I6).
void InstanceIndex::use(Node* last) noexcept {
  const bool sweeping = sweep_ != nullptr;
  for (Node* node = last; !node->is_root(); node = node->parent) {
    take_out(node);
    place_before(node, newest_);
    if (sweeping && sweep_ == nullptr) sweep_ = node;  // it stood at the newest one
    used_since_ += look_cost(*node);
  }
}

// REQUIRES: `node` is not in the order; `older` is, or is null in an order of none.
void InstanceIndex::place_before(Node* node, Node* older) noexcept {
  Node* const newer = older == nullptr ? nullptr : older->payload.newer;
  node->payload.newer = newer;
  node->payload.older = older;
  (newer == nullptr ? newest_ : newer->payload.older) = node;
  (older == nullptr ? oldest_ : older->payload.newer) = node;
}

void InstanceIndex::take_out(Node* node) noexcept {
  InstancePayload& payload = node->payload;
  if (sweep_ == node) sweep_ = payload.newer;
  (payload.newer == nullptr ? newest_ : payload.newer->payload.older) = payload.older;
  (payload.older == nullptr ? oldest_ : payload.older->payload.newer) = payload.newer;
}

// Drops pages, the longest unused first, of equally long unused ones the end of the prompt.
void InstanceIndex::evict(std::size_t pages) noexcept {
  pages_evicted_ += pages;
  while (pages > 0) {
    Node* const node = oldest_;
    const auto gone = static_cast<std::uint32_t>(std::min<std::size_t>(node->pages, pages));
    for (const Holder& holder : node->payload.holders) held_pages_[holder.instance] -= gone;
    pages -= gone;
    if (gone < node->pages) {
      pages_ -= gone;
      tree_.truncate(node, node->pages - gone);
      return;
    }
    auto* const root = Tree::root_of(node);
    node->payload.holders.clear();
    detach_if_unheld(node);
    tree_.drop_root_if_empty(root);
  }
}

std::size_t InstanceIndex::bytes() const noexcept {
  return tree_.bytes() + holder_room_ * sizeof(Holder) + held_pages_.capacity() * sizeof(std::size_t);
}

void InstanceIndex::audit() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "instance index: " + what); };
  if (const std::string fault = tree_.audit(); !fault.empty()) fail(fault);
  std::size_t pages = 0;
  std::size_t holder_room = 0;
  std::vector<std::size_t> held_pages(held_pages_.size());
  for_each_node([&](const Node& node) {
    const InstancePayload& payload = node.payload;
    if (payload.matched > now_) fail("a match in the future");
    pages += node.pages;
    holder_room += payload.holders.capacity();
    if (payload.holders.empty()) fail("a node that nobody holds (I3)");
    for (std::size_t i = 0; i < payload.holders.size(); ++i) {
      const Holder& holder = payload.holders[i];
      if (i > 0 && payload.holders[i - 1].instance >= holder.instance) fail("holders out of order");
      if (holder.instance >= held_pages.size()) fail("a holder that was never inserted");
      held_pages[holder.instance] += node.pages;
      if (holder.last_used > now_ && holder.last_used != kLasting) fail("a use in the future");
      if (node.parent->is_root()) continue;
      InstancePayload& above = node.parent->payload;
      const Holder* same = above.find(holder.instance);
      if (same == nullptr) fail("a holder that does not hold what comes before (I1)");
      if (above.last_use(*same) < payload.last_use(holder)) fail("a use that was not a use of what comes before (I2)");
    }
  });
  if (pages != pages_ || held_pages != held_pages_) fail("a wrong count of pages");
  if (pages_max_ != 0 && pages > pages_max_) fail("more pages than it may have (I7)");
  std::unordered_set<const Node*> newer;
  const Node* before = nullptr;
  for (const Node* node = newest_; node != nullptr; node = node->payload.older) {
    if (node->payload.newer != before) fail("a node that does not know the newer one (I6)");
    if (!node->parent->is_root() && !newer.contains(node->parent)) fail("a node that is newer than its parent (I6)");
    newer.insert(node);
    before = node;
  }
  if (before != oldest_ || newer.size() != node_count()) fail("nodes that are in no order (I6)");
  if (sweep_ != nullptr && !newer.contains(sweep_)) fail("a sweep that is at no node (I8)");
  if (holder_room != holder_room_) fail("a wrong count of room for holders");
}

}  // namespace kvpool
