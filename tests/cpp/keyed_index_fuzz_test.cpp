// The keyed index beside a naive one, a map and a list of keys by their last use: the same random calls to both,
// compared after every call; some calls run out of memory half way and must then have changed nothing.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "failing_alloc.h"
#include "fuzz_seeds.h"
#include "keyed_view.h"

namespace {

using kvpool::Address;
using kvpool::KeyedEntry;
using kvpool::KeyedIndex;
using kvpool::KeySeed;
using kvpool::testing::announce_fuzz;
using kvpool::testing::Dice;
using kvpool::testing::evict_from;
using kvpool::testing::FailNthAllocation;
using kvpool::testing::fuzz_length;
using kvpool::testing::fuzz_seeds;
using kvpool::testing::get_from;
using kvpool::testing::KeyBytes;
using kvpool::testing::KeyedFound;
using kvpool::testing::keys_of;
using kvpool::testing::stored_in;

using Numbers = std::vector<std::uint64_t>;

struct NaiveKey {
  Address value;
  int pins = 0;
};

class Fuzz {
 public:
  Fuzz(std::uint64_t seed, std::size_t key_bytes, std::uint64_t keys)
      : keys_(keys), dice_(seed), index_(key_bytes, KeySeed{seed, ~seed}) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      this->step();
      index_.audit();
      REQUIRE(index_.size() == model_.size());
      REQUIRE(index_.evictable() == order_.size());
    }
    while (!open_.empty()) release();
    std::vector<Address> rest;
    for (const std::uint64_t number : order_) rest.push_back(model_.at(number).value);
    REQUIRE(evict_from(index_, model_.size()) == rest);
    REQUIRE(index_.size() == 0);
  }

 private:
  struct Open {
    std::vector<KeyedEntry*> pins;
    Numbers numbers;
  };

  void step() {
    switch (dice_.below(8)) {
      case 0:
        return look();
      case 1:
        return forget();
      case 2:
        return evict();
      case 3:
      case 4:
        return get();
      case 5:
        return open_.empty() ? get() : release();
      default:
        return put();
    }
  }

  Numbers random_chain() {
    Numbers numbers;
    std::uint64_t at = dice_.below(keys_);
    for (std::size_t n = dice_.below(12); n > 0; --n) {
      numbers.push_back(at % keys_);
      at += dice_.one_in(8) ? dice_.below(keys_) : 1;
    }
    return numbers;
  }

  void leave(std::uint64_t number) { order_.remove(number); }
  void use_in_order(const Numbers& numbers) {  // the coldest is the front
    for (std::size_t i = numbers.size(); i-- > 0;) {
      if (model_.at(numbers[i]).pins > 0) continue;
      leave(numbers[i]);
      order_.push_back(numbers[i]);
    }
  }

  void put() {
    const Numbers numbers = random_chain();
    const KeyBytes keys = keys_of(numbers, index_.key_bytes());
    std::vector<Address> values(numbers.size());
    for (Address& value : values) value = ++last_value_;
    std::vector<Address> now(numbers.size());
    std::size_t added = 0;
    {
      const FailNthAllocation failure(dice_.one_in(3) ? 1 + dice_.below(4) : 0);
      try {
        added = index_.put(keys.data(), numbers.size(), values.data(), now.data());
      } catch (const std::bad_alloc&) {
        CHECK(failure.failed_one());
        return;
      }
    }
    std::size_t expected = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto [at, is_new] = model_.try_emplace(numbers[i], NaiveKey{values[i]});
      expected += is_new ? 1 : 0;
      REQUIRE(now[i] == at->second.value);
    }
    REQUIRE(added == expected);
    use_in_order(numbers);
  }

  void get() {
    const Numbers numbers = random_chain();
    const bool every = dice_.one_in(2);
    const KeyedFound found = get_from(index_, numbers, every);
    Open open{found.pins, {}};
    std::vector<Address> values;
    std::size_t first = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto at = model_.find(numbers[i]);
      REQUIRE(found.stored[i] == (at != model_.end() && (every || first == i)));
      if (!found.stored[i]) continue;
      first += first == i ? 1 : 0;
      ++at->second.pins;
      leave(numbers[i]);
      values.push_back(at->second.value);
      open.numbers.push_back(numbers[i]);
    }
    REQUIRE(found.first == first);
    REQUIRE(found.values == values);
    open_.push_back(std::move(open));
  }

  void release() {
    const std::size_t which = dice_.below(open_.size());
    const Open open = std::move(open_[which]);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(which));
    index_.unpin(open.pins);
    for (std::size_t i = open.numbers.size(); i-- > 0;) {
      if (--model_.at(open.numbers[i]).pins == 0) order_.push_back(open.numbers[i]);
    }
  }

  void look() {
    const Numbers numbers = random_chain();
    const std::vector<bool> stored = stored_in(index_, numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i) REQUIRE(stored[i] == model_.contains(numbers[i]));
    const KeyBytes keys = keys_of(numbers, index_.key_bytes());
    const auto first = static_cast<std::size_t>(std::find(stored.begin(), stored.end(), false) - stored.begin());
    REQUIRE(index_.exists(keys.data(), numbers.size(), nullptr) == first);
  }

  void forget() {
    const Numbers numbers = random_chain();
    const KeyBytes keys = keys_of(numbers, index_.key_bytes());
    std::vector<Address> gone(numbers.size());
    const KeyedIndex::Forgotten forgotten = index_.forget(keys.data(), numbers.size(), gone.data());
    gone.resize(forgotten.removed);
    const auto is_pinned = [&](std::uint64_t number) { return model_.contains(number) && model_.at(number).pins > 0; };
    const auto pinned = static_cast<std::size_t>(std::count_if(numbers.begin(), numbers.end(), is_pinned));
    REQUIRE(forgotten.pinned == pinned);
    std::vector<Address> expected;
    for (std::size_t i = 0; pinned == 0 && i < numbers.size(); ++i) {
      const auto at = model_.find(numbers[i]);
      if (at == model_.end()) continue;
      expected.push_back(at->second.value);
      leave(numbers[i]);
      model_.erase(at);
    }
    REQUIRE(gone == expected);
  }

  void evict() {
    const std::size_t n = dice_.below(model_.size() / 2 + 2);
    std::vector<Address> expected;
    while (expected.size() < n && !order_.empty()) {
      expected.push_back(model_.at(order_.front()).value);
      model_.erase(order_.front());
      order_.pop_front();
    }
    REQUIRE(evict_from(index_, n) == expected);
  }

  const std::uint64_t keys_;
  Dice dice_;
  KeyedIndex index_;
  std::map<std::uint64_t, NaiveKey> model_;
  std::list<std::uint64_t> order_;  // of those that are not pinned, the coldest first
  std::vector<Open> open_;
  Address last_value_ = 0;
};

TEST_CASE("the keyed index does what a naive one does") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("keyed_index", seed);
    CAPTURE(seed);
    Fuzz(seed, 8, 24).run(fuzz_length(1500));
    Fuzz(seed, 32, 400).run(fuzz_length(1500));
    Fuzz(seed, 61, 60).run(fuzz_length(800));
  }
}

}  // namespace
