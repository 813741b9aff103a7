// The keyed index by example: what each call promises, and what it leaves behind when memory runs out.
#include "kvpool/index/keyed_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "failing_alloc.h"
#include "keyed_view.h"
#include "kvpool/base/error.h"
#include "kvpool/index/shared_keyed_index.h"

namespace {

using kvpool::Address;
using kvpool::Error;
using kvpool::hash_key;
using kvpool::KeyedEntry;
using kvpool::KeyedIndex;
using kvpool::KeyPins;
using kvpool::KeySeed;
using kvpool::SharedKeyedIndex;
using kvpool::testing::evict_from;
using kvpool::testing::fail_each_allocation;
using kvpool::testing::get_from;
using kvpool::testing::KeyBytes;
using kvpool::testing::KeyedFound;
using kvpool::testing::keys_of;
using kvpool::testing::put_into;
using kvpool::testing::stored_in;

using Numbers = std::vector<std::uint64_t>;
using Values = std::vector<Address>;
using Bits = std::vector<bool>;

constexpr KeySeed kFixed{1, 2};

Numbers numbers_from(std::uint64_t first, std::size_t n) {
  Numbers numbers(n);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST_CASE("the hash of keys is SipHash-1-3") {
  std::vector<std::byte> key(61);
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  const KeySeed none{0, 0};
  // What CPython 3.11 says of hash(bytes(range(n))) with PYTHONHASHSEED=0, which makes its seed zeros.
  CHECK(hash_key(key.data(), 8, none) == 0xEAD411E67EBE2EEAULL);
  CHECK(hash_key(key.data(), 32, none) == 0x31EF8061C910629BULL);
  CHECK(hash_key(key.data(), 61, none) == 0xCDCF4A42EC0DD605ULL);
  CHECK(hash_key(key.data(), 32, {1, 0}) != hash_key(key.data(), 32, {0, 1}));
}

TEST_CASE("a key has 8 to 64 bytes") {
  CHECK_THROWS_AS(KeyedIndex(7), Error);
  CHECK_THROWS_AS(KeyedIndex(65), Error);
  for (const std::size_t bytes : {8U, 9U, 32U, 63U, 64U}) {
    KeyedIndex index(bytes);
    CHECK(put_into(index, {1, 2, 3}) == 3);
    CHECK(stored_in(index, {3, 4, 1}) == Bits{true, false, true});
    index.audit();
  }
}

TEST_CASE("exists says of each key whether it is stored, and how many are from the first on") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1, 2, 4});
  const KeyBytes keys = keys_of({1, 2, 3, 4});
  CHECK(index.exists(keys.data(), 4, nullptr) == 2);
  CHECK(index.exists(keys.data(), 0, nullptr) == 0);
  CHECK(stored_in(index, {1, 2, 3, 4}) == Bits{true, true, false, true});
}

TEST_CASE("keys that differ in one byte are different keys") {
  KeyedIndex index(16, kFixed);
  KeyBytes key(16, std::byte{7});
  Address value = 1;
  index.put(key.data(), 1, &value, &value);
  for (std::size_t i = 0; i < key.size(); ++i) {
    KeyBytes other = key;
    other[i] ^= std::byte{1};
    CHECK(index.exists(other.data(), 1, nullptr) == 0);
  }
}

TEST_CASE("a put keeps what is stored and says so") {
  KeyedIndex index(32, kFixed);
  const KeyBytes keys = keys_of({1, 2, 3});
  const Values first{10, 20, 30};
  Values now(3);
  CHECK(index.put(keys.data(), 2, first.data(), now.data()) == 2);
  const Values second{11, 20, 31};
  CHECK(index.put(keys.data(), 3, second.data(), now.data()) == 1);
  CHECK(now == Values{10, 20, 31});
  CHECK(index.size() == 3);
  index.audit();
}

TEST_CASE("a key that a put names twice keeps its first value") {
  KeyedIndex index(32, kFixed);
  const KeyBytes keys = keys_of({1, 2, 1});
  const Values given{10, 20, 30};
  Values now(3);
  CHECK(index.put(keys.data(), 3, given.data(), now.data()) == 2);
  CHECK(now == Values{10, 20, 10});
  index.audit();
}

TEST_CASE("get pins the keys from the first on, or all that are stored") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1, 2, 4});
  const KeyedFound first = get_from(index, {1, 2, 3, 4});
  CHECK(first.first == 2);
  CHECK(first.values == Values{1001, 1002});
  CHECK(first.stored == Bits{true, true, false, false});
  CHECK(index.evictable() == 1);
  const KeyedFound every = get_from(index, {3, 4, 1}, /*every=*/true);
  CHECK(every.first == 0);
  CHECK(every.values == Values{1004, 1001});
  CHECK(every.stored == Bits{false, true, true});
  CHECK(index.evictable() == 0);
  CHECK(evict_from(index, 5).empty());
  index.unpin(first.pins);
  CHECK(index.evictable() == 1);
  index.unpin(every.pins);
  CHECK(index.evictable() == 3);
  index.audit();
}

TEST_CASE("a key that is pinned twice needs two releases") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1});
  const KeyedFound twice = get_from(index, {1, 1});
  CHECK(twice.first == 2);
  const KeyedFound once = get_from(index, {1});
  index.unpin(twice.pins);
  CHECK(index.evictable() == 0);
  index.unpin(once.pins);
  CHECK(index.evictable() == 1);
}

