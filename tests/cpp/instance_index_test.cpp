// The router's tree by example, and beside a naive one: a map from every prefix to its holders.
#include "kvpool/index/instance_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "naive_prompt_index.h"

namespace kvpool {
// Compared by doctest and by the model.
static bool operator==(const InstanceHit& a, const InstanceHit& b) {
  return a.instance == b.instance && a.pages == b.pages;
}
}  // namespace kvpool

namespace {

using kvpool::Error;
using kvpool::InstanceHit;
using kvpool::InstanceIndex;
using kvpool::InstanceNode;
using kvpool::kInstanceMax;
using kvpool::Token;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::fail_each_allocation;
using kvpool::testing::FailNthAllocation;
using kvpool::testing::fuzz_length;
using kvpool::testing::fuzz_seeds;
using kvpool::testing::Prefix;
using kvpool::testing::Tokens;

using Hits = std::vector<InstanceHit>;
constexpr std::uint64_t kSeed = 5;

// Pages of one token.
struct Rig {
  InstanceIndex index{1, kSeed};

  std::size_t insert(const Tokens& tokens, std::uint32_t instance, std::uint64_t now = 0, const std::string& name = "") {
    const std::size_t added = index.insert(name, tokens.data(), tokens.size(), instance, now);
    index.audit();
    return added;
  }
  Hits match(const Tokens& tokens, std::uint64_t now, const std::string& name = "") {
    Hits hits;
    index.match(name, tokens.data(), tokens.size(), now, hits);
    index.audit();
    return hits;
  }
  Hits peek(const Tokens& tokens, const std::string& name = "") const {
    Hits hits{{99, 99}};  // replaced
    index.peek(name, tokens.data(), tokens.size(), hits);
    return hits;
  }
  std::size_t remove(const Tokens& tokens, std::size_t first_page, std::uint32_t instance) {
    const std::size_t removed = index.remove("", tokens.data(), tokens.size(), first_page, instance);
    index.audit();
    return removed;
  }
};

TEST_CASE("nobody holds anything in an empty tree") {
  Rig rig;
  CHECK(rig.peek({1, 2}).empty());
  CHECK(rig.match({1, 2}, 1).empty());
  CHECK(rig.remove({1, 2}, 0, 3) == 0);
  CHECK(rig.index.remove_instance(3) == 0);
  CHECK(rig.index.expire(100) == 0);
  CHECK(rig.index.pages(3) == 0);
}

TEST_CASE("a block size of zero and an instance that no address can name are refused") {
  CHECK_THROWS_AS(InstanceIndex(0), Error);
  Rig rig;
  CHECK_THROWS_AS(rig.insert({1}, kInstanceMax + 1), Error);
  CHECK(rig.insert({1}, kInstanceMax) == 1);
  CHECK(rig.index.namespace_count() == 1);
}

TEST_CASE("a match gives each holder's longest prefix, the longest first") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2}, 5);
  rig.insert({1, 2, 3}, 6);
  rig.insert({1, 9}, 4);
  CHECK(rig.peek({1, 2, 3, 4, 5}) == Hits{{7, 4}, {6, 3}, {5, 2}, {4, 1}});
  CHECK(rig.match({1, 2, 3, 4, 5}, 1) == Hits{{7, 4}, {6, 3}, {5, 2}, {4, 1}});
  CHECK(rig.peek({1, 2, 8}) == Hits{{5, 2}, {6, 2}, {7, 2}, {4, 1}});  // by instance where equally long
  CHECK(rig.peek({2}).empty());
  CHECK(rig.peek({1, 2, 3}, "tenant").empty());
}

TEST_CASE("an insertion tells how many pages are new for that instance") {
  Rig rig;
  CHECK(rig.insert({1, 2, 3}, 7) == 3);
  CHECK(rig.insert({1, 2, 3}, 7) == 0);
  CHECK(rig.insert({1, 2, 4}, 7) == 1);
  CHECK(rig.insert({1, 2, 4}, 8) == 3);
  CHECK(rig.insert({}, 8) == 0);
  CHECK(rig.index.pages(7) == 4);
  CHECK(rig.index.pages(8) == 3);
  CHECK(rig.index.pages() == 4);
}

TEST_CASE("a peek neither cuts a run nor counts as a use") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1);
  rig.peek({1, 2});
  CHECK(rig.index.node_count() == 1);
  CHECK(rig.index.expire(2) == 3);
}

TEST_CASE("a match keeps what it found from expiring, for every holder, and no more than that") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1);
  rig.insert({1, 2, 3, 4}, 8, 2);
  rig.match({1, 2, 9}, 5);
  CHECK(rig.index.expire(5) == 3);  // page 3 of both, page 4
  rig.index.audit();
  CHECK(rig.peek({1, 2, 3}) == Hits{{7, 2}, {8, 2}});
}

