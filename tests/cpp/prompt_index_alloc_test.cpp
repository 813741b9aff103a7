// Every call of the prompt index with its first, second, ... allocation failing: it throws std::bad_alloc and leaves
// the content and the order of eviction as they were, or it does not need the memory after all.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/index/prompt_index.h"
#include "naive_prompt_index.h"

namespace {

using kvpool::Address;
using kvpool::EventQueue;
using kvpool::EvictionPolicy;
using kvpool::IndexInsertion;
using kvpool::IndexPin;
using kvpool::make_address;
using kvpool::Medium;
using kvpool::PromptIndex;
using kvpool::PromptNode;
using kvpool::Token;
using kvpool::ValueClass;
using kvpool::testing::fail_each_allocation;
using kvpool::testing::IndexView;
using kvpool::testing::NaivePromptIndex;
using kvpool::testing::Prefix;
using kvpool::testing::Tokens;
using kvpool::testing::view_of;

constexpr std::uint64_t kSeed = 1;
constexpr ValueClass kClasses[] = {ValueClass::kHbm, ValueClass::kDram, ValueClass::kRemote};

Address hbm(std::uint32_t block) { return make_address(0, Medium::kHbm, 0, block); }
Address dram(std::uint32_t block) { return make_address(0, Medium::kDram, 0, block); }

// Records evicted values, in memory reserved beforehand.
struct Gone final : kvpool::IndexObserver {
  std::vector<Address> values;
  Gone() { values.reserve(1000); }
  void placed(PromptNode&) noexcept override {}
  void dropped(const Address* first, std::size_t n) noexcept override { values.insert(values.end(), first, first + n); }
  void unpinned(PromptNode&, std::uint64_t) noexcept override {}
};

// The same little index each time: a long prompt in HBM, its continuation in DRAM, and `more` prompts beside it, whose
// number decides which of the structures is full.
struct Rig {
  Gone gone;
  PromptIndex index;
  std::shared_ptr<EventQueue> reader;
  std::size_t result = 0;  // of the call that is tested: it must not allocate anything itself, so it checks nothing

  Rig(EvictionPolicy policy, int more, bool with_reader)
      : index(1, policy, PromptIndex::Values::kAddresses, &gone, kSeed) {
    if (with_reader) reader = index.events().subscribe(1000000);
    insert("", {1, 2, 3, 4}, {hbm(1), hbm(2), hbm(3), hbm(4)});
    insert("", {1, 2, 3, 4, 5, 6}, {hbm(91), hbm(92), hbm(93), hbm(94), dram(5), dram(6)});
    for (int i = 0; i < more; ++i) insert("", {100 + i}, {hbm(100 + static_cast<std::uint32_t>(i))});
  }

  void insert(const std::string& name, const Tokens& tokens, std::vector<Address> values) {
    index.unpin(index.insert(name, tokens.data(), tokens.size(), values.data(), values.data()).pin);
  }
  PromptNode* first_node() {
    PromptNode* first = nullptr;
    index.for_each_node([&](const PromptNode& node) {
      if (first == nullptr && node.pages > 1) first = const_cast<PromptNode*>(&node);
    });
    return first;
  }
  // All values in the order of eviction. Ends the rig's use.
  std::vector<Address> order() {
    gone.values.clear();
    for (const ValueClass value_class : kClasses) {
      while (index.evict(value_class, 1) > 0) {
      }
    }
    return gone.values;
  }
};

// One call that may fail, on a rig made for it. It returns its pin in `pin`.
using Call = std::function<void(Rig& rig, IndexPin& pin)>;

int fail_each(EvictionPolicy policy, int more, bool with_reader, const Call& call, std::size_t result) {
  Rig untouched(policy, more, with_reader);
  const std::vector<Address> order = untouched.order();
  return fail_each_allocation([&](auto&& fail) {
    Rig rig(policy, more, with_reader);
    const IndexView before = view_of(rig.index);
    const std::size_t namespaces = rig.index.namespace_count();
    IndexPin pin;
    if (fail([&] { call(rig, pin); })) {
      rig.index.audit();
      CHECK(view_of(rig.index) == before);
      CHECK(rig.index.namespace_count() == namespaces);
      if (with_reader) CHECK(rig.reader->drain().lost == 0);
      CHECK(rig.gone.values.empty());
      CHECK(rig.order() == order);
    } else {
      CHECK(rig.result == result);
      rig.index.audit();
      rig.index.unpin(pin);
      rig.index.audit();
    }
  });
}

// Returns how many attempts threw, over all states of the structures. Those that did not throw must give `result`.
int fail_each(std::size_t result, const Call& call) {
  int threw = 0;
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    CAPTURE(static_cast<int>(policy));
    for (const int more : {0, 1, 2, 3, 4, 5, 6, 7, 35, 36, 37, 38}) {  // the table's first growth is at 40 nodes
      CAPTURE(more);
      for (const bool with_reader : {false, true}) threw += fail_each(policy, more, with_reader, call, result);
    }
  }
  return threw;
}

