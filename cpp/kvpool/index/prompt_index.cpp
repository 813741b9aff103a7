#include "kvpool/index/prompt_index.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/index/read_once.h"

namespace kvpool {
namespace {

std::uint32_t checked_page_tokens(std::uint32_t page_tokens) {
  if (page_tokens == 0) throw Error(ErrorCode::kArgument, "block_tokens must be at least 1");
  return page_tokens;
}

inline void prefetch(const void* memory) noexcept { __builtin_prefetch(memory); }

}  // namespace

PromptIndex::PromptIndex(std::uint32_t page_tokens, EvictionPolicy policy, Values values, IndexObserver* observer,
                         std::uint64_t seed)
    : tree_(checked_page_tokens(page_tokens), seed),
      policy_(policy),
      values_(values),
      observer_(observer),
      order_(make_eviction_order(policy)) {}

PromptIndex::~PromptIndex() {
  while (first_forgotten_ != nullptr) {
    const std::unique_ptr<Node> node(first_forgotten_);
    first_forgotten_ = node->payload.newer;
  }
}

ValueClass PromptIndex::class_of(Address value) const noexcept {
  if (values_ == Values::kOpaque) return ValueClass::kOpaque;
  const std::uint32_t instance = instance_of(value);
  if (instance != 0 && instance != instance_) return ValueClass::kRemote;
  return value_class_of(medium_of(value));
}

IndexHit PromptIndex::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return {};
  const std::size_t page_tokens = tree_.page_tokens();
  Address* end = out;
  PageCopy copy(page_tokens);
  const Tree::Position position =
      descend_read_once(tree_, root, tokens, n_tokens / page_tokens, copy, [&](Node* node, std::uint32_t pages) {
        // The neighbours in the recency list are written when the pins below take the node out of it.
        if (node->payload.older != nullptr) prefetch(&node->payload.older->payload.newer);
        if (node->payload.newer != nullptr) prefetch(&node->payload.newer->payload.older);
        end = std::copy_n(node->payload.values.get(), pages, end);
      });
  const std::size_t done = position.pages * page_tokens;
  IndexHit hit;
  hit.partial_tokens = agreement_beyond_read_once(tree_, position, tokens + done, n_tokens - done, copy);
  if (position.pages == 0) return hit;
  Node* last = position.at_end_of_node() ? position.node : cut(position.node, position.pages_in_node);
  hit.pages = position.pages;
  hit.pin = pin(last);
  for (Node* node = last; !node->is_root(); node = node->parent) {
    if (node->payload.hits != std::numeric_limits<std::uint32_t>::max()) ++node->payload.hits;
  }
  return hit;
}

IndexHit PromptIndex::peek(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out,
                           MatchEnd* end) const noexcept {
  IndexHit hit;
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) {
    if (end != nullptr) *end = MatchEnd::kNoNamespace;
    return hit;
  }
  const std::size_t page_tokens = tree_.page_tokens();
  const Tree::Position position =
      tree_.descend(root, tokens, n_tokens / page_tokens, [&](Node* node, std::uint32_t pages) {
        if (out != nullptr) out = std::copy_n(node->payload.values.get(), pages, out);
      });
  const std::size_t done = position.pages * page_tokens;
  hit.pages = position.pages;
  hit.partial_tokens = tree_.agreement_beyond(position, tokens + done, n_tokens - done);
  if (end != nullptr) {
    const bool more_stored = !position.at_end_of_node() || position.node->children != nullptr;
    *end = position.pages == n_tokens / page_tokens ? MatchEnd::kComplete
           : more_stored                            ? MatchEnd::kDiverges
                                                    : MatchEnd::kNothingBeyond;
  }
  return hit;
}

