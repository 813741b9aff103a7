// The tree of runs: where it is cut, what is found, and that nothing is lost when memory runs out.
#include "kvpool/index/radix_tree.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "failing_alloc.h"

namespace {

using kvpool::RadixNode;
using kvpool::RadixTree;
using kvpool::Token;
using kvpool::testing::fail_each_allocation;

// Remembers how it was cut.
struct Label {
  std::string text;
  struct Cut {
    std::string copy;
  };
  void prepare_cut(kvpool::SpanHeap&, std::uint32_t before, std::uint32_t pages, Cut& cut) const {
    REQUIRE(before > 0);
    REQUIRE(before < pages);
    cut.copy = text + " upper, long enough for allocated memory";
  }
  static void commit_cut(Cut& cut, Label& upper, Label& lower, std::uint32_t, std::uint32_t) noexcept {
    upper.text.swap(cut.copy);
    (void)lower;
  }
};

using Tree = RadixTree<Label>;
using Node = Tree::Node;
using Run = std::vector<Token>;

constexpr auto kNoVisit = [](Node*, std::uint32_t) {};
constexpr std::uint64_t kSeed = 7;

std::size_t pages_in(const Run& run, const Tree& tree) { return run.size() / tree.page_tokens(); }

// Stores a run below a root: cuts where it diverges, and adds the rest as one node.
Node* store(Tree& tree, const Run& run, const std::string& label, const char* name = "") {
  Node* root = tree.ensure_root(name);
  const Tree::Position position = tree.descend(root, run.data(), pages_in(run, tree), kNoVisit);
  Node* parent = position.at_end_of_node() ? position.node : tree.split(position.node, position.pages_in_node);
  const std::size_t rest = pages_in(run, tree) - position.pages;
  if (rest == 0) return parent;
  auto node = tree.make_node(run.data() + position.pages * tree.page_tokens(), static_cast<std::uint32_t>(rest));
  node->payload.text = label;
  tree.reserve(1);
  tree.attach(parent, node.get());
  return node.release();
}

Run run_of(const Node* node, const Tree& tree) {
  return Run(node->tokens.get(), node->tokens.get() + std::size_t{node->pages} * tree.page_tokens());
}

// Every stored prompt end, as the whole path of tokens, in the order of the walk.
std::vector<Run> paths(const Tree& tree, const char* name = "") {
  std::vector<Run> all;
  tree.for_each_below(tree.find_root(name), [&](Node& node) {
    if (node.is_root()) return;
    Run path;
    for (const Node* at = &node; !at->is_root(); at = at->parent) {
      const Run run = run_of(at, tree);
      path.insert(path.begin(), run.begin(), run.end());
    }
    all.push_back(path);
  });
  return all;
}

TEST_CASE("a cut puts the upper half into a new node and leaves the lower half its identity and its children") {
  Tree tree(2, kSeed);
  Node* x = store(tree, {1, 1, 2, 2, 3, 3, 4, 4}, "x");
  Node* left = store(tree, {1, 1, 2, 2, 3, 3, 4, 4, 5, 5}, "left");
  Node* right = store(tree, {1, 1, 2, 2, 3, 3, 4, 4, 6, 6}, "right");
  Node* parent = x->parent;

  Node* u = tree.split(x, 2);

  CHECK(u != x);
  CHECK(u->parent == parent);
  CHECK(x->parent == u);
  CHECK(run_of(u, tree) == Run{1, 1, 2, 2});
  CHECK(run_of(x, tree) == Run{3, 3, 4, 4});
  CHECK(left->parent == x);
  CHECK(right->parent == x);
  CHECK(parent->child_count == 1);
  CHECK(u->child_count == 1);
  CHECK(x->child_count == 2);
  CHECK(x->payload.text == "x");
  CHECK(u->payload.text.substr(0, 7) == "x upper");
  CHECK(tree.node_count() == 4);
  CHECK(tree.find_child(parent, Run{1, 1}.data()) == u);
  CHECK(tree.find_child(u, Run{3, 3}.data()) == x);
  CHECK(tree.find_child(x, Run{5, 5}.data()) == left);
  CHECK(tree.audit() == "");
}

TEST_CASE("a node among siblings keeps its place when it is cut") {
  Tree tree(1, kSeed);
  for (Token token = 0; token < 20; ++token) store(tree, {token, 100, 101}, "sibling");
  for (Token token = 0; token < 20; ++token) {
    const Token first[2] = {token, 100};  // GCC 12 would take hash_tokens for an overflow of one token
    Node* node = tree.find_child(tree.find_root(""), first);
    REQUIRE(node != nullptr);
    tree.split(node, 1 + static_cast<std::uint32_t>(token) % 2);
    CHECK(tree.audit() == "");
  }
  CHECK(tree.find_root("")->child_count == 20);
  CHECK(tree.node_count() == 40);
}

TEST_CASE("a walk down follows whole pages and says how much of the last node agrees") {
  Tree tree(2, kSeed);
  store(tree, {1, 1, 2, 2, 3, 3}, "a");
  Node* tail = store(tree, {1, 1, 2, 2, 4, 4, 5, 5}, "b");
  Node* root = tree.find_root("");
  const auto descend = [&](const Run& run) { return tree.descend(root, run.data(), pages_in(run, tree), kNoVisit); };

  Tree::Position position = descend({1, 1, 2, 2, 4, 4, 9, 9});
  CHECK(position.pages == 3);
  CHECK(position.node == tail);
  CHECK(position.pages_in_node == 1);
  CHECK_FALSE(position.at_end_of_node());

  position = descend({1, 1, 2, 2, 4, 4, 5, 5, 6, 6});
  CHECK(position.pages == 4);
  CHECK(position.at_end_of_node());

  position = descend({1, 1, 2, 2});
  CHECK(position.pages == 2);
  CHECK(position.at_end_of_node());

  position = descend({1, 2, 2, 2});  // half a page is no page
  CHECK(position.pages == 0);
  CHECK(position.node == root);
  CHECK(position.at_end_of_node());

  std::vector<std::uint32_t> agreed;
  const Run run{1, 1, 2, 2, 4, 4, 9, 9};
  tree.descend(root, run.data(), 4, [&](Node*, std::uint32_t pages) { agreed.push_back(pages); });
  CHECK(agreed == std::vector<std::uint32_t>{2, 1});
}

TEST_CASE("partial agreement in the next page is found in the run and among the children") {
  Tree tree(4, kSeed);
  store(tree, {1, 1, 1, 1, 2, 2, 2, 2}, "a");
  store(tree, {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, "b");
  store(tree, {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4}, "c");
  Node* root = tree.find_root("");
  const auto beyond = [&](const Run& run) {
    const Tree::Position position = tree.descend(root, run.data(), pages_in(run, tree), kNoVisit);
    const std::size_t done = position.pages * 4;
    return tree.agreement_beyond(position, run.data() + done, run.size() - done);
  };
  CHECK(beyond({1, 1}) == 2);
  CHECK(beyond({1, 1, 1, 2}) == 3);
  CHECK(beyond({1, 1, 1, 1, 2, 2, 9, 9}) == 2);                 // inside the run
  CHECK(beyond({1, 1, 1, 1, 2, 2, 2}) == 3);                    // a page that is not whole
  CHECK(beyond({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5}) == 3);     // the nearer child
  CHECK(beyond({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 9, 9}) == 3);  // no further than the page
  CHECK(beyond({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3}) == 0);  // nothing beyond a leaf
  CHECK(beyond({1, 1, 1, 1}) == 0);
}

TEST_CASE("a walk below a node meets each node once, parents first and siblings in order") {
  Tree tree(1, kSeed);
  const std::vector<Run> expected{{1}, {1, 1}, {1, 2}, {1, 2, 1}, {1, 2, 9}, {2}, {3, 0}};
  for (const std::size_t i : {3U, 4U, 1U, 6U, 5U}) store(tree, expected[i], "");
  CHECK(paths(tree) == expected);

  std::size_t visited = 0;
  tree.for_each_below(tree.find_child(tree.find_root(""), expected[0].data()), [&](const Node&) { ++visited; });
  CHECK(visited == 5);
  visited = 0;
  tree.for_each_below(tree.find_child(tree.find_root(""), expected[5].data()), [&](const Node&) { ++visited; });
  CHECK(visited == 1);
}

TEST_CASE("a walk can skip subtrees and remove nodes that it has passed") {
  Tree tree(1, kSeed);
  for (const Run& run : {Run{1, 1, 1}, Run{1, 1, 2}, Run{1, 2}, Run{2, 1}, Run{2, 2}, Run{3}}) store(tree, run, "");
  Node* root = tree.find_root("");
  std::vector<Token> entered;
  tree.walk_below(
      root,
      [&](Node* node) {
        entered.push_back(node->tokens[0]);
        return !(node->parent == root && node->tokens[0] == 2);  // nothing below 2
      },
      [&](Node* node) {
        if (node->children == nullptr) tree.detach(node);
      });
  CHECK(entered == std::vector<Token>{1, 1, 1, 2, 2, 2, 3});
  CHECK(tree.audit() == "");
  CHECK(paths(tree) == std::vector<Run>{{2}, {2, 1}, {2, 2}});

  bool called = false;
  tree.walk_below(tree.ensure_root("empty"), [&](Node*) { return called = true; }, [&](Node*) { called = true; });
  CHECK_FALSE(called);
}

TEST_CASE("a tree a hundred thousand nodes deep is walked, checked and freed without recursion") {
  Tree tree(1, kSeed);
  Node* parent = tree.ensure_root("");
  const Token token = 1;
  constexpr std::size_t kDepth = 100000;
  for (std::size_t i = 0; i < kDepth; ++i) {
    auto node = tree.make_node(&token, 1);
    tree.reserve(1);
    tree.attach(parent, node.get());
    parent = node.release();
  }
  std::size_t visited = 0;
  tree.for_each_below(tree.find_root(""), [&](const Node&) { ++visited; });
  CHECK(visited == kDepth + 1);
  CHECK(tree.audit() == "");
}

TEST_CASE("namespaces keep equal prompts apart and vanish when they are empty") {
  Tree tree(1, kSeed);
  CHECK(tree.namespace_count() == 1);
  store(tree, {1, 2}, "a", "tenant");
  CHECK(tree.namespace_count() == 2);
  CHECK(tree.find_root("")->children == nullptr);
  CHECK(tree.find_root("nobody") == nullptr);
  Node* node = tree.find_root("tenant")->children;
  CHECK(Tree::root_of(node)->name == "tenant");
  tree.drop_root_if_empty(tree.find_root("tenant"));
  CHECK(tree.namespace_count() == 2);  // not empty
  tree.detach(node);
  tree.drop_root_if_empty(tree.find_root("tenant"));
  CHECK(tree.find_root("tenant") == nullptr);
  tree.drop_root_if_empty(tree.find_root(""));
  CHECK(tree.find_root("") != nullptr);

  tree.ensure_root("a");
  tree.ensure_root("b");
  store(tree, {1}, "c", "c");
  tree.drop_empty_roots();
  CHECK(tree.namespace_count() == 2);
  CHECK(tree.find_root("c") != nullptr);
  CHECK(tree.audit() == "");
}

TEST_CASE("a truncated node keeps its first pages and its place among its siblings") {
  Tree tree(2, kSeed);
  Node* node = store(tree, {1, 1, 2, 2, 3, 3}, "a");
  for (Token token = 2; token < 10; ++token) store(tree, {token, token}, "sibling");
  tree.truncate(node, 1);
  CHECK(run_of(node, tree) == Run{1, 1});
  CHECK(tree.audit() == "");
  tree.detach(node);
  CHECK(tree.audit() == "");
  CHECK(tree.node_count() == 8);
}

TEST_CASE("an audit finds a node whose tokens were overwritten") {
  Tree tree(1, kSeed);
  Node* node = store(tree, {1, 2}, "a");
  store(tree, {1, 2, 3}, "b");
  CHECK(tree.audit() == "");
  node->tokens[0] = 9;
  CHECK(tree.audit() != "");
  node->tokens[0] = 1;
  node->child_count = 7;
  CHECK(tree.audit() != "");
  node->child_count = 1;
  CHECK(tree.audit() == "");
}

TEST_CASE("a cut that runs out of memory changes nothing") {
  const int threw = fail_each_allocation([](auto&& fail) {
    Tree tree(2, kSeed);
    Node* x = store(tree, {1, 1, 2, 2, 3, 3}, "x");
    store(tree, {1, 1, 2, 2, 3, 3, 4, 4}, "child");
    // So full that the cut has to grow the table.
    for (Token token = 10; tree.node_count() < 40; ++token) store(tree, {token, token}, "sibling");
    const std::vector<Run> before = paths(tree);
    if (fail([&] { tree.split(x, 1); })) {
      CHECK(paths(tree) == before);
      CHECK(x->payload.text == "x");
    } else {
      CHECK(paths(tree).size() == before.size() + 1);
    }
    CHECK(tree.audit() == "");
  });
  CHECK(threw == 4);  // the table, the node, its tokens, its payload
}

TEST_CASE("running out of memory for a new namespace or node leaves nothing behind") {
  const std::string name(100, 'n');
  CHECK(fail_each_allocation([&](auto&& fail) {
          Tree tree(1, kSeed);
          const bool threw = fail([&] { tree.ensure_root(name); });
          CHECK(tree.namespace_count() == (threw ? 1 : 2));
          CHECK(tree.audit() == "");
        }) > 1);
  CHECK(fail_each_allocation([&](auto&& fail) {
          Tree tree(1, kSeed);
          const Run run{1, 2, 3};
          std::unique_ptr<Node> made;
          const bool threw = fail([&] { made = tree.make_node(run.data(), 3); });
          CHECK(threw == (made == nullptr));
        }) == 2);
}

}  // namespace
