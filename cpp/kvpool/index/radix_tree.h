// A radix tree over pages of tokens: the structure under the prompt index (payload: addresses) and under a router's
// tree (payload: the instances that hold a prefix). It knows tokens, nodes and namespaces; its owner interprets
// payloads and decides which nodes to remove.
//
// A node holds a run of whole pages. A page is `page_tokens` tokens, the block size of the engine.
//
//   before                      split(x, 2)                   after
//   parent                                                    parent
//     |                                                         |
//     x = [p0 p1 p2 p3]                                         u = [p0 p1]      new node: takes x's place
//     |                                                         |
//   children of x                                               x = [p2 p3]      same node object: keeps its children
//                                                               |
//                                                             children of x
//
// Invariants
//   R1  Every node but a root has at least one page; children of one node differ in their first page.
//   R2  split() keeps the identity of the lower half: a reference to a node stands for everything up to the node's end.
//   R3  A child is found in `table_` under key(parent, hash of its first page), and stands in `parent->children`.
//   R4  Calls that throw (std::bad_alloc) have changed nothing but, at most, where runs are cut.
//
// Payload has: struct Cut (default constructible); void prepare_cut(SpanHeap&, pages_before_cut, pages, Cut&) const,
// which may throw; static void commit_cut(Cut&, Payload& upper, Payload& lower, pages_before_cut, pages) noexcept.
//
// Thread-safety: none; the owner locks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/span_heap.h"
#include "kvpool/index/child_order.h"
#include "kvpool/index/child_table.h"
#include "kvpool/index/token_run.h"

namespace kvpool {

struct HeapDeleter {
  void operator()(void* memory) const noexcept { SpanHeap::deallocate(memory); }
};
// An array in the heap of a tree; must not outlive it.
template <class T>
using Buffer = std::unique_ptr<T[], HeapDeleter>;  // NOLINT(modernize-avoid-c-arrays)

template <class T>
Buffer<T> make_buffer(SpanHeap& heap, std::size_t n) {
  return Buffer<T>(static_cast<T*>(heap.allocate(n * sizeof(T))));
}

// Gives the end of a buffer back to the heap. Cannot fail.
template <class T>
void shrink_buffer(Buffer<T>& buffer, std::size_t n) noexcept {
  buffer.reset(static_cast<T*>(SpanHeap::shrink(buffer.release(), n * sizeof(T))));
}

// The first cache line of a node has the fields that searches read, in the child table and in the treap.
template <class Payload>
struct alignas(64) RadixNode {
  Buffer<Token> tokens;  // the run: pages * page_tokens
  RadixNode* parent = nullptr;
  RadixNode* left = nullptr;  // in the treap of the parent's children
  RadixNode* right = nullptr;
  TokenHead head{};
  std::uint64_t key = 0;  // under which the child table has this node
  std::uint32_t pages = 0;
  std::uint32_t priority = 0;  // in the treap

  Payload payload;
  RadixNode* children = nullptr;  // root of the treap of this node's children
  std::uint32_t child_count = 0;

  bool is_root() const noexcept { return parent == nullptr; }

  static void* operator new(std::size_t bytes, SpanHeap& heap) { return heap.allocate(bytes); }
  static void operator delete(void* memory, SpanHeap& /*heap*/) noexcept { SpanHeap::deallocate(memory); }
  static void operator delete(void* memory) noexcept { SpanHeap::deallocate(memory); }
};

template <class Payload>
class RadixTree {
 public:
  using Node = RadixNode<Payload>;

  // Roots are not in the heap: they exist before the heap is used, and are few.
  struct Root : Node {
    std::string name;
    static void* operator new(std::size_t bytes) { return ::operator new(bytes, std::align_val_t{alignof(Root)}); }
    static void operator delete(void* memory) noexcept { ::operator delete(memory, std::align_val_t{alignof(Root)}); }
  };

