// A prompt index beside a naive one, and what must agree between them after every call.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "kvpool/index/prompt_index.h"
#include "naive_prompt_index.h"

namespace kvpool::testing {

inline constexpr ValueClass kValueClasses[] = {ValueClass::kOpaque, ValueClass::kHbm, ValueClass::kDram,
                                               ValueClass::kDisk, ValueClass::kRemote};
inline constexpr std::uint32_t kIndexInstance = 3;

// Notes what the index tells its owner, in memory reserved beforehand: it is called where nothing may fail.
struct IndexRecorder final : IndexObserver {
  IndexRecorder() {
    placed_nodes.reserve(kRoom);
    dropped_values.reserve(kRoom);
    unpinned_nodes.reserve(kRoom);
  }
  void placed(PromptNode& node) noexcept override { placed_nodes.push_back(&node); }
  void dropped(const Address* values, std::size_t n) noexcept override {
    while (n > 0) dropped_values.push_back(values[--n]);  // the end of a prompt goes first
  }
  void unpinned(PromptNode& node, std::uint64_t stamp) noexcept override { unpinned_nodes.emplace_back(&node, stamp); }

  static constexpr std::size_t kRoom = 10000;
  std::vector<PromptNode*> placed_nodes;
  std::vector<Address> dropped_values;
  std::vector<std::pair<PromptNode*, std::uint64_t>> unpinned_nodes;
};

struct IndexSetup {
  std::size_t page_tokens;
  EvictionPolicy policy;
  PromptIndex::Values values;
  bool holds;  // also hold, isolate and redirect
};

class FuzzedIndex {
 public:
  FuzzedIndex(const IndexSetup& setup, std::uint64_t seed)
      : setup_(setup),
        dice_(seed),
        index_(static_cast<std::uint32_t>(setup.page_tokens), setup.policy, setup.values, &heard_, seed),
        model_(setup.page_tokens, setup.policy),
        reader_(index_.events().subscribe(1000000)) {
    index_.set_instance(kIndexInstance);
  }

 protected:
  // Runs a call, now and then with too little memory. False when it threw.
  template <class Call>
  bool attempt(Call&& call) {
    const FailNthAllocation failure(dice_.one_in(3) ? 1 + dice_.below(12) : 0);
    try {
      call();
    } catch (const std::bad_alloc&) {
      CHECK(failure.failed_one());
      return false;
    }
    return true;
  }

  void check_values(const Prefix& prompt, std::size_t n, const std::vector<Address>& values) {
    for (std::size_t i = 0; i < n; ++i) REQUIRE(values[i] == model_.pages.at(model_.cut(prompt, i + 1)).value);
  }

  // The nodes of which the owner is told when a pin ends, in order.
  static std::vector<std::pair<PromptNode*, std::uint64_t>> in_limbo(const IndexPin& pin) {
    std::vector<std::pair<PromptNode*, std::uint64_t>> nodes;
    for (PromptNode* node = pin.node; !node->is_root(); node = node->parent) {
      if (node->payload.has_limbo) nodes.emplace_back(node, pin.stamp);
    }
    return nodes;
  }

  std::vector<PromptNode*> nodes() {
    std::vector<PromptNode*> all;
    index_.for_each_node([&](const PromptNode& node) { all.push_back(const_cast<PromptNode*>(&node)); });
    return all;
  }

  void check() {
    index_.audit();
    REQUIRE(view_of(index_) == view_of(model_));
    for (const ValueClass value_class : kValueClasses) {
      REQUIRE(index_.pages(value_class) == model_.count(value_class, false));
      REQUIRE(index_.evictable(value_class) == model_.count(value_class, true));
      REQUIRE(index_.forgotten(value_class) == model_.count_forgotten(value_class));
    }
    REQUIRE(index_.namespace_count() == model_.namespaces());
    check_what_was_heard();
    check_events();
  }

  void check_dropped(const std::set<Address>& values) const {
    REQUIRE(heard_.dropped_values.size() == values.size());
    for (const Address value : heard_.dropped_values) REQUIRE(values.contains(value));
  }

  void check_what_was_heard() {
    std::set<const PromptNode*> alive;
    for (const PromptNode* node : nodes()) alive.insert(node);
    for (PromptNode* node : heard_.placed_nodes) {
      if (!alive.contains(node)) continue;  // placed by an insertion that was undone
      for (std::uint32_t i = 0; i < node->pages; ++i) node_of_value_[node->payload.values[i]] = node;
      if (node->payload.held) held_.insert(node);  // the upper half of a held node that was cut
    }
    prefix_of_value_.clear();
    for (const PromptNode* node : alive) {
      for (std::uint32_t i = 0; i < node->pages; ++i) {
        const Address value = node->payload.values[i];
        REQUIRE(node_of_value_.at(value) == node);
        prefix_of_value_[value] = prefix_of(*node, i, setup_.page_tokens);
      }
    }
    heard_.placed_nodes.clear();
    heard_.dropped_values.clear();
    heard_.unpinned_nodes.clear();
  }

  void check_events() {
    const auto batch = reader_->drain();
    if (batch.lost > 0) {  // memory ran out: a reader starts again from the index itself
      replica_.pages.clear();
      for (const auto& [prefix, page] : model_.pages) replica_.pages[prefix] = page.value;
    } else {
      for (const auto& event : batch.events) {
        REQUIRE(event->sequence > last_sequence_);
        REQUIRE(replica_.apply(*event, setup_.page_tokens) == "");
        last_sequence_ = event->sequence;
      }
    }
    REQUIRE(replica_.pages.size() == model_.pages.size());
    for (const auto& [prefix, page] : model_.pages) REQUIRE(replica_.pages.at(prefix) == page.value);
  }

  IndexSetup setup_;
  Dice dice_;
  IndexRecorder heard_;
  PromptIndex index_;
  NaivePromptIndex model_;
  std::set<PromptNode*> held_;
  std::map<Address, const PromptNode*> node_of_value_;  // as the owner of the values would know it
  std::map<Address, Prefix> prefix_of_value_;           // before the call that is being checked

 private:
  std::shared_ptr<EventQueue> reader_;
  EventReplica replica_;
  std::uint64_t last_sequence_ = 0;
};

}  // namespace kvpool::testing