TEST_CASE("ends of prompts expire before what precedes them, and empty namespaces vanish") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1, "tenant");
  rig.insert({1, 2}, 7, 2, "tenant");
  rig.insert({1}, 7, 3, "tenant");
  CHECK(rig.index.expire(2) == 1);
  CHECK(rig.index.expire(3) == 1);
  CHECK(rig.peek({1, 2, 3}, "tenant") == Hits{{7, 1}});
  CHECK(rig.index.namespace_count() == 2);
  CHECK(rig.index.expire(4) == 1);
  CHECK(rig.index.namespace_count() == 1);
  rig.index.audit();
}

TEST_CASE("a clock that goes back counts as the latest time seen") {
  Rig rig;
  rig.insert({1, 2}, 7, 10);
  rig.insert({1, 3}, 7, 4);
  CHECK(rig.index.expire(10) == 0);
  CHECK(rig.index.expire(11) == 3);
}

TEST_CASE("an instance loses the end of a prompt and everything below, and others keep it") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2, 3, 5}, 7);
  rig.insert({1, 2, 3, 4}, 8);
  CHECK(rig.remove({1, 2, 3}, 1, 7) == 4);
  CHECK(rig.peek({1, 2, 3, 4}) == Hits{{8, 4}, {7, 1}});
  CHECK(rig.peek({1, 2, 3, 5}) == Hits{{8, 3}, {7, 1}});
  CHECK(rig.index.pages() == 4);  // nobody holds page 5
  CHECK(rig.remove({1, 2, 3, 4}, 1, 7) == 0);
  CHECK(rig.remove({1, 2, 3, 4}, 4, 8) == 0);  // no such page
  CHECK(rig.remove({1, 2, 3, 4, 5}, 4, 8) == 0);
  CHECK(rig.remove({1, 2, 3, 4}, 0, 8) == 4);
  CHECK(rig.index.pages() == 1);
}

TEST_CASE("the only holder's run is shortened where it lies") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2, 3, 4, 5}, 7);
  CHECK(rig.remove({1, 2, 3, 4}, 2, 7) == 3);
  CHECK(rig.index.node_count() == 1);
  CHECK(rig.index.pages() == 2);
  CHECK(rig.peek({1, 2, 3}) == Hits{{7, 2}});
}

TEST_CASE("an instance that is gone leaves what others hold") {
  Rig rig;
  for (Token token = 0; token < 20; ++token) {
    rig.insert({token, 1, 2}, 7);
    if (token % 2 == 0) rig.insert({token, 1}, 8);
  }
  rig.insert({1}, 7, 0, "tenant");
  CHECK(rig.index.remove_instance(7) == 61);
  rig.index.audit();
  CHECK(rig.index.pages(7) == 0);
  CHECK(rig.index.pages(8) == 20);
  CHECK(rig.index.pages() == 20);
  CHECK(rig.index.namespace_count() == 1);
  CHECK(rig.index.remove_instance(8) == 20);
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("every instance that an address can name may hold the same prefix") {
  InstanceIndex index(16, kSeed);
  Tokens tokens(16 * 8, 1);
  for (std::uint32_t i = 0; i <= kInstanceMax; ++i) {
    const std::uint32_t instance = (i * 5U) & kInstanceMax;  // in no particular order
    tokens.back() = static_cast<Token>(instance % 4);
    CHECK(index.insert("", tokens.data(), 8, instance, i) == 8);
  }
  index.audit();
  CHECK(index.pages() == 7 + 4);
  CHECK(index.node_count() == 5);
  // Each instance is held twice: 16 bytes each and room to grow.
  CHECK(index.bytes() < 3 * 2 * 16 * (kInstanceMax + 1));
  Hits hits;
  index.match("", tokens.data(), tokens.size(), kInstanceMax + 1, hits);
  REQUIRE(hits.size() == kInstanceMax + 1);
  CHECK(hits[0].pages == 8);
  CHECK(hits[kInstanceMax / 4].pages == 8);
  CHECK(hits[kInstanceMax / 4 + 1].pages == 7);
  CHECK(index.expire(kInstanceMax + 1) == 3 * (kInstanceMax + 1) / 4);  // the ends that the match did not reach
  index.audit();
}

TEST_CASE("an audit finds a holder that does not hold what comes before, and a wrong count") {
  Rig rig;
  rig.insert({1}, 7);
  rig.insert({1, 2}, 7);
  InstanceNode* end = nullptr;
  rig.index.for_each_node([&](const InstanceNode& node) { end = const_cast<InstanceNode*>(&node); });
  REQUIRE(end->tokens[0] == 2);
  end->payload.holders[0].instance = 3;
  CHECK_THROWS_AS(rig.index.audit(), Error);
  end->payload.holders[0] = {7, 1000};
  CHECK_THROWS_AS(rig.index.audit(), Error);
  end->payload.holders[0] = {7, 0};
  CHECK_NOTHROW(rig.index.audit());
}

// --- Beside a naive tree -----------------------------------------------------------------------------------------

// For each prefix, when each holder last used it.
using View = std::map<Prefix, std::map<std::uint32_t, std::uint64_t>>;

View view_of(const InstanceIndex& index) {
  View view;
  const std::size_t page_tokens = index.page_tokens();
  index.for_each_node([&](const InstanceNode& node) {
    Prefix above;
    const InstanceNode* at = node.parent;
    for (; !at->is_root(); at = at->parent) {
      above.tokens.insert(above.tokens.begin(), at->tokens.get(), at->tokens.get() + at->pages * page_tokens);
    }
    above.name_space = static_cast<const kvpool::RadixTree<kvpool::InstancePayload>::Root*>(at)->name;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Token* page = node.tokens.get() + i * page_tokens;
      above.tokens.insert(above.tokens.end(), page, page + page_tokens);
      for (const auto& holder : node.payload.holders) view[above][holder.instance] = node.payload.last_use(holder);
    }
  });
  return view;
}

