// The children of a node in order, beside a sorted list of their pages.
#include "kvpool/index/child_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "fuzz_seeds.h"

namespace {

using kvpool::agreement;
using kvpool::ChildOrder;
using kvpool::Token;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::fuzz_seeds;
using kvpool::testing::model_length;

using Page = std::vector<Token>;

struct Child {
  explicit Child(Page page, std::uint32_t weight = 0) : storage(std::move(page)), priority(weight) {}
  Page storage;
  Token* tokens = storage.data();
  kvpool::TokenHead head = kvpool::head_of(tokens, storage.size());
  Child* left = nullptr;
  Child* right = nullptr;
  std::uint32_t priority;
};
using Order = ChildOrder<Child>;

std::vector<Page> pages_in_order(Child* root) {
  std::vector<Page> pages;
  Order::for_each(root, [&](const Child* child) { pages.push_back(child->storage); });
  return pages;
}

bool is_heap(const Child* root) {
  if (root == nullptr) return true;
  for (const Child* below : {root->left, root->right}) {
    if (below != nullptr && (below->priority > root->priority || !is_heap(below))) return false;
  }
  return true;
}

std::size_t longest_by_force(const std::vector<Page>& pages, const Page& tokens) {
  std::size_t best = 0;
  for (const Page& page : pages) {
    std::size_t agreed = 0;
    while (agreed < tokens.size() && page[agreed] == tokens[agreed]) ++agreed;
    best = std::max(best, agreed);
  }
  return best;
}

TEST_CASE("two runs agree up to the first token that differs, wherever it lies") {
  std::vector<Token> a(1000);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<Token>(i);
  for (const std::size_t n : {0, 1, 2, 255, 256, 257, 511, 512, 513, 1000}) {
    CHECK(agreement(a.data(), a.data(), n) == n);
    for (std::size_t at = 0; at < n; at += 1 + at / 7) {
      std::vector<Token> b = a;
      b[at] ^= 1 << 30;
      CHECK(agreement(a.data(), b.data(), n) == at);
    }
  }
}

TEST_CASE("a hash depends on every token, on their number and on the seed") {
  std::vector<Token> tokens(9, 0);
  std::vector<std::uint64_t> hashes;
  for (std::size_t n = 0; n <= tokens.size(); ++n) hashes.push_back(kvpool::hash_tokens(tokens.data(), n, 1));
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    tokens[at] = 1;
    hashes.push_back(kvpool::hash_tokens(tokens.data(), tokens.size(), 1));
    tokens[at] = 0;
  }
  hashes.push_back(kvpool::hash_tokens(tokens.data(), tokens.size(), 2));
  std::sort(hashes.begin(), hashes.end());
  CHECK(std::adjacent_find(hashes.begin(), hashes.end()) == hashes.end());
}

TEST_CASE("a node without children agrees with no page") {
  const Order order(4);
  const Page page{1, 2, 3, 4};
  CHECK(order.longest_agreement(nullptr, page.data(), 4) == 0);
}

TEST_CASE("the child most like a page is found on either side of its place") {
  const Order order(3);
  Child low({1, 5, 5});
  Child high({2, 0, 7});
  Child negative({std::numeric_limits<Token>::min(), 0, 0});
  Child* root = nullptr;
  for (Child* child : {&low, &high, &negative}) order.insert(&root, child);
  const auto longest = [&](const Page& page) { return order.longest_agreement(root, page.data(), page.size()); };
  CHECK(longest({1, 5, 9}) == 2);
  CHECK(longest({1, 9, 9}) == 1);
  CHECK(longest({2, 0, 7}) == 3);
  CHECK(longest({2, 0}) == 2);
  CHECK(longest({3, 0, 7}) == 0);
  CHECK(longest({std::numeric_limits<Token>::min(), 1, 0}) == 1);
  CHECK(longest({}) == 0);
}

TEST_CASE("a replaced child leaves the rest of the order alone") {
  const Order order(2);
  std::deque<Child> children;
  Child* root = nullptr;
  for (Token i = 0; i < 50; ++i) {
    order.insert(&root, &children.emplace_back(Page{i / 7, i % 7}, static_cast<std::uint32_t>(i * 37 % 50)));
  }
  const std::vector<Page> before = pages_in_order(root);
  for (std::size_t i = 0; i < 50; ++i) {
    Child& substitute = children.emplace_back(children[i].storage, 999);
    order.replace(&root, &children[i], &substitute);
    CHECK(substitute.priority == children[i].priority);
    CHECK(children[i].left == nullptr);
    CHECK(children[i].right == nullptr);
  }
  CHECK(pages_in_order(root) == before);
  CHECK(is_heap(root));
}

void fuzz(std::uint64_t seed, std::size_t page_tokens, Token alphabet, int steps) {
  announce_fuzz("child order", seed);
  CAPTURE(seed);
  CAPTURE(page_tokens);
  Dice dice(seed);
  const Order order(page_tokens);
  std::deque<Child> storage;
  std::vector<Child*> present;
  Child* root = nullptr;
  const auto random_page = [&] {
    Page page(page_tokens);
    for (Token& token : page) token = static_cast<Token>(dice.below(static_cast<std::uint64_t>(alphabet))) - 1;
    return page;
  };
  for (int step = 0; step < steps; ++step) {
    CAPTURE(step);
    const Page page = random_page();
    const auto at = std::find_if(present.begin(), present.end(), [&](Child* child) { return child->storage == page; });
    if (at == present.end()) {
      // Few priorities, so that ties happen.
      present.push_back(&storage.emplace_back(page, dice.below(8)));
      order.insert(&root, present.back());
    } else if (dice.one_in(3)) {
      Child& substitute = storage.emplace_back(page);
      order.replace(&root, *at, &substitute);
      *at = &substitute;
    } else {
      order.erase(&root, *at);
      CHECK((*at)->left == nullptr);
      CHECK((*at)->right == nullptr);
      present.erase(at);
    }
    std::vector<Page> expected;
    for (const Child* child : present) expected.push_back(child->storage);
    std::sort(expected.begin(), expected.end());
    REQUIRE(pages_in_order(root) == expected);
    REQUIRE(is_heap(root));
    Page probe = random_page();
    probe.resize(dice.below(page_tokens + 1));
    REQUIRE(order.longest_agreement(root, probe.data(), probe.size()) == longest_by_force(expected, probe));
  }
}

TEST_CASE("the child order agrees with a sorted list after every event") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    fuzz(seed, 1, 5, model_length(300));
    fuzz(seed, 3, 3, model_length(600));
    fuzz(seed, 5, 4, model_length(600));
  }
}

}  // namespace
