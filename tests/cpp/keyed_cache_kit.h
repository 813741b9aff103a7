// A keyed cache on a small pool, and blocks whose content says which number they were stored under.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "keyed_view.h"
#include "kvpool/pool/keyed_cache.h"
#include "pool_fixture.h"

namespace kvpool::testing::keyed_caches {

using Numbers = std::vector<std::uint64_t>;
using Bits = std::vector<bool>;
inline constexpr std::size_t kBlockBytes = 128;  // two pieces of 64 in HBM

// Rows of blocks; each byte of a row is made of its number and where it lies.
inline std::vector<std::byte> rows_of(const Numbers& numbers) {
  std::vector<std::byte> rows;
  for (const std::uint64_t number : numbers) {
    for (std::size_t i = 0; i < kBlockBytes; ++i) rows.push_back(static_cast<std::byte>(number * 31 + i));
  }
  return rows;
}

struct Rig {
  explicit Rig(std::size_t blocks_max, std::uint32_t hbm = 8, std::uint32_t dram = 8)
      : pool(std::make_shared<Pool>(small_options(hbm, dram))),
        cache(std::make_shared<KeyedCache>(pool, 16, blocks_max)) {}

  Rig(std::shared_ptr<Pool> with, std::size_t blocks_max)
      : pool(std::move(with)), cache(std::make_shared<KeyedCache>(pool, 16, blocks_max)) {}

  std::size_t put(const Numbers& numbers) {
    return cache->save_rows(keys_of(numbers, 16).data(), numbers.size(), rows_of(numbers).data());
  }
  // Content of the blocks from the first on, each of which has to be the right one.
  std::size_t get(const Numbers& numbers) {
    std::vector<std::byte> rows(numbers.size() * kBlockBytes);
    const std::size_t n = cache->load_rows(keys_of(numbers, 16).data(), numbers.size(), rows.data());
    const std::vector<std::byte> expected = rows_of(numbers);
    CHECK(std::equal(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(n * kBlockBytes), expected.begin()));
    const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
    CHECK(std::all_of(rows.begin() + static_cast<std::ptrdiff_t>(n * kBlockBytes), rows.end(), is_zero));
    return n;
  }
  KeyPins pin(const Numbers& numbers, Addresses* addresses = nullptr) {
    std::vector<KeyedEntry*> entries;
    Addresses found(numbers.size());
    const auto hit = cache->match(keys_of(numbers, 16).data(), numbers.size(), false, entries, found.data(), nullptr);
    found.resize(hit.found);
    if (addresses != nullptr) *addresses = found;
    return {cache, std::move(entries)};
  }
  std::size_t save(const Numbers& numbers, const Addresses& from) {
    return cache->save(keys_of(numbers, 16).data(), numbers.size(), from, {});
  }
  std::size_t load(const Numbers& numbers, const Addresses& into) {
    return cache->load(keys_of(numbers, 16).data(), numbers.size(), into, {});
  }
  Bits stored(const Numbers& numbers) { return stored_in(*cache, numbers); }
  std::size_t free_dram() {
    return pool->stats().media[Medium::kDram].by_state[static_cast<std::size_t>(BlockState::kFree)];
  }

  std::shared_ptr<Pool> pool;
  std::shared_ptr<KeyedCache> cache;
};

inline void fill(Rig& rig, Address address, std::uint64_t number) {
  const std::shared_ptr<Arena> arena = rig.pool->arena(medium_of(address));
  const std::vector<std::byte> row = rows_of({number});
  std::size_t offset = 0;
  for (const Segment& segment : arena->segments()) {
    std::copy_n(row.begin() + static_cast<std::ptrdiff_t>(offset), segment.bytes,
                segment.base + block_of(address) * segment.stride);
    offset += segment.bytes;
  }
}

inline bool holds(Rig& rig, Address address, std::uint64_t number) {
  const std::shared_ptr<Arena> arena = rig.pool->arena(medium_of(address));
  const std::vector<std::byte> row = rows_of({number});
  std::size_t offset = 0;
  for (const Segment& segment : arena->segments()) {
    const std::byte* at = segment.base + block_of(address) * segment.stride;
    if (!std::equal(at, at + segment.bytes, row.begin() + static_cast<std::ptrdiff_t>(offset))) return false;
    offset += segment.bytes;
  }
  return true;
}

}  // namespace kvpool::testing::keyed_caches