class Fuzz {
 public:
  Fuzz(std::uint64_t seed, std::size_t page_tokens, std::uint32_t instances)
      : page_tokens_(page_tokens),
        instances_(instances),
        dice_(seed),
        index_(static_cast<std::uint32_t>(page_tokens), seed) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      now_ += dice_.below(3);
      this->step();
      index_.audit();
      REQUIRE(view_of(index_) == model_);
      std::map<std::uint32_t, std::size_t> pages;
      for (const auto& [prefix, holders] : model_) {
        for (const auto& [instance, used] : holders) ++pages[instance];
      }
      for (std::uint32_t instance = 0; instance < instances_; ++instance) {
        REQUIRE(index_.pages(instance) == pages[instance]);
      }
      REQUIRE(index_.pages() == model_.size());
    }
    index_.expire(now_ + 1);
    index_.audit();
    REQUIRE(index_.node_count() == 0);
    REQUIRE(index_.namespace_count() == 1);
  }

 private:
  void step() {
    switch (dice_.below(10)) {
      case 0:
        return model_.size() > 150 ? expire(now_) : expire(now_ - std::min<std::uint64_t>(now_, dice_.below(60)));
      case 1:
        return dice_.one_in(8) ? remove_instance() : remove();
      case 2:
      case 3:
        return remove();
      case 4:
        return match(/*counts=*/false);
      case 5:
      case 6:
        return match(/*counts=*/true);
      default:
        return insert();
    }
  }

  // Runs a call, now and then with too little memory. False when it threw.
  template <class Call>
  bool attempt(Call&& call) {
    const FailNthAllocation failure(dice_.one_in(3) ? 1 + dice_.below(10) : 0);
    try {
      call();
    } catch (const std::bad_alloc&) {
      CHECK(failure.failed_one());
      return false;
    }
    return true;
  }

  std::uint32_t random_instance() { return dice_.below(instances_); }

  Prefix random_prompt() {
    static const std::string kNames[] = {"", "", "tenant whose name is long enough for the heap"};
    Prefix prompt{kNames[dice_.below(3)], {}};
    if (!model_.empty() && dice_.one_in(2)) prompt = dice_.pick(model_).first;
    prompt.tokens.resize(prompt.tokens.size() - (prompt.tokens.empty() ? 0 : dice_.below(prompt.tokens.size())));
    for (std::size_t n = dice_.below(6 * page_tokens_); n > 0; --n) {
      prompt.tokens.push_back(static_cast<Token>(dice_.below(2)));
    }
    return prompt;
  }

  std::size_t page_count(const Prefix& prompt) const { return prompt.tokens.size() / page_tokens_; }
  Prefix cut(const Prefix& prompt, std::size_t pages) const {
    return {prompt.name_space,
            Tokens(prompt.tokens.begin(), prompt.tokens.begin() + static_cast<std::ptrdiff_t>(pages * page_tokens_))};
  }

  void insert() {
    const Prefix prompt = random_prompt();
    const std::uint32_t instance = random_instance();
    const std::size_t pages = page_count(prompt);
    std::size_t added = 0;
    if (!attempt([&] { added = index_.insert(prompt.name_space, prompt.tokens.data(), pages, instance, now_); })) return;
    std::size_t expected = 0;
    for (std::size_t n = 1; n <= pages; ++n) {
      auto& holders = model_[cut(prompt, n)];
      expected += holders.contains(instance) ? 0 : 1;
      holders[instance] = now_;
    }
    REQUIRE(added == expected);
  }

  void match(bool counts) {
    const Prefix prompt = random_prompt();
    Hits hits;
    if (!attempt([&] {
          if (counts) {
            index_.match(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), now_, hits);
          } else {
            index_.peek(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), hits);
          }
        })) {
      return;
    }
    std::map<std::uint32_t, std::size_t> longest;
    for (std::size_t n = 1; n <= page_count(prompt) && model_.contains(cut(prompt, n)); ++n) {
      for (auto& [instance, used] : model_.at(cut(prompt, n))) {
        longest[instance] = n;
        if (counts) used = now_;
      }
    }
    Hits expected;
    for (const auto& [instance, pages] : longest) expected.push_back({instance, pages});
    std::stable_sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.pages > b.pages; });
    REQUIRE(hits == expected);
  }

  // Drops an instance, or all (wanted == nullptr), where `goes` says so. Returns how many pages that were.
  template <class Goes>
  std::size_t drop(Goes&& goes) {
    std::size_t dropped = 0;
    for (auto& [prefix, holders] : model_) {
      dropped += std::erase_if(holders, [&](const auto& holder) { return goes(prefix, holder.first, holder.second); });
    }
    std::erase_if(model_, [](const auto& entry) { return entry.second.empty(); });
    return dropped;
  }

  void remove() {
    const Prefix prompt = random_prompt();
    const std::uint32_t gone = random_instance();
    const std::size_t first = dice_.below(page_count(prompt) + 2);
    std::size_t removed = 0;
    if (!attempt([&] {
          removed = index_.remove(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), first, gone);
        })) {
      return;
    }
    if (first >= page_count(prompt)) {
      REQUIRE(removed == 0);
      return;
    }
    const Prefix top = cut(prompt, first + 1);
    REQUIRE(removed == drop([&](const Prefix& prefix, std::uint32_t instance, std::uint64_t) {
              return instance == gone && prefix.starts_with(top);
            }));
  }

  void remove_instance() {
    const std::uint32_t gone = random_instance();
    std::size_t removed = 0;
    REQUIRE(attempt([&] { removed = index_.remove_instance(gone); }));  // never throws
    REQUIRE(removed == drop([&](const Prefix&, std::uint32_t instance, std::uint64_t) { return instance == gone; }));
  }

  void expire(std::uint64_t before) {
    std::size_t dropped = 0;
    REQUIRE(attempt([&] { dropped = index_.expire(before); }));  // never throws
    REQUIRE(dropped == drop([&](const Prefix&, std::uint32_t, std::uint64_t used) { return used < before; }));
  }

  std::size_t page_tokens_;
  std::uint32_t instances_;
  Dice dice_;
  InstanceIndex index_;
  View model_;
  std::uint64_t now_ = 0;
};

