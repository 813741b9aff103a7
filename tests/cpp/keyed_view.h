// Keys for tests, and calls of a keyed index with vectors in place of pointers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kvpool/index/key_pins.h"
#include "kvpool/index/keyed_index.h"

namespace kvpool::testing {

using KeyBytes = std::vector<std::byte>;

// Keys of `key_bytes` bytes, each of which has a number in its last 8; the bytes before are the same in all.
inline KeyBytes keys_of(const std::vector<std::uint64_t>& numbers, std::size_t key_bytes = 32) {
  KeyBytes keys(numbers.size() * key_bytes, std::byte{0x5A});
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::memcpy(keys.data() + (i + 1) * key_bytes - sizeof numbers[i], &numbers[i], sizeof numbers[i]);
  }
  return keys;
}

struct KeyedFound {
  std::size_t first = 0;
  std::vector<KeyedEntry*> pins;
  std::vector<Address> values;
  std::vector<bool> stored;
};

template <class Index>
std::vector<bool> stored_in(Index& index, const std::vector<std::uint64_t>& numbers) {
  const KeyBytes keys = keys_of(numbers, index.key_bytes());
  const std::unique_ptr<bool[]> stored(new bool[numbers.size() + 1]);
  index.exists(keys.data(), numbers.size(), stored.get());
  return std::vector<bool>(stored.get(), stored.get() + numbers.size());
}

inline KeyedFound get_from(KeyedIndex& index, const std::vector<std::uint64_t>& numbers, bool every = false) {
  const KeyBytes keys = keys_of(numbers, index.key_bytes());
  const std::unique_ptr<bool[]> stored(new bool[numbers.size() + 1]);
  KeyedFound found;
  found.values.resize(numbers.size());
  const KeyedIndex::Hit hit =
      index.get(keys.data(), numbers.size(), every, found.pins, found.values.data(), stored.get());
  found.first = hit.first;
  found.values.resize(hit.found);
  found.stored.assign(stored.get(), stored.get() + numbers.size());
  return found;
}

// Value of a key: its number and 1000.
inline std::size_t put_into(KeyedIndex& index, const std::vector<std::uint64_t>& numbers) {
  std::vector<Address> values;
  for (const std::uint64_t number : numbers) values.push_back(number + 1000);
  return index.put(keys_of(numbers, index.key_bytes()).data(), numbers.size(), values.data(), values.data());
}

inline std::vector<Address> evict_from(KeyedIndex& index, std::size_t n) {
  std::vector<Address> gone(std::min(n, index.evictable()));
  gone.resize(index.evict(n, gone.data()));
  return gone;
}

}  // namespace kvpool::testing
