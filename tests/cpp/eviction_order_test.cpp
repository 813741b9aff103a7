// The order of eviction of each policy, beside a list that is searched for its minimum.
#include "kvpool/index/eviction_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <tuple>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"

namespace {

using kvpool::EvictionOrder;
using kvpool::EvictionPolicy;
using kvpool::make_eviction_order;
using kvpool::PromptNode;
using kvpool::ValueClass;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::fuzz_length;
using kvpool::testing::fuzz_seeds;

constexpr ValueClass kClasses[] = {ValueClass::kOpaque, ValueClass::kHbm, ValueClass::kDram, ValueClass::kRemote};

struct Nodes {
  std::deque<PromptNode> storage;
  PromptNode root;

  PromptNode* make(std::uint64_t stamp, std::uint32_t hits = 0, PromptNode* parent = nullptr) {
    PromptNode& node = storage.emplace_back();
    node.parent = parent != nullptr ? parent : &root;
    node.pages = 1;
    node.payload.stamp = stamp;
    node.payload.hits = hits;
    return &node;
  }
};

// Empties one class, coldest first.
std::vector<PromptNode*> drain(EvictionOrder& order, ValueClass value_class = ValueClass::kOpaque) {
  std::vector<PromptNode*> out;
  while (PromptNode* node = order.coldest(value_class)) {
    order.remove(node);
    out.push_back(node);
  }
  return out;
}

TEST_CASE("an empty order has no coldest node in any class") {
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    const auto order = make_eviction_order(policy);
    for (const ValueClass value_class : kClasses) {
      CHECK(order->coldest(value_class) == nullptr);
      CHECK(order->count_checked(value_class) == 0);
    }
  }
}

TEST_CASE("an unknown policy is refused") {
  CHECK_THROWS_AS(make_eviction_order(static_cast<EvictionPolicy>(9)), kvpool::Error);
}

TEST_CASE("LRU gives back nodes in the order in which they were added") {
  Nodes nodes;
  const auto order = make_eviction_order(EvictionPolicy::kLru);
  // Neither stamps nor hits matter.
  PromptNode* a = nodes.make(9, 9);
  PromptNode* b = nodes.make(1, 1);
  PromptNode* c = nodes.make(5, 0);
  for (PromptNode* node : {a, b, c}) order->add(node);
  order->remove(b);
  order->add(b);
  CHECK(drain(*order) == std::vector<PromptNode*>{a, c, b});
}

TEST_CASE("LFU goes by hits first and by last use second") {
  Nodes nodes;
  const auto order = make_eviction_order(EvictionPolicy::kLfu);
  order->reserve(4);
  PromptNode* busy = nodes.make(1, 7);
  PromptNode* late = nodes.make(9, 2);
  PromptNode* early = nodes.make(3, 2);
  PromptNode* idle = nodes.make(8, 0);
  for (PromptNode* node : {busy, late, early, idle}) order->add(node);
  CHECK(drain(*order) == std::vector<PromptNode*>{idle, early, late, busy});
}

TEST_CASE("FIFO goes by last insertion and ignores hits") {
  Nodes nodes;
  const auto order = make_eviction_order(EvictionPolicy::kFifo);
  order->reserve(3);
  PromptNode* second = nodes.make(2, 0);
  PromptNode* first = nodes.make(1, 99);
  PromptNode* third = nodes.make(3, 0);
  for (PromptNode* node : {second, first, third}) order->add(node);
  CHECK(drain(*order) == std::vector<PromptNode*>{first, second, third});
}

TEST_CASE("of the pieces of a cut node the lowest goes first") {
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    CAPTURE(static_cast<int>(policy));
    Nodes nodes;
    const auto order = make_eviction_order(policy);
    order->reserve(6);
    PromptNode* older = nodes.make(1);
    PromptNode* top = nodes.make(5);
    PromptNode* middle = nodes.make(5, 0, top);
    PromptNode* bottom = nodes.make(5, 0, middle);
    PromptNode* newer = nodes.make(6);
    for (PromptNode* node : {older, bottom, newer}) order->add(node);
    order->add_upper(bottom, top);
    order->add_upper(bottom, middle);
    CHECK(order->count_checked(ValueClass::kOpaque) == 5);
    CHECK(drain(*order) == std::vector<PromptNode*>{older, bottom, middle, top, newer});
  }
}