IndexInsertion PromptIndex::insert(std::string_view name_space, const Token* tokens, std::size_t pages,
                                   const Address* values, Address* canonical) {
  IndexInsertion insertion;
  if (pages == 0) return insertion;
  Tree::Root* root = tree_.ensure_root(name_space);
  try {
    Address* present = canonical;
    const Tree::Position position = tree_.descend(root, tokens, pages, [&](Node* node, std::uint32_t agreed) {
      if (node->payload.older != nullptr) prefetch(&node->payload.older->payload.newer);
      if (node->payload.newer != nullptr) prefetch(&node->payload.newer->payload.older);
      present = std::copy_n(node->payload.values.get(), agreed, present);
    });
    Node* last = position.at_end_of_node() ? position.node : cut(position.node, position.pages_in_node);
    insertion.pages_present = position.pages;

    // New nodes, one for each run of values of one class, are made before anything is linked.
    std::vector<std::unique_ptr<Node>> made;
    for (std::size_t first = position.pages; first < pages;) {
      const ValueClass value_class = class_of(values[first]);
      std::size_t end = first + 1;
      while (end < pages && class_of(values[end]) == value_class) ++end;
      auto node = tree_.make_node(tokens + first * tree_.page_tokens(), static_cast<std::uint32_t>(end - first));
      node->payload.values = make_buffer<Address>(tree_.heap(), end - first);
      std::copy_n(values + first, end - first, node->payload.values.get());
      node->payload.value_class = value_class;
      made.push_back(std::move(node));
      first = end;
    }
    tree_.reserve(made.size());
    order_->reserve(tree_.node_count() + made.size());

    std::copy(values + position.pages, values + pages, present);
    for (auto& node : made) {
      Node* const parent = last;
      last = node.release();
      tree_.attach(parent, last);
      pages_of(last->payload.value_class) += last->pages;
      if (observer_ != nullptr) observer_->placed(*last);
      if (events_.has_readers()) publish(EventKind::kStored, last, 0, last->pages, nullptr);
    }
    insertion.pin = pin(last);
    if (policy_ == EvictionPolicy::kFifo) {
      for (Node* node = last; !node->is_root(); node = node->parent) node->payload.stamp = ++clock_;
    }
    return insertion;
  } catch (...) {
    tree_.drop_root_if_empty(root);
    throw;
  }
}

void PromptIndex::undo(const IndexInsertion& insertion) noexcept {
  // The nodes that the insertion made are the last of the path: their pages lie beyond pages_present.
  Node* node = insertion.pin.node;
  std::size_t end = 0;
  for (const Node* at = node; at != nullptr && !at->is_root(); at = at->parent) end += at->pages;
  unpin(insertion.pin);
  while (end > insertion.pages_present) {
    end -= node->pages;
    Node* const parent = node->parent;
    drop_tail(node, node->pages, /*observed=*/false);
    node = parent;
  }
}

IndexPin PromptIndex::pin(Node* last) noexcept {
  for (Node* node = last; !node->is_root(); node = node->parent) {
    if (node->payload.pins++ > 0) continue;
    leave_order(node);
    if (node->payload.held) held_of(node->payload.value_class) -= node->pages;
  }
  return IndexPin{last, ++clock_};
}

void PromptIndex::unpin(const IndexPin& pin) noexcept {
  for (Node* node = pin.node; node != nullptr && !node->is_root();) {
    KVPOOL_DCHECK(node->payload.pins > 0);
    Node* const parent = node->parent;
    if (node->payload.has_limbo) observer_->unpinned(*node, pin.stamp);
    if (--node->payload.pins == 0) {
      if (node->payload.forgotten) {
        drop_forgotten(node);
      } else {
        if (policy_ != EvictionPolicy::kFifo) node->payload.stamp = ++clock_;
        if (node->payload.held) held_of(node->payload.value_class) += node->pages;
        enter_order(node, /*used_now=*/true);
      }
    }
    node = parent;
  }
}

void PromptIndex::enter_order(Node* node, bool used_now) noexcept {
  if (node->payload.held || node->payload.ordered) return;
  used_now ? order_->add(node) : order_->add_unused(node);
  evictable_of(node->payload.value_class) += node->pages;
}

void PromptIndex::leave_order(Node* node) noexcept {
  if (!node->payload.ordered) return;
  order_->remove(node);
  evictable_of(node->payload.value_class) -= node->pages;
}