  // Where a walk ended: `pages` whole pages agree, the last `pages_in_node` of them in `node`.
  struct Position {
    Node* node;
    std::uint32_t pages_in_node;
    std::size_t pages;
    bool at_end_of_node() const noexcept { return pages_in_node == node->pages; }
  };

  RadixTree(std::uint32_t page_tokens, std::uint64_t seed)
      : page_tokens_(page_tokens), order_(page_tokens), seed_(seed), random_(seed | 1U) {
    ensure_root("");
  }
  ~RadixTree() {
    for (auto& [name, root] : roots_) clear(root.get());
  }
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  std::uint32_t page_tokens() const noexcept { return page_tokens_; }
  std::size_t node_count() const noexcept { return table_.size(); }
  std::size_t namespace_count() const noexcept { return roots_.size(); }

  // Null when no prompt was ever stored under that name. The default namespace "" always exists.
  Root* find_root(std::string_view name) const noexcept {
    if (name.empty()) return default_root_;
    const auto it = roots_.find(name);
    return it == roots_.end() ? nullptr : it->second.get();
  }
  Root* ensure_root(std::string_view name) {
    if (Root* root = find_root(name)) return root;
    auto root = std::make_unique<Root>();
    root->name = name;
    Root* made = root.get();
    roots_.emplace(root->name, std::move(root));
    if (name.empty()) default_root_ = made;
    return made;
  }
  void drop_root_if_empty(Root* root) noexcept {
    if (root->children == nullptr && root != default_root_) roots_.erase(roots_.find(root->name));
  }
  void drop_empty_roots() noexcept {
    std::erase_if(roots_, [this](const auto& entry) noexcept {
      const Root* root = entry.second.get();
      return root->children == nullptr && root != default_root_;
    });
  }
  static Root* root_of(Node* node) noexcept {
    while (!node->is_root()) node = node->parent;
    return static_cast<Root*>(node);
  }
  template <class Visit>
  void for_each_root(Visit&& visit) const {
    for (const auto& [name, root] : roots_) visit(*root);
  }

  // Follows `tokens` for at most `pages` pages. Calls visit(node, pages of it that agree) for every node on the way.
  template <class Visit>
  Position descend(Node* root, const Token* tokens, std::size_t pages, Visit&& visit) const {
    Position position{root, 0, 0};
    while (position.pages < pages) {
      const Token* rest = tokens + position.pages * page_tokens_;
      Node* child = find_child(position.node, rest);
      if (child == nullptr) break;
      const std::size_t comparable = std::min<std::size_t>(child->pages, pages - position.pages);
      // find_child has compared the first page.
      const std::size_t agreed = agreement(child->tokens.get() + page_tokens_, rest + page_tokens_,  //
                                           (comparable - 1) * page_tokens_);
      const auto whole = static_cast<std::uint32_t>(1 + agreed / page_tokens_);
      visit(child, whole);
      position = Position{child, whole, position.pages + whole};
      if (whole < child->pages) break;
    }
    return position;
  }

  // How many tokens of the next page after `position` agree. `rest` holds the n tokens that follow its pages.
  std::size_t agreement_beyond(const Position& position, const Token* rest, std::size_t n) const noexcept {
    const std::size_t within = std::min<std::size_t>(n, page_tokens_);
    if (within == 0) return 0;
    if (!position.at_end_of_node()) {
      return agreement(position.node->tokens.get() + std::size_t{position.pages_in_node} * page_tokens_, rest, within);
    }
    return order_.longest_agreement(position.node->children, rest, within);
  }

  Node* find_child(Node* parent, const Token* page) const noexcept {
    if (parent->children == nullptr) return nullptr;
    return table_.find(child_key(parent, page), [&](const Node* node) {
      return node->parent == parent && std::memcmp(node->tokens.get(), page, page_tokens_ * sizeof(Token)) == 0;
    });
  }