TEST_CASE("a match that has to cut a run changes nothing when memory runs out") {
  const Tokens tokens{1, 2, 9};
  CHECK(fail_each(2, [&](Rig& rig, IndexPin& pin) {
          Address out[3];
          const auto hit = rig.index.match("", tokens.data(), tokens.size(), out);
          rig.result = hit.pages;
          pin = hit.pin;
        }) > 0);
}

TEST_CASE("a match that ends at the end of a run needs no memory, nor does a peek") {
  const Tokens tokens{1, 2, 3, 4, 9};
  CHECK(fail_each(8, [&](Rig& rig, IndexPin& pin) {
          Address out[5];
          const auto hit = rig.index.match("", tokens.data(), tokens.size(), out);
          rig.result = hit.pages + rig.index.peek("", tokens.data(), tokens.size(), out).pages;
          pin = hit.pin;
        }) == 0);
}

TEST_CASE("an insertion changes nothing when memory runs out") {
  const auto insert = [](const std::string& name, const Tokens& tokens, const std::vector<Address>& values,
                         std::size_t present) {
    return fail_each(present, [&](Rig& rig, IndexPin& pin) {
      Address canonical[8];
      const IndexInsertion insertion = rig.index.insert(name, tokens.data(), tokens.size(), values.data(), canonical);
      rig.result = insertion.pages_present;
      pin = insertion.pin;
    });
  };
  SUBCASE("of a new prompt") { CHECK(insert("", {9, 9}, {hbm(9), hbm(10)}, 0) > 0); }
  SUBCASE("that cuts a run and adds nodes of two classes") {
    CHECK(insert("", {1, 2, 7, 8, 9}, {hbm(91), hbm(92), hbm(7), dram(8), hbm(9)}, 2) > 0);
  }
  SUBCASE("that ends inside a run") { CHECK(insert("", {1, 2}, {hbm(91), hbm(92)}, 2) > 0); }
  SUBCASE("into a new namespace") {
    CHECK(insert("a tenant whose name is long enough for the heap", {1}, {dram(9)}, 0) > 0);
  }
}

TEST_CASE("cutting a piece out of a run changes nothing when memory runs out") {
  CHECK(fail_each(2, [](Rig& rig, IndexPin&) { rig.result = rig.index.isolate(rig.first_node(), 1, 2)->pages; }) > 0);
}

TEST_CASE("holding a part of a node changes nothing when memory runs out") {
  CHECK(fail_each(1, [](Rig& rig, IndexPin&) {
          PromptNode* node = rig.index.hold_coldest(ValueClass::kDram, 1);
          rig.result = node->pages;
          rig.index.release_hold(node);
        }) > 0);
}

TEST_CASE("calls that free memory never fail, even if shrinking a buffer does") {
  SUBCASE("evict") {
    CHECK(fail_each(1, [](Rig& rig, IndexPin&) { rig.result = rig.index.evict(ValueClass::kDram, 1); }) == 0);
  }
  SUBCASE("erase") {
    const Tokens tokens{1, 2, 3};
    CHECK(fail_each(6, [&](Rig& rig, IndexPin&) {
            rig.result = rig.index.erase("", tokens.data(), tokens.size(), true).pages;
          }) == 0);
  }
  SUBCASE("redirect") {
    const std::vector<Address> values{dram(21), dram(22), dram(23), dram(24)};
    CHECK(fail_each(6, [&](Rig& rig, IndexPin&) {
            rig.index.redirect(rig.first_node(), values.data());
            rig.result = rig.index.pages(ValueClass::kDram);
          }) == 0);
  }
}

TEST_CASE("undoing an insertion never fails") {
  const Tokens tokens{1, 2, 7, 8};
  const std::vector<Address> values{hbm(91), hbm(92), hbm(7), dram(8)};
  bool undone_without_memory = false;
  fail_each(2, [&](Rig& rig, IndexPin&) {
    // The insertion may fail, but then nothing is to be undone.
    Address canonical[4];
    const IndexInsertion insertion = rig.index.insert("", tokens.data(), tokens.size(), values.data(), canonical);
    rig.index.undo(insertion);
    rig.result = rig.index.pages(ValueClass::kDram);
    undone_without_memory = true;
  });
  CHECK(undone_without_memory);
}

TEST_CASE("an event that could not be made is counted as lost") {
  bool lost_some = false;
  fail_each_allocation([&](auto&& fail) {
    Rig rig(EvictionPolicy::kLru, 0, true);
    rig.reader->drain();
    CHECK_FALSE(fail([&] { rig.index.evict(ValueClass::kDram, 2); }));
    const auto batch = rig.reader->drain();
    CHECK(batch.lost + batch.events.size() == 1);
    lost_some = lost_some || batch.lost == 1;
  });
  CHECK(lost_some);
}

TEST_CASE("an index that fails to be constructed leaks nothing") {
  CHECK(fail_each_allocation([](auto&& fail) {
          std::unique_ptr<PromptIndex> index;
          const bool threw = fail([&] {
            index =
                std::make_unique<PromptIndex>(16, EvictionPolicy::kLru, PromptIndex::Values::kOpaque, nullptr, kSeed);
          });
          CHECK(threw == (index == nullptr));
        }) > 1);
}

}  // namespace
