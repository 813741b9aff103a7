// Walks down a radix tree with tokens that another thread may be writing: a match reads the application's array in
// place, because copying a long prompt would cost as much as matching it.
//
// Each token is read once to decide whether a page agrees: the first page of a node from a copy, the rest of a run in
// one pass. So every token of the matched prefix was in the array at some moment of the call, and no read goes beyond a
// run. A compiler barrier follows each read, so that no later use can become a second read.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kvpool/index/token_run.h"

namespace kvpool {

inline void memory_barrier() noexcept { asm volatile("" : : : "memory"); }

// The length of the common prefix of two runs of n tokens. Reads each token of `theirs` once.
std::size_t agreement_read_once(const Token* ours, const Token* theirs, std::size_t n) noexcept;

// A copy of one page at a time.
class PageCopy {
 public:
  // Throws std::bad_alloc.
  explicit PageCopy(std::size_t page_tokens) {
    if (page_tokens > near_.size()) far_.resize(page_tokens);
  }

  // n tokens, at most a page; valid until the next call.
  const Token* read(const Token* tokens, std::size_t n) noexcept {
    Token* const to = far_.empty() ? near_.data() : far_.data();
    std::memcpy(to, tokens, n * sizeof(Token));
    memory_barrier();
    return to;
  }

 private:
  std::array<Token, 64> near_;
  std::vector<Token> far_;
};

// As tree.descend(root, tokens, pages, visit).
template <class Tree, class Visit>
typename Tree::Position descend_read_once(const Tree& tree, typename Tree::Node* root, const Token* tokens,
                                          std::size_t pages, PageCopy& copy, Visit&& visit) {
  const std::size_t page = tree.page_tokens();
  typename Tree::Position position{root, 0, 0};
  while (position.pages < pages) {
    const Token* rest = tokens + position.pages * page;
    typename Tree::Node* child = tree.find_child(position.node, copy.read(rest, page));
    if (child == nullptr) break;
    const std::size_t comparable = std::min<std::size_t>(child->pages, pages - position.pages);
    const std::size_t agreed =
        agreement_read_once(child->tokens.get() + page, rest + page, (comparable - 1) * page);  // beyond the first page
    const auto whole = static_cast<std::uint32_t>(1 + agreed / page);
    visit(child, whole);
    position = typename Tree::Position{child, whole, position.pages + whole};
    if (whole < child->pages) break;
  }
  return position;
}

// As tree.agreement_beyond(position, rest, n). Less than a page, because the walk ended there.
template <class Tree>
std::size_t agreement_beyond_read_once(const Tree& tree, const typename Tree::Position& position, const Token* rest,
                                       std::size_t n, PageCopy& copy) noexcept {
  const std::size_t within = std::min<std::size_t>(n, tree.page_tokens());
  if (within == 0) return 0;
  return std::min<std::size_t>(tree.agreement_beyond(position, copy.read(rest, within), within),
                               tree.page_tokens() - 1);
}

}  // namespace kvpool