TEST_CASE("the end of a chain is evicted before its beginning, and what was used last goes last") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1, 2, 3});
  put_into(index, {11, 12});
  CHECK(evict_from(index, 1) == Values{1003});
  index.unpin(get_from(index, {1, 2}).pins);  // now warmer than 11 and 12
  CHECK(evict_from(index, 2) == Values{1012, 1011});
  put_into(index, {1, 5});  // a put is a use of what is stored, too
  CHECK(evict_from(index, 9) == Values{1002, 1005, 1001});
  CHECK(index.size() == 0);
  index.audit();
}

TEST_CASE("exists is no use") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1});
  put_into(index, {2});
  CHECK(stored_in(index, {1}) == Bits{true});
  CHECK(evict_from(index, 1) == Values{1001});
}

TEST_CASE("forget removes keys, and none when one of them is pinned") {
  KeyedIndex index(32, kFixed);
  put_into(index, {1, 2, 3});
  const KeyedFound pinned = get_from(index, {2});
  Values gone(4);
  const KeyBytes keys = keys_of({1, 2, 9, 1});
  KeyedIndex::Forgotten forgotten = index.forget(keys.data(), 4, gone.data());
  CHECK(forgotten.pinned == 1);
  CHECK(forgotten.removed == 0);
  CHECK(index.size() == 3);
  index.unpin(pinned.pins);
  forgotten = index.forget(keys.data(), 4, gone.data());
  CHECK(forgotten.removed == 2);
  CHECK(Values(gone.begin(), gone.begin() + 2) == Values{1001, 1002});
  CHECK(stored_in(index, {1, 2, 3}) == Bits{false, false, true});
  index.audit();
}

TEST_CASE("entries that were removed are used again") {
  KeyedIndex index(32, kFixed);
  put_into(index, numbers_from(0, 200));
  const std::size_t bytes = index.bytes();
  for (std::uint64_t round = 1; round <= 20; ++round) {
    CHECK(evict_from(index, 200).size() == 200);
    CHECK(put_into(index, numbers_from(round * 1000, 200)) == 200);
  }
  CHECK(index.bytes() == bytes);
  index.audit();
}

TEST_CASE("a key costs about a hundred bytes") {
  KeyedIndex index(32, kFixed);
  double worst = 0;
  for (std::uint64_t at = 0; at < 200'000; at += 1000) {
    put_into(index, numbers_from(at, 1000));
    if (at >= 10'000) worst = std::max(worst, static_cast<double>(index.bytes()) / static_cast<double>(index.size()));
  }
  CHECK(worst < 144);  // while the table moves to one twice as large
  CHECK(static_cast<double>(index.bytes()) / static_cast<double>(index.size()) < 116);
}

TEST_CASE("a put that runs out of memory changes nothing, and so does a get") {
  const int puts = fail_each_allocation([&](auto&& fail) {
    KeyedIndex index(32, kFixed);
    put_into(index, {1, 2});
    const Numbers numbers = numbers_from(2, 600);
    const KeyBytes keys = keys_of(numbers);
    Values values(600, 7);
    if (fail([&] { index.put(keys.data(), 600, values.data(), values.data()); })) {
      CHECK(index.size() == 2);
      CHECK(evict_from(index, 1) == Values{1002});
    } else {
      CHECK(index.size() == 601);  // 2 was there
    }
    index.audit();
  });
  CHECK(puts >= 4);
  const int gets = fail_each_allocation([&](auto&& fail) {
    KeyedIndex index(32, kFixed);
    put_into(index, {1, 2});
    const KeyBytes keys = keys_of({1, 2});
    std::vector<KeyedEntry*> pins;
    Values values(2);
    if (fail([&] { index.get(keys.data(), 2, false, pins, values.data(), nullptr); })) CHECK(index.evictable() == 2);
    index.unpin(pins);
    index.audit();
  });
  CHECK(gets == 1);
}

TEST_CASE("pins of an index that is used alone outlive every other reference to it") {
  auto index = std::make_shared<SharedKeyedIndex>(8);
  const KeyBytes keys = keys_of({1, 2}, 8);
  Values values{5, 6};
  index->put(keys.data(), 2, values.data(), values.data());
  std::vector<KeyedEntry*> entries;
  index->get(keys.data(), 2, false, entries, values.data(), nullptr);
  KeyPins pins(index, std::move(entries));
  KeyPins moved = std::move(pins);
  CHECK_FALSE(pins.holds());
  CHECK_THROWS_AS(index->forget(keys.data(), 1), Error);
  CHECK(index->evict(2).empty());
  index.reset();
  moved.release();
  moved.release();
  CHECK_FALSE(moved.holds());
}

TEST_CASE("threads may put, get, forget and evict at the same time") {
  auto index = std::make_shared<SharedKeyedIndex>(16);
  std::vector<std::thread> threads;
  for (std::uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (std::uint64_t round = 0; round < 200; ++round) {
        const Numbers numbers = numbers_from((round * 7 + id * 3) % 50, 16);
        const KeyBytes keys = keys_of(numbers, 16);
        Values values(numbers.begin(), numbers.end());
        index->put(keys.data(), 16, values.data(), values.data());
        std::vector<KeyedEntry*> entries;
        Values found(16);
        const auto hit = index->get(keys.data(), 16, true, entries, found.data(), nullptr);
        const KeyPins pins(index, std::move(entries));
        for (std::size_t i = 0; i < hit.found; ++i) CHECK(found[i] < 66);
        if (id == 0) index->evict(5);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  index->audit();
  CHECK(index->stats().evictable == index->stats().keys);
}

}  // namespace