  // Cuts `lower` after its first `pages_before` pages and returns the new upper node (picture above).
  // REQUIRES: 0 < pages_before < lower->pages. Throws std::bad_alloc and changes nothing.
  Node* split(Node* lower, std::uint32_t pages_before) {
    KVPOOL_DCHECK(pages_before > 0 && pages_before < lower->pages);
    table_.reserve(1);
    const std::uint32_t pages_after = lower->pages - pages_before;
    std::unique_ptr<Node> upper(new (heap_) Node);
    auto tail = make_buffer<Token>(heap_, std::size_t{pages_after} * page_tokens_);
    typename Payload::Cut cut;
    lower->payload.prepare_cut(heap_, pages_before, lower->pages, cut);

    // From here on nothing throws.
    Node* top = upper.release();
    std::memcpy(tail.get(), lower->tokens.get() + std::size_t{pages_before} * page_tokens_,
                std::size_t{pages_after} * page_tokens_ * sizeof(Token));
    order_.replace(&lower->parent->children, lower, top);
    table_.replace(lower->key, lower, top);
    top->parent = lower->parent;
    top->key = lower->key;
    top->head = lower->head;
    top->pages = pages_before;
    top->tokens = std::move(lower->tokens);
    shrink_buffer(top->tokens, std::size_t{pages_before} * page_tokens_);
    Payload::commit_cut(cut, top->payload, lower->payload, pages_before, lower->pages);
    set_run(lower, std::move(tail), pages_after);
    link(top, lower);
    return top;
  }

  // Makes a node with a copy of the tokens, outside the tree. Throws std::bad_alloc.
  std::unique_ptr<Node> make_node(const Token* tokens, std::uint32_t pages) {
    std::unique_ptr<Node> node(new (heap_) Node);
    const std::size_t n = std::size_t{pages} * page_tokens_;
    auto run = make_buffer<Token>(heap_, n);
    std::memcpy(run.get(), tokens, n * sizeof(Token));
    set_run(node.get(), std::move(run), pages);
    return node;
  }

  // Makes room for n calls of attach(), which cannot fail. Throws std::bad_alloc.
  void reserve(std::size_t n) { table_.reserve(n); }

  // REQUIRES: reserve(); the parent has no child with this first page.
  void attach(Node* parent, Node* node) noexcept {
    node->parent = parent;
    link(parent, node);
  }

  // Takes a node without children out of the tree and returns it to the caller.
  std::unique_ptr<Node> detach(Node* node) noexcept {
    KVPOOL_DCHECK(node->children == nullptr && !node->is_root());
    table_.erase(node->key, node);
    order_.erase(&node->parent->children, node);
    --node->parent->child_count;
    return std::unique_ptr<Node>(node);
  }

  // Drops the last pages of a run. REQUIRES: no children; 0 < pages <= node->pages.
  void truncate(Node* node, std::uint32_t pages) noexcept {
    shrink_buffer(node->tokens, std::size_t{pages} * page_tokens_);
    node->pages = pages;
  }

  // Any leaf below (or at) `node`, always following the root of the treap.
  static Node* some_leaf(Node* node) noexcept {
    while (node->children != nullptr) node = node->children;
    return node;
  }

  // Visits `top` and every node below it, parents first. No recursion in the tree's depth, no allocation.
  template <class Visit>
  void for_each_below(Node* top, Visit&& visit) const {
    Node* node = top;
    visit(*node);
    for (;;) {
      if (node->children != nullptr) {
        node = leftmost(node->children);
      } else {
        while (node != top && next_sibling(node) == nullptr) node = node->parent;
        if (node == top) return;
        node = next_sibling(node);
      }
      visit(*node);
    }
  }

  // Walks everything below `top`, parents first: enter(node) returns whether to descend below the node; leave(node) is
  // called after that, and may detach the node. No recursion in the tree's depth, no allocation.
  template <class Enter, class Leave>
  void walk_below(Node* top, Enter&& enter, Leave&& leave) const {
    Node* node = top->children == nullptr ? nullptr : leftmost(top->children);
    while (node != nullptr) {
      if (enter(node) && node->children != nullptr) {
        node = leftmost(node->children);
        continue;
      }
      for (;;) {
        Node* const parent = node->parent;
        Node* const next = next_sibling(node);
        leave(node);
        node = next;
        if (next != nullptr) break;
        if (parent == top) return;
        node = parent;
      }
    }
  }

