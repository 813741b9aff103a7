// The router's tree beside a naive one, a map from every prefix to its holders: the same random calls to both, compared
// after every call; some calls run out of memory half way and must then have changed nothing.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "instance_view.h"
#include "kvpool/index/instance_index.h"

namespace {

using kvpool::InstanceHit;
using kvpool::InstanceHits;
using kvpool::InstanceIndex;
using kvpool::Token;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::FailNthAllocation;
using kvpool::testing::fuzz_length;
using kvpool::testing::fuzz_seeds;
using kvpool::testing::InstanceView;
using kvpool::testing::model_length;
using kvpool::testing::Prefix;
using kvpool::testing::Tokens;
using kvpool::testing::view_of;

class Fuzz {
 public:
  Fuzz(std::uint64_t seed, std::size_t page_tokens, std::uint32_t instances, std::size_t pages_max = 0)
      : page_tokens_(page_tokens),
        instances_(instances),
        pages_max_(pages_max),
        dice_(seed),
        index_(static_cast<std::uint32_t>(page_tokens), seed, pages_max) {}

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
      REQUIRE(index_.pages_evicted() == evicted_);
    }
    CHECK((pages_max_ == 0 || evicted_ > 0));
    index_.expire(now_ + 1);
    index_.audit();
    for (std::uint32_t instance = 0; instance < instances_; ++instance) index_.remove_instance(instance);
    REQUIRE(index_.node_count() == 0);
    REQUIRE(index_.namespace_count() == 1);
  }

 private:
  void step() {
    switch (dice_.below(10)) {
      case 0:
        if (model_.size() > kPagesMax) return expire(now_);  // the model is slow: keep it small
        if (dice_.one_in(4)) return expire(long_ago());
        return remove();
      case 1:
        return dice_.one_in(30) ? remove_instance() : remove();
      case 2:
        return dice_.one_in(2) ? expire_some() : match(/*counts=*/false);
      case 3:
      case 4:
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

  std::uint64_t long_ago() { return now_ - std::min<std::uint64_t>(now_, dice_.below(400)); }
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
    const bool lasting = dice_.one_in(8);
    const std::uint64_t since = dice_.one_in(2) ? 0 : long_ago();
    std::size_t added = 0;
    if (!attempt([&] {
          added = index_.insert(prompt.name_space, prompt.tokens.data(), pages, instance, now_, lasting, since);
        })) {
      return;
    }
    std::size_t expected = 0;
    for (std::size_t n = 1; n <= pages; ++n) {
      auto& holders = model_[cut(prompt, n)];
      expected += holders.contains(instance) && holders[instance] >= since ? 0 : 1;
      holders[instance] = std::max(holders[instance], lasting ? kvpool::kLasting : now_);
    }
    REQUIRE(added == expected);
    use(prompt, pages);
    evict();
  }

  void use(const Prefix& prompt, std::size_t pages) {
    ++uses_;
    for (std::size_t n = 1; n <= pages; ++n) used_[cut(prompt, n)] = uses_;
  }

  // The longest unused go first, of equally long unused ones the end of the prompt.
  void evict() {
    while (pages_max_ != 0 && model_.size() > pages_max_) {
      const auto goes_before = [&](const auto& a, const auto& b) {
        const std::uint64_t used_a = used_.at(a.first);
        const std::uint64_t used_b = used_.at(b.first);
        return used_a != used_b ? used_a < used_b : a.first.tokens.size() > b.first.tokens.size();
      };
      model_.erase(std::min_element(model_.begin(), model_.end(), goes_before));
      ++evicted_;
    }
  }

  void match(bool counts) {
    const Prefix prompt = random_prompt();
    std::vector<InstanceHit> hits;
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
        if (counts) used = std::max(used, now_);
      }
    }
    if (counts) {
      std::size_t found = 0;
      for (const auto& [instance, pages] : longest) found = std::max(found, pages);
      use(prompt, found);
    }
    std::vector<InstanceHit> expected;
    for (const auto& [instance, pages] : longest) expected.push_back({instance, pages});
    std::stable_sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.pages > b.pages; });
    REQUIRE(hits == expected);
    compare_levels(prompt);
  }

  // Without what was not used for a time, and grouped by length.
  void compare_levels(const Prefix& prompt) {
    const std::uint64_t since = dice_.one_in(2) ? 0 : long_ago();
    std::map<std::uint32_t, std::size_t> longest;
    for (std::size_t n = 1; n <= page_count(prompt) && model_.contains(cut(prompt, n)); ++n) {
      for (const auto& [instance, used] : model_.at(cut(prompt, n))) {
        if (used >= since) longest[instance] = n;
      }
    }
    std::vector<InstanceHit> expected;
    for (const auto& [instance, pages] : longest) expected.push_back({instance, pages});
    std::stable_sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.pages > b.pages; });
    InstanceHits hits;
    hits.add(99, 99);  // replaced
    if (!attempt([&] { index_.peek(prompt.name_space, prompt.tokens.data(), prompt.tokens.size(), hits, since); })) {
      return;
    }
    std::vector<InstanceHit> flat;
    for (std::size_t level = 0; level < hits.levels().size(); ++level) {
      REQUIRE(hits.levels()[level].begin < hits.end_of(level));
      REQUIRE((level == 0 || hits.levels()[level].pages < hits.levels()[level - 1].pages));
      for (std::size_t at = hits.levels()[level].begin; at < hits.end_of(level); ++at) {
        flat.push_back({hits.instances()[at], hits.levels()[level].pages});
        REQUIRE(hits.level_of(hits.instances()[at]) == level);
      }
    }
    REQUIRE(flat == expected);
    for (std::uint32_t instance = 0; instance < instances_; ++instance) {
      const bool holds = std::any_of(expected.begin(), expected.end(),
                                     [&](const InstanceHit& hit) { return hit.instance == instance; });
      REQUIRE(holds == (hits.level_of(instance) < hits.levels().size()));
    }
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

  // Drops nothing that the sweep may not drop; how far it goes is the index's business.
  void expire_some() {
    const std::uint64_t before = long_ago();
    latest_before_ = std::max(latest_before_, before);
    std::size_t dropped = 0;
    const std::size_t nodes = dice_.below(6);
    REQUIRE(attempt([&] { dropped = index_.expire_some(before, nodes); }));  // never throws
    const InstanceView left = view_of(index_);
    REQUIRE(dropped == drop([&](const Prefix& prefix, std::uint32_t instance, std::uint64_t used) {
              const bool kept = left.contains(prefix) && left.at(prefix).contains(instance);
              REQUIRE((kept || used < latest_before_));
              return !kept;
            }));
    if (!dice_.one_in(20)) return;
    for (int sweep = 0; sweep < 2; ++sweep) index_.expire_some(before, 1'000'000);  // the second one from the start
    drop([&](const Prefix&, std::uint32_t, std::uint64_t used) { return used < before; });
    const InstanceView rest = view_of(index_);
    drop([&](const Prefix& prefix, std::uint32_t instance, std::uint64_t used) {  // by the first sweep
      const bool kept = rest.contains(prefix) && rest.at(prefix).contains(instance);
      REQUIRE((kept || used < latest_before_));
      return !kept;
    });
    for (const auto& [prefix, holders] : rest) {
      for (const auto& [instance, used] : holders) REQUIRE(used >= before);
    }
  }

  static constexpr std::size_t kPagesMax = 150;

  std::size_t page_tokens_;
  std::uint32_t instances_;
  std::size_t pages_max_;
  Dice dice_;
  InstanceIndex index_;
  InstanceView model_;
  std::map<Prefix, std::uint64_t> used_;  // by which call, the last time
  std::uint64_t uses_ = 0;
  std::uint64_t evicted_ = 0;
  std::uint64_t latest_before_ = 0;  // of all sweeps
  std::uint64_t now_ = 0;
};

TEST_CASE("the router's tree agrees with a naive one after every call") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("instance index", seed);
    CAPTURE(seed);
    for (const std::size_t page_tokens : {1, 2, 4}) {
      CAPTURE(page_tokens);
      Fuzz(seed, page_tokens, 2).run(model_length(400));
      Fuzz(seed, page_tokens, 12).run(model_length(400));
      Fuzz(seed, page_tokens, 3, 40).run(fuzz_length(400));
      Fuzz(seed, page_tokens, 3, 4).run(fuzz_length(400));
    }
  }
}

}  // namespace
