// The prompt index beside a naive one: the same random calls to both, compared after every call; some calls run out of
// memory half way and must then have changed nothing.
#include "prompt_index_fuzz.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/index/prompt_index.h"
#include "naive_prompt_index.h"

namespace {

using kvpool::Address;
using kvpool::EvictionPolicy;
using kvpool::IndexErasure;
using kvpool::IndexHit;
using kvpool::IndexInsertion;
using kvpool::IndexPin;
using kvpool::make_address;
using kvpool::MatchEnd;
using kvpool::Medium;
using kvpool::PromptIndex;
using kvpool::PromptNode;
using kvpool::Token;
using kvpool::ValueClass;
using kvpool::testing::announce_fuzz;
using kvpool::testing::fuzz_seeds;
using kvpool::testing::FuzzedIndex;
using kvpool::testing::IndexSetup;
using kvpool::testing::kIndexInstance;
using kvpool::testing::kValueClasses;
using kvpool::testing::model_length;
using kvpool::testing::NaivePage;
using kvpool::testing::Prefix;
using kvpool::testing::prefix_of;

class IndexFuzz : private FuzzedIndex {
 public:
  using FuzzedIndex::FuzzedIndex;

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      if (step % 100 == 0) pressure_ = 1 + dice_.below(8);
      this->step();
      check();
    }
    while (!pins_.empty() || !held_.empty()) {
      pins_.empty() ? release_hold(*held_.begin()) : unpin(pins_.size() - 1);
      check();
    }
    drain();
  }

 private:
  struct Pin {
    IndexPin pin;
    Prefix prefix;                   // of the pages that can be found
    std::vector<Address> forgotten;  // the values of those that cannot, from the end
  };

  void step() {
    if (model_.pages.size() > kPagesMax && !dice_.one_in(4)) {  // the model is slow: keep it small
      if (!pins_.empty()) unpin(dice_.below(pins_.size()));
      return;
    }
    if (model_.pages.size() > kPagesMax / 2 && dice_.one_in(3)) return evict(random_class(), dice_.below(20));
    switch (dice_.below(setup_.holds ? 17 : 12)) {
      case 0:
      case 1:
        return match();
      case 2:
        return peek();
      case 3:
      case 4:
      case 5:
        return insert();
      case 6:
      case 7:
        if (!pins_.empty()) unpin(dice_.below(pins_.size()));
        return;
      case 8:
        return evict(kValueClasses[dice_.below(std::size(kValueClasses))], dice_.below(4 * pressure_));
      case 9:
        return erase();
      case 10:
        return pin_some_node();
      case 11:
        return forget();
      case 12:
      case 13:
        return hold();
      case 14:
        if (!held_.empty()) release_hold(dice_.pick(held_));
        return;
      case 15:
        return isolate();
      default:
        return redirect();
    }
  }

  Prefix random_prompt() {
    static const std::string kNames[] = {"", "", "a", "tenant whose name is long enough for the heap"};
    Prefix prompt{kNames[dice_.below(4)], {}};
    if (!model_.pages.empty() && dice_.one_in(2)) prompt = dice_.pick(model_.pages).first;  // continue a cached prefix
    const std::size_t kept = prompt.tokens.size() - (prompt.tokens.empty() ? 0 : dice_.below(prompt.tokens.size()));
    prompt.tokens.resize(kept);
    for (std::size_t n = dice_.below(6 * setup_.page_tokens); n > 0; --n) {
      prompt.tokens.push_back(static_cast<Token>(dice_.below(2)) - 1);
    }
    return prompt;
  }

  Address new_value(ValueClass value_class) {
    ++last_value_;
    const auto block = static_cast<std::uint32_t>(last_value_ & 0xFFFFFF);
    if (setup_.values == PromptIndex::Values::kOpaque) return last_value_;
    switch (value_class) {
      case ValueClass::kHbm:
      case ValueClass::kDram:
      case ValueClass::kDisk:
        return make_address(dice_.one_in(2) ? 0 : kIndexInstance, static_cast<Medium>(value_class), 1, block);
      default:
        return make_address(kIndexInstance + 1, Medium::kHbm, 1, block);
    }
  }
  ValueClass random_class() {
    return setup_.values == PromptIndex::Values::kOpaque ? ValueClass::kOpaque
                                                         : kValueClasses[1 + dice_.below(std::size(kValueClasses) - 1)];
  }

  void match() {
    const Prefix prompt = random_prompt();
    std::vector<Address> out(prompt.tokens.size());
    IndexHit hit;
    if (!attempt(
            [&] { hit = index_.match(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), out.data()); }))
      return;
    const std::size_t n = model_.longest(prompt);
    REQUIRE(hit.pages == n);
    REQUIRE(hit.partial_tokens == model_.partial(prompt, n));
    REQUIRE((hit.pin.node != nullptr) == (n > 0));
    check_values(prompt, n, out);
    if (n == 0) return;
    const Prefix found = model_.cut(prompt, n);
    model_.match(found);
    pins_.push_back({hit.pin, found, {}});
  }

  void peek() {
    const Prefix prompt = random_prompt();
    std::vector<Address> out(prompt.tokens.size());
    MatchEnd end{};
    const IndexHit hit = index_.peek(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), out.data(), &end);
    const std::size_t n = model_.longest(prompt);
    REQUIRE(hit.pages == n);
    REQUIRE(hit.partial_tokens == model_.partial(prompt, n));
    REQUIRE(hit.pin.node == nullptr);
    REQUIRE(end == model_.end_of(prompt, n));
    check_values(prompt, n, out);
    std::map<std::string, std::size_t> elsewhere;
    index_.for_each_namespace(prompt.tokens.data(), prompt.tokens.size(),
                              [&](const std::string& name, std::size_t pages) { elsewhere[name] = pages; });
    REQUIRE(elsewhere.size() == model_.namespaces());
    for (const auto& [name, pages] : elsewhere) REQUIRE(pages == model_.longest({name, prompt.tokens}));
  }

  void insert() {
    Prefix prompt = random_prompt();
    const std::size_t n = model_.page_count(prompt);
    prompt = model_.cut(prompt, n);
    std::vector<Address> values;
    std::vector<ValueClass> classes;
    for (std::size_t i = 0; i < n; ++i) {
      classes.push_back(i == 0 || dice_.one_in(3) ? random_class() : classes.back());
      values.push_back(new_value(classes.back()));
    }
    std::vector<Address> canonical = values;
    const bool in_place = dice_.one_in(2);  // the values that are given may be written over
    IndexInsertion insertion;
    const std::size_t present = model_.longest(prompt);
    if (!attempt([&] {
          insertion = index_.insert(prompt.name_space, prompt.tokens.data(), n,
                                    in_place ? canonical.data() : values.data(), canonical.data());
        })) {
      return;
    }
    REQUIRE(insertion.pages_present == present);
    REQUIRE((insertion.pin.node != nullptr) == (n > 0));
    if (n == 0) return;
    model_.insert(prompt, values, classes);
    check_values(prompt, n, canonical);
    if (!dice_.one_in(6)) {
      pins_.push_back({insertion.pin, prompt, {}});
      return;
    }
    check();
    const auto limbo = in_limbo(insertion.pin);
    index_.undo(insertion);
    model_.undo(prompt, present);
    REQUIRE(heard_.dropped_values.empty());
    REQUIRE(heard_.unpinned_nodes == limbo);
  }

  void unpin(std::size_t at) {
    std::swap(pins_[at], pins_.back());
    const Pin pin = pins_.back();
    pins_.pop_back();
    if (pin.forgotten.empty()) {
      REQUIRE(prefix_of(*pin.pin.node, pin.pin.node->pages - 1, setup_.page_tokens) == pin.prefix);
    }
    if (dice_.one_in(4)) {
      PromptNode* node = pin.pin.node;
      while (!node->parent->is_root() && dice_.one_in(2)) node = node->parent;
      node->payload.has_limbo = !node->payload.has_limbo;
    }
    const auto limbo = in_limbo(pin.pin);
    index_.unpin(pin.pin);
    std::set<Address> gone;
    for (const Address value : pin.forgotten) {
      if (model_.unpin_forgotten(value)) gone.insert(value);
    }
    model_.unpin(pin.prefix);
    REQUIRE(heard_.unpinned_nodes == limbo);
    check_dropped(gone);
  }

  void forget() {
    auto all = nodes();
    if (all.empty() || !held_.empty()) return;
    PromptNode* node = dice_.pick(all);
    const std::uint32_t first = dice_.below(node->pages);
    const Prefix top = prefix_of(*node, first, setup_.page_tokens);
    if (!attempt([&] { node = index_.isolate(node, first, node->pages - first); })) return;
    const std::size_t above = model_.page_count(top) - 1;
    for (Pin& pin : pins_) {
      if (!pin.prefix.starts_with(top)) continue;
      for (std::size_t n = model_.page_count(pin.prefix); n > above; --n) {
        pin.forgotten.push_back(model_.pages.at(model_.cut(pin.prefix, n)).value);
      }
      pin.prefix = model_.cut(pin.prefix, above);
    }
    const std::size_t before = model_.pages.size();
    const std::set<Address> gone = model_.forget(top);
    std::size_t forgotten = 0;
    REQUIRE(attempt([&] { forgotten = index_.forget(node); }));  // never throws
    REQUIRE(forgotten == before - model_.pages.size());
    check_dropped(gone);
  }

  void pin_some_node() {
    auto all = nodes();
    if (all.empty()) return;
    PromptNode* node = dice_.pick(all);
    const Prefix prefix = prefix_of(*node, node->pages - 1, setup_.page_tokens);
    pins_.push_back({index_.pin(node), prefix, {}});
    model_.pin(prefix);
  }

  // Every page that goes has nothing below it and is the coldest one, or hangs below it.
  void evict(ValueClass value_class, std::size_t n) {
    std::size_t dropped = 0;
    REQUIRE(attempt([&] { dropped = index_.evict(value_class, n); }));  // never throws
    std::size_t counted = 0;
    for (const Address value : heard_.dropped_values) {
      REQUIRE(counted < n);
      const Prefix* coldest = model_.coldest(value_class);
      REQUIRE(coldest != nullptr);
      const Prefix prefix = prefix_of_value_.at(value);
      const NaivePage& page = model_.pages.at(prefix);
      REQUIRE(page.evictable());
      REQUIRE_FALSE(model_.has_below(prefix));
      REQUIRE(prefix.starts_with(*coldest));
      if (page.value_class == value_class) ++counted;
      model_.pages.erase(prefix);
    }
    REQUIRE(dropped == counted);
    if (counted == n) return;
    const Prefix* coldest = model_.coldest(value_class);
    if (coldest == nullptr) return;
    REQUIRE(std::any_of(model_.pages.begin(), model_.pages.end(),
                        [&](const auto& entry) { return entry.second.held && entry.first.starts_with(*coldest); }));
  }

  void erase() {
    if (!held_.empty()) return;
    const Prefix prompt = random_prompt();
    const bool descendants = dice_.one_in(3);
    const auto expected = model_.erasure(prompt, descendants);
    IndexErasure erasure;
    REQUIRE(attempt([&] {  // never throws
      erasure = index_.erase(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), descendants);
    }));
    REQUIRE(erasure.pages_pinned == expected.pinned);
    REQUIRE(erasure.pages == (expected.pinned > 0 ? 0 : expected.pages.size()));
    REQUIRE(heard_.dropped_values.size() == erasure.pages);
    for (const Address value : heard_.dropped_values) {
      const Prefix prefix = prefix_of_value_.at(value);
      REQUIRE(expected.pages.contains(prefix));
      REQUIRE_FALSE(model_.has_below(prefix));
      REQUIRE(model_.pages.erase(prefix) == 1);
    }
  }

  void hold() {
    const ValueClass value_class = random_class();
    const std::size_t pages_max = dice_.below(4);
    PromptNode* node = nullptr;
    const Prefix* coldest = model_.coldest(value_class);
    if (!attempt([&] { node = index_.hold_coldest(value_class, pages_max); })) return;
    REQUIRE((node != nullptr) == (coldest != nullptr && pages_max > 0));
    if (node == nullptr) return;
    REQUIRE(node->pages <= pages_max);
    REQUIRE(prefix_of(*node, node->pages - 1, setup_.page_tokens) == *coldest);
    for (std::uint32_t i = 0; i < node->pages; ++i) model_.hold(prefix_of(*node, i, setup_.page_tokens));
    held_.insert(node);
  }

  void release_hold(PromptNode* node) {
    index_.release_hold(node);
    for (std::uint32_t i = node->pages; i-- > 0;) model_.release_hold(prefix_of(*node, i, setup_.page_tokens));
    held_.erase(node);
  }

  void isolate() {
    auto all = nodes();
    if (all.empty()) return;
    PromptNode* node = dice_.pick(all);
    const std::uint32_t first = dice_.below(node->pages);
    const std::uint32_t count = 1 + dice_.below(node->pages - first);
    const std::vector<Address> wanted(node->payload.values.get() + first, node->payload.values.get() + first + count);
    PromptNode* isolated = nullptr;
    if (!attempt([&] { isolated = index_.isolate(node, first, count); })) return;
    REQUIRE(isolated->pages == count);
    REQUIRE(std::equal(wanted.begin(), wanted.end(), isolated->payload.values.get()));
  }

  void redirect() {
    auto all = nodes();
    if (all.empty()) return;
    PromptNode* node = dice_.pick(all);
    const ValueClass value_class = random_class();
    std::vector<Address> values;
    for (std::uint32_t i = 0; i < node->pages; ++i) values.push_back(new_value(value_class));
    REQUIRE(attempt([&] { index_.redirect(node, values.data()); }));  // never throws
    for (std::uint32_t i = node->pages; i-- > 0;) {
      model_.redirect(prefix_of(*node, i, setup_.page_tokens), values[i], value_class);
      node_of_value_[values[i]] = node;  // as the owner does
    }
  }

  // The whole order, to the last page.
  void drain() {
    while (!model_.pages.empty()) {
      const ValueClass value_class = kValueClasses[dice_.below(std::size(kValueClasses))];
      evict(value_class, 1 + dice_.below(3));
      check();
    }
    REQUIRE(index_.node_count() == 0);
  }

  static constexpr std::size_t kPagesMax = 120;

  std::uint32_t pressure_ = 1;
  Address last_value_ = 0;
  std::vector<Pin> pins_;
};

void fuzz_all(PromptIndex::Values values, bool holds, int steps) {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("prompt index", seed);
    CAPTURE(seed);
    for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
      CAPTURE(static_cast<int>(policy));
      for (const std::size_t page_tokens : {1, 2, 4}) {
        CAPTURE(page_tokens);
        IndexFuzz(IndexSetup{page_tokens, policy, values, holds}, seed).run(model_length(steps));
      }
    }
  }
}

TEST_CASE("an index of opaque values agrees with a naive one after every call") {
  fuzz_all(PromptIndex::Values::kOpaque, /*holds=*/false, 200);
}

TEST_CASE("an index of addresses in several media agrees with a naive one after every call") {
  fuzz_all(PromptIndex::Values::kAddresses, /*holds=*/false, 200);
}

TEST_CASE("an index whose blocks are held, moved and isolated agrees with a naive one after every call") {
  fuzz_all(PromptIndex::Values::kAddresses, /*holds=*/true, 300);
}

}  // namespace