TEST_CASE("the router's tree agrees with a naive one after every call") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("instance index", seed);
    CAPTURE(seed);
    for (const std::size_t page_tokens : {1, 2, 4}) {
      CAPTURE(page_tokens);
      Fuzz(seed, page_tokens, 2).run(fuzz_length(400));
      Fuzz(seed, page_tokens, 12).run(fuzz_length(400));
    }
  }
}

// --- Out of memory -----------------------------------------------------------------------------------------------

TEST_CASE("a call that runs out of memory has changed nothing but where runs are cut") {
  const Tokens longer{1, 2, 3, 9};
  const Tokens shorter{1, 2};
  const std::string name = "a tenant whose name is long enough for the heap";
  Hits hits;
  const auto fail_each = [&](auto&& call) {
    int threw = 0;
    for (const Token more : {0, 1, 2, 3, 36, 37, 38, 39}) {  // the table's first growth is at 40 nodes
      threw += fail_each_allocation([&](auto&& fail) {
        Rig rig;
        rig.insert({1, 2, 3, 4}, 7, 1);
        rig.insert({1, 2, 3, 4, 5}, 8, 2);
        for (Token i = 0; i < more; ++i) rig.insert({100 + i}, 7, 2);
        const View before = view_of(rig.index);
        hits = Hits();  // its memory as well
        if (fail([&] { call(rig.index); })) {
          CHECK(view_of(rig.index) == before);
          CHECK(rig.index.namespace_count() == 1);
        }
        rig.index.audit();
      });
    }
    return threw;
  };
  CHECK(fail_each([&](InstanceIndex& index) { index.insert("", longer.data(), 4, 9, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.insert("", shorter.data(), 2, 7, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.insert(name, shorter.data(), 2, 7, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.match("", shorter.data(), 2, 3, hits); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.peek("", longer.data(), 4, hits); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.remove("", shorter.data(), 2, 1, 7); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.remove_instance(7); }) == 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.expire(2); }) == 0);
}

}  // namespace