  // Checks R1 and R3 over the whole tree; returns what is wrong, or an empty string.
  std::string audit() const {
    std::string fault;
    std::size_t nodes = 0;
    for (const auto& [name, root] : roots_) {
      for_each_below(root.get(), [&](Node& node) {
        std::uint32_t children = 0;
        order_.for_each(node.children, [&](Node* child) {
          ++children;
          if (child->parent != &node) fault = "a child does not know its parent";
          if (child->pages == 0) fault = "a node without pages";
          if (child->key != child_key(&node, child->tokens.get())) fault = "a node under a wrong key";
          if (find_child(&node, child->tokens.get()) != child) fault = "a child that the table does not find";
        });
        if (children != node.child_count) fault = "a wrong count of children";
        nodes += children;
      });
    }
    if (nodes != table_.size()) fault = "the child table and the tree differ in size";
    return fault;
  }

  // For payloads that allocate arrays.
  SpanHeap& heap() noexcept { return heap_; }

  // The tree's memory: what its heap has touched, and the child table.
  std::size_t bytes() const noexcept { return heap_.touched_bytes() + table_.bytes(); }

 private:
  struct NameHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view name) const noexcept { return std::hash<std::string_view>{}(name); }
  };

  std::uint64_t child_key(const Node* parent, const Token* page) const noexcept {
    // The parent's address in the seed keeps equal pages below different parents apart.
    return hash_tokens(page, page_tokens_, seed_ ^ (reinterpret_cast<std::uintptr_t>(parent) * 0x9E3779B97F4A7C15ULL));
  }

  void set_run(Node* node, Buffer<Token> run, std::uint32_t pages) const noexcept {
    node->tokens = std::move(run);
    node->pages = pages;
    node->head = head_of(node->tokens.get(), page_tokens_);
  }

  void link(Node* parent, Node* node) noexcept {
    node->parent = parent;
    node->key = child_key(parent, node->tokens.get());
    random_ ^= random_ << 13U;
    random_ ^= random_ >> 7U;
    random_ ^= random_ << 17U;
    node->priority = static_cast<std::uint32_t>(random_ >> 32U);
    order_.insert(&parent->children, node);
    table_.insert(node->key, node);
    ++parent->child_count;
  }

  static Node* leftmost(Node* node) noexcept {
    while (node->left != nullptr) node = node->left;
    return node;
  }

  // The next child of the same parent in order, searched from the parent's treap, because treap nodes have no parent
  // link.
  Node* next_sibling(Node* node) const noexcept {
    if (node->right != nullptr) return leftmost(node->right);
    Node* next = nullptr;
    for (Node* at = node->parent->children; at != node;) {
      const std::size_t agreed = agreement(node->tokens.get(), at->tokens.get(), page_tokens_);
      if (node->tokens[agreed] < at->tokens[agreed]) {
        next = at;
        at = at->left;
      } else {
        at = at->right;
      }
    }
    return next;
  }

  // Frees everything below a root. Every leaf that it takes is the root of its parent's treap, so it needs no search.
  void clear(Root* root) noexcept {
    for (Node* leaf = some_leaf(root); leaf != root;) {
      Node* const parent = leaf->parent;
      order_.erase(&parent->children, leaf);
      delete leaf;
      leaf = some_leaf(parent);  // not from the root: that would be quadratic in the depth
    }
  }

  SpanHeap heap_;  // first: everything of the tree lies in it
  std::uint32_t page_tokens_;
  ChildOrder<Node> order_;
  std::uint64_t seed_;
  std::uint64_t random_;
  ChildTable<Node> table_;
  std::unordered_map<std::string, std::unique_ptr<Root>, NameHash, std::equal_to<>> roots_;
  Root* default_root_ = nullptr;
};

}  // namespace kvpool