PromptIndex::Node* PromptIndex::cut(Node* lower, std::uint32_t pages_before) {
  order_->reserve(tree_.node_count() + 1);
  Node* upper = tree_.split(lower, pages_before);
  if (lower->payload.ordered) order_->add_upper(lower, upper);
  if (observer_ != nullptr) observer_->placed(*upper);
  return upper;
}

std::size_t PromptIndex::pages_below(Node* node, std::size_t most) const noexcept {
  std::size_t pages = 0;
  const auto count = [&](const Node* below) {
    if (below->payload.value_class == node->payload.value_class) pages += below->pages;
    return pages <= most;
  };
  tree_.walk_below(node, count, [](const Node*) {});
  return pages;
}

PromptIndex::Node* PromptIndex::isolate(Node* node, std::uint32_t first, std::uint32_t count) {
  if (first > 0) cut(node, first);  // `node` is now what followed
  return count < node->pages ? cut(node, count) : node;
}

IndexErasure PromptIndex::erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                                bool descendants) {
  IndexErasure erasure;
  Tree::Root* root = tree_.find_root(name_space);
  if (root == nullptr) return erasure;
  const Tree::Position position =
      tree_.descend(root, tokens, n_tokens / tree_.page_tokens(), [](Node*, std::uint32_t) noexcept {});
  if (position.pages == 0) return erasure;
  const bool longer = !position.at_end_of_node() || position.node->children != nullptr;
  // Where the tokens go on differently, what is longer does not begin with this prompt.
  const bool whole = position.pages == n_tokens / tree_.page_tokens();
  if (longer && !(descendants && whole)) return erasure;

  // The prompt's own pages reach up to where another prompt branches off.
  Node* top = position.node;
  while (!top->parent->is_root() && top->parent->child_count == 1) top = top->parent;
  if (top->payload.pins > 0) {  // P1: pins below count here too
    tree_.for_each_below(top, [&](const Node& node) {
      if (node.payload.pins > 0) erasure.pages_pinned += node.pages;
    });
    return erasure;
  }
  Node* leaf = Tree::some_leaf(top);
  for (bool more = true; more;) {
    Node* const parent = leaf->parent;
    more = leaf != top;
    erasure.pages += leaf->pages;
    drop_tail(leaf, leaf->pages, /*observed=*/true);
    if (more) leaf = Tree::some_leaf(parent);
  }
  return erasure;
}

std::size_t PromptIndex::evict(ValueClass value_class, std::size_t n) noexcept {
  std::size_t dropped = 0;
  while (dropped < n) {
    Node* coldest = order_->coldest(value_class);
    if (coldest == nullptr) break;
    // A leaf, unless blocks of another class hang below: they are older still (every use of them was a use of this).
    Node* leaf = Tree::some_leaf(coldest);
    if (leaf->payload.held) break;
    std::uint32_t count = leaf->pages;
    if (leaf->payload.value_class == value_class) {
      count = static_cast<std::uint32_t>(std::min<std::size_t>(count, n - dropped));
      dropped += count;
    }
    drop_tail(leaf, count, /*observed=*/true);
  }
  return dropped;
}

std::size_t PromptIndex::forget(Node* top) noexcept {
  KVPOOL_DCHECK(!top->payload.forgotten);
  std::size_t forgotten = 0;
  Node* leaf = Tree::some_leaf(top);
  for (bool more = true; more;) {
    Node* const parent = leaf->parent;
    more = leaf != top;
    forgotten += leaf->pages;
    leaf->payload.pins > 0 ? set_aside(leaf) : drop_tail(leaf, leaf->pages, /*observed=*/true);
    if (more) leaf = Tree::some_leaf(parent);
  }
  return forgotten;
}