TEST_CASE("classes are ordered apart from each other") {
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    Nodes nodes;
    const auto order = make_eviction_order(policy);
    order->reserve(8);
    std::vector<PromptNode*> added;
    for (std::uint64_t i = 0; i < 8; ++i) {
      PromptNode* node = nodes.make(i + 1);
      node->payload.value_class = kClasses[i % 4];
      order->add(node);
      added.push_back(node);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(order->count_checked(kClasses[i]) == 2);
      CHECK(drain(*order, kClasses[i]) == std::vector<PromptNode*>{added[i], added[i + 4]});
    }
  }
}

TEST_CASE("a check finds a node that is in the order and claims not to be") {
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kFifo}) {
    Nodes nodes;
    const auto order = make_eviction_order(policy);
    order->reserve(2);
    PromptNode* node = nodes.make(1);
    order->add(node);
    order->add(nodes.make(2));
    node->payload.ordered = false;
    CHECK_THROWS_AS(static_cast<void>(order->count_checked(ValueClass::kOpaque)), kvpool::Error);
  }
}

TEST_CASE("after room is reserved, that many nodes of any class are added without memory") {
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    Nodes nodes;
    const auto order = make_eviction_order(policy);
    for (std::uint64_t i = 0; i < 100; ++i) nodes.make(i)->payload.value_class = kClasses[i < 50 ? 1 : i % 4];
    order->reserve(100);
    const kvpool::testing::FailNthAllocation failure(1);
    for (PromptNode& node : nodes.storage) order->add(&node);
    CHECK_FALSE(failure.failed_one());
  }
}

// Without cuts: the stamps of all nodes differ.
void fuzz(std::uint64_t seed, EvictionPolicy policy, int steps) {
  announce_fuzz("eviction order", seed);
  CAPTURE(seed);
  CAPTURE(static_cast<int>(policy));
  Dice dice(seed);
  Nodes nodes;
  const auto order = make_eviction_order(policy);
  std::vector<PromptNode*> ordered;
  std::vector<PromptNode*> others;
  std::uint64_t clock = 0;
  for (int i = 0; i < 60; ++i) {
    others.push_back(nodes.make(0));
    others.back()->payload.value_class = kClasses[dice.below(4)];
  }
  order->reserve(60);
  for (int step = 0; step < steps; ++step) {
    CAPTURE(step);
    auto& from = others.empty() || (!ordered.empty() && dice.one_in(2)) ? ordered : others;
    const std::size_t at = dice.below(from.size());
    PromptNode* node = from[at];
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(at));
    if (&from == &others) {
      node->payload.stamp = ++clock;
      node->payload.hits += dice.below(3);
      order->add(node);
      ordered.push_back(node);
    } else {
      order->remove(node);
      others.push_back(node);
    }
    REQUIRE(node->payload.ordered == (&from == &others));
    const auto key = [&](const PromptNode* of) {
      return std::tuple(policy == EvictionPolicy::kLfu ? of->payload.hits : 0, of->payload.stamp);
    };
    for (const ValueClass value_class : kClasses) {
      PromptNode* coldest = nullptr;
      std::size_t count = 0;
      for (PromptNode* candidate : ordered) {
        if (candidate->payload.value_class != value_class) continue;
        ++count;
        if (coldest == nullptr || key(candidate) < key(coldest)) coldest = candidate;
      }
      REQUIRE(order->coldest(value_class) == coldest);
      REQUIRE(order->count_checked(value_class) == count);
    }
  }
}

TEST_CASE("each eviction order agrees with a search for the minimum after every event") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
      fuzz(seed, policy, fuzz_length(1500));
    }
  }
}

}  // namespace
