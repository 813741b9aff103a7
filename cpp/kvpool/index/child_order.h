// The children of one node, ordered by their first page: a treap threaded through the nodes themselves.
//
// The hash table finds the child that starts with a whole page. This order answers what a hash cannot: what is the
// longest common prefix of a page with any child? In lexicographic order it is with one of the two neighbours of the
// page's place, and both lie on the search path.
//
// Cost: expected O(log children). Nothing here allocates or throws.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kvpool/index/token_run.h"

namespace kvpool {

// The first tokens of a run, copied into its node: most comparisons end there, without reading the run itself.
inline constexpr std::size_t kHeadTokens = 4;
using TokenHead = std::array<Token, kHeadTokens>;

inline TokenHead head_of(const Token* tokens, std::size_t n) noexcept {
  TokenHead head{};
  std::copy_n(tokens, std::min(n, kHeadTokens), head.begin());
  return head;
}

// Node has: Token* tokens (or a smart pointer); TokenHead head; Node* left; Node* right; std::uint32_t priority.
template <class Node>
class ChildOrder {
 public:
  explicit ChildOrder(std::size_t page_tokens) noexcept : page_tokens_(page_tokens) {}

  void insert(Node** root, Node* node) const noexcept {
    Node** link = root;
    while (*link != nullptr && (*link)->priority >= node->priority) {
      link = less(&node->tokens[0], *link) ? &(*link)->left : &(*link)->right;
    }
    split(*link, &node->tokens[0], &node->left, &node->right);
    *link = node;
  }

  // REQUIRES: node is below root.
  void erase(Node** root, Node* node) const noexcept {
    Node** link = find_link(root, node);
    *link = merge(node->left, node->right);
    node->left = node->right = nullptr;
  }

  // Puts `node`, whose first page equals that of `from`, in the place of `from`.
  void replace(Node** root, Node* from, Node* node) const noexcept {
    *find_link(root, from) = node;
    node->left = from->left;
    node->right = from->right;
    node->priority = from->priority;
    from->left = from->right = nullptr;
  }

  // The longest common prefix of `n` <= page_tokens tokens with the first page of any child.
  std::size_t longest_agreement(const Node* root, const Token* tokens, std::size_t n) const noexcept {
    std::size_t best = 0;
    while (root != nullptr && best < n) {
      const std::size_t agreed = agreement_with(tokens, root, n);
      best = std::max(best, agreed);
      if (agreed < n) root = tokens[agreed] < token_of(root, agreed) ? root->left : root->right;
    }
    return best;
  }

  template <class Visit>
  static void for_each(Node* root, Visit&& visit) {  // depth is expected O(log children)
    if (root == nullptr) return;
    for_each(root->left, visit);
    Node* right = root->right;
    visit(root);
    for_each(right, visit);
  }

 private:
  static std::size_t agreement_with(const Token* tokens, const Node* node, std::size_t n) noexcept {
    const std::size_t near = std::min(n, kHeadTokens);
    for (std::size_t i = 0; i < near; ++i) {
      if (tokens[i] != node->head[i]) return i;
    }
    return near + agreement(tokens + near, &node->tokens[0] + near, n - near);
  }

  static Token token_of(const Node* node, std::size_t at) noexcept {
    return at < kHeadTokens ? node->head[at] : node->tokens[at];
  }

  bool less(const Token* page, const Node* node) const noexcept {
    const std::size_t agreed = agreement_with(page, node, page_tokens_);
    return agreed < page_tokens_ && page[agreed] < token_of(node, agreed);
  }
  bool greater(const Token* page, const Node* node) const noexcept {
    const std::size_t agreed = agreement_with(page, node, page_tokens_);
    return agreed < page_tokens_ && page[agreed] > token_of(node, agreed);
  }

  Node** find_link(Node** root, const Node* node) const noexcept {
    Node** link = root;
    while (*link != node) link = less(&node->tokens[0], *link) ? &(*link)->left : &(*link)->right;
    return link;
  }

  void split(Node* node, const Token* by, Node** smaller, Node** larger) const noexcept {
    while (node != nullptr) {
      if (greater(by, node)) {
        *smaller = node;
        smaller = &node->right;
        node = node->right;
      } else {
        *larger = node;
        larger = &node->left;
        node = node->left;
      }
    }
    *smaller = *larger = nullptr;
  }

  static Node* merge(Node* a, Node* b) noexcept {
    Node* root = nullptr;
    Node** link = &root;
    while (a != nullptr && b != nullptr) {
      if (a->priority >= b->priority) {
        *link = a;
        link = &a->right;
        a = a->right;
      } else {
        *link = b;
        link = &b->left;
        b = b->left;
      }
    }
    *link = a != nullptr ? a : b;
    return root;
  }

  std::size_t page_tokens_;
};

}  // namespace kvpool