// The parent stays as long as this: it has at least the pins that this has (P1), and a cut keeps it as the lower half.
void PromptIndex::set_aside(Node* leaf) noexcept {
  PromptPayload& payload = leaf->payload;
  KVPOOL_DCHECK(leaf->children == nullptr && payload.pins > 0 && !payload.held);
  if (events_.has_readers()) publish(EventKind::kRemoved, leaf, 0, leaf->pages, nullptr);
  pages_of(payload.value_class) -= leaf->pages;
  forgotten_[static_cast<std::size_t>(payload.value_class)] += leaf->pages;
  Node* const parent = leaf->parent;
  static_cast<void>(tree_.detach(leaf).release());
  if (parent->is_root()) {
    leaf->parent = &above_forgotten_;
    tree_.drop_root_if_empty(static_cast<Tree::Root*>(parent));
  }
  payload.forgotten = true;
  payload.older = nullptr;
  payload.newer = first_forgotten_;
  if (first_forgotten_ != nullptr) first_forgotten_->payload.older = leaf;
  first_forgotten_ = leaf;
}

void PromptIndex::drop_forgotten(Node* forgotten) noexcept {
  const std::unique_ptr<Node> node(forgotten);
  const PromptPayload& payload = node->payload;
  if (observer_ != nullptr) observer_->dropped(payload.values.get(), node->pages);
  forgotten_[static_cast<std::size_t>(payload.value_class)] -= node->pages;
  (payload.older == nullptr ? first_forgotten_ : payload.older->payload.newer) = payload.newer;
  if (payload.newer != nullptr) payload.newer->payload.older = payload.older;
}

// REQUIRES: a leaf, not pinned, not held. With observed == false no observer or event reader is told, as if the
// insertion had never happened.
void PromptIndex::drop_tail(Node* leaf, std::uint32_t count, bool observed) noexcept {
  PromptPayload& payload = leaf->payload;
  KVPOOL_DCHECK(leaf->children == nullptr && payload.pins == 0 && !payload.held);
  const std::uint32_t kept = leaf->pages - count;
  if (events_.has_readers()) publish(EventKind::kRemoved, leaf, kept, count, nullptr);
  if (observed && observer_ != nullptr) observer_->dropped(payload.values.get() + kept, count);
  pages_of(payload.value_class) -= count;
  if (kept > 0) {
    if (payload.ordered) evictable_of(payload.value_class) -= count;
    tree_.truncate(leaf, kept);
    shrink_buffer(payload.values, kept);
    return;
  }
  leave_order(leaf);
  Node* const parent = leaf->parent;
  tree_.detach(leaf);
  if (parent->is_root()) tree_.drop_root_if_empty(static_cast<Tree::Root*>(parent));
}

PromptIndex::Node* PromptIndex::hold_coldest(ValueClass value_class, std::size_t pages_max) {
  Node* node = order_->coldest(value_class);
  if (node == nullptr || pages_max == 0) return nullptr;
  if (node->pages > pages_max) cut(node, node->pages - static_cast<std::uint32_t>(pages_max));
  leave_order(node);
  node->payload.held = true;
  held_of(value_class) += node->pages;
  return node;
}

void PromptIndex::release_hold(Node* node) noexcept {
  if (!node->payload.held) return;
  node->payload.held = false;
  if (node->payload.pins > 0) return;
  held_of(node->payload.value_class) -= node->pages;
  enter_order(node, /*used_now=*/false);
}

void PromptIndex::redirect(Node* node, const Address* values) noexcept {
  PromptPayload& payload = node->payload;
  const bool ordered = payload.ordered;
  leave_order(node);
  if (events_.has_readers()) {
    // `publish` reads the node's values as the new ones.
    std::vector<Address> old_values;
    try {
      old_values.assign(payload.values.get(), payload.values.get() + node->pages);
      std::copy_n(values, node->pages, payload.values.get());
      publish(EventKind::kMoved, node, 0, node->pages, old_values.data());
    } catch (const std::bad_alloc&) {
      events_.count_lost();
    }
  }
  const std::uint32_t held = payload.held && payload.pins == 0 ? node->pages : 0;
  pages_of(payload.value_class) -= node->pages;
  held_of(payload.value_class) -= held;
  std::copy_n(values, node->pages, payload.values.get());
  payload.value_class = class_of(values[0]);
  pages_of(payload.value_class) += node->pages;
  held_of(payload.value_class) += held;
  if (ordered) enter_order(node, /*used_now=*/false);
}

}  // namespace kvpool
