// Blocks under keys in a pool: what goes in comes out, whose blocks are evicted for what, and what errors leave behind.
#include "kvpool/pool/keyed_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "keyed_cache_kit.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/peer_claims.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace keyed_caches;  // NOLINT(google-build-using-namespace)
namespace {

TEST_CASE("a keyed cache gives back what was put in, from the first key on") {
  Rig rig(8);
  CHECK(rig.put({1, 2, 3}) == 3);
  CHECK(rig.get({1, 2, 9, 3}) == 2);
  CHECK(rig.get({9, 1}) == 0);
  CHECK(rig.put({3, 4}) == 1);
  CHECK(rig.get({4, 3, 2, 1}) == 4);
  CHECK(rig.put({}) == 0);
  CHECK(rig.free_dram() == 4);
  const KeyedCacheStats stats = rig.cache->stats();
  CHECK(stats.saved_blocks == 4);
  CHECK(stats.duplicate_blocks == 1);
  CHECK(stats.found_blocks == 6);
  CHECK(stats.missed_blocks == 4);
  rig.cache->audit();
}

TEST_CASE("blocks of HBM are saved and loaded") {
  Rig rig(8);
  const Addresses from = alloc(*rig.pool, 3);
  for (std::size_t i = 0; i < 3; ++i) fill(rig, from[i], i + 1);
  CHECK(rig.save({1, 2, 3}, from) == 3);
  CHECK(rig.get({1, 2, 3}) == 3);
  fill(rig, from[0], 77);  // the copy stays as it is
  CHECK(rig.save({1, 2, 4}, from) == 1);
  CHECK(rig.get({1, 2}) == 2);
  const Addresses into = alloc(*rig.pool, 3);
  for (const Address address : into) fill(rig, address, 50);
  CHECK(rig.load({2, 1, 9}, into) == 2);
  CHECK(holds(rig, into[0], 2));
  CHECK(holds(rig, into[1], 1));
  CHECK(holds(rig, into[2], 50));
  rig.cache->audit();
}

TEST_CASE("a key that a put names twice takes one block") {
  Rig rig(8);
  CHECK(rig.put({1, 1, 2}) == 2);
  CHECK(rig.free_dram() == 6);
  CHECK(rig.get({1, 2}) == 2);
}

// The second time used to count as a block, for which it refused the call or dropped others.
TEST_CASE("a new key that is named twice needs room for one block, and the first of its contents counts") {
  Rig rig(3);
  rig.put({7});
  const Addresses from = alloc(*rig.pool, 3);
  for (std::size_t i = 0; i < 3; ++i) fill(rig, from[i], i + 1);
  CHECK(rig.save({2, 1, 2}, {from[1], from[0], from[2]}) == 2);
  CHECK(rig.stored({1, 2, 7}) == Bits{true, true, true});
  CHECK(rig.get({1, 2}) == 2);
  CHECK(rig.put({1, 2, 7, 7, 2, 1}) == 0);
  CHECK(rig.cache->stats().evicted_blocks == 0);
  CHECK(rig.cache->stats().duplicate_blocks == 7);
  CHECK(rig.put({8, 9, 8, 9, 8}) == 2);
  CHECK(rig.free_dram() == 5);
  rig.cache->audit();
}

TEST_CASE("above its bound it evicts its coldest, but not what the same call names") {
  Rig rig(3);
  rig.put({1, 2, 3});
  CHECK(rig.put({1, 4}) == 1);  // 3 is the coldest: the end of the chain
  CHECK(rig.stored({1, 2, 3, 4}) == Bits{true, true, false, true});
  CHECK(rig.put({2, 5}) == 1);  // 4 was used after 1, but stands behind it
  CHECK(rig.stored({1, 2, 4, 5}) == Bits{true, true, false, true});
  CHECK(rig.free_dram() == 5);
  CHECK(rig.cache->stats().evicted_blocks == 2);
  rig.cache->audit();
}

TEST_CASE("what is pinned is not evicted, and stays at its address") {
  Rig rig(2);
  rig.put({1, 2});
  Addresses addresses;
  KeyPins pins = rig.pin({1, 2}, &addresses);
  CHECK(code_of([&] { rig.put({3}); }) == ErrorCode::kOutOfBlocks);
  CHECK(code_of([&] { rig.cache->forget(keys_of({1}, 16).data(), 1); }) == ErrorCode::kState);
  CHECK(rig.cache->evict(5) == 0);
  CHECK(rig.stored({1, 2, 3}) == Bits{true, true, false});
  CHECK(holds(rig, addresses[0], 1));
  CHECK(holds(rig, addresses[1], 2));
  pins.release();
  CHECK(rig.put({3}) == 1);
  rig.cache->audit();
}

TEST_CASE("more keys than it has room for are refused, and nothing is evicted for them") {
  Rig rig(3);
  rig.put({1, 2});
  CHECK(code_of([&] { rig.put({5, 6, 7, 8}); }) == ErrorCode::kOutOfBlocks);
  CHECK(code_of([&] { rig.put({1, 2, 7, 8}); }) == ErrorCode::kOutOfBlocks);
  CHECK(rig.stored({1, 2, 5, 7}) == Bits{true, true, false, false});
  CHECK(rig.put({1, 2, 7}) == 1);
  rig.cache->audit();
}

TEST_CASE("it makes the pool drop cached prompts, and gives up its own where the pool has none") {
  Rig rig(6, /*hbm=*/0, /*dram=*/8);
  insert(rig.pool, prompt(1, 5), alloc(*rig.pool, 5, Medium::kDram));
  CHECK(rig.put({1, 2, 3, 4}) == 4);
  CHECK(match(rig.pool, prompt(1, 5)).hit.pages == 4);
  const Addresses others = alloc(*rig.pool, 4, Medium::kDram);  // the rest of the prompt goes
  CHECK(match(rig.pool, prompt(1, 5)).hit.pages == 0);
  CHECK(rig.put({5, 6}) == 2);  // two that it has make room
  CHECK(rig.stored({1, 2, 3, 4, 5, 6}) == Bits{true, true, false, false, true, true});
  CHECK(code_of([&] { rig.put({11, 12, 13, 14, 15}); }) == ErrorCode::kOutOfBlocks);
  rig.cache->audit();
  rig.pool->audit();
  rig.pool->free(others.data(), others.size());
}

TEST_CASE("what is evicted or forgotten is the pool's again, and its address is stale") {
  Rig rig(8);
  rig.put({1, 2, 3, 4});
  Addresses addresses;
  rig.pin({1}, &addresses).release();
  CHECK(rig.cache->forget(keys_of({1, 9, 1}, 16).data(), 3) == 1);
  CHECK(rig.cache->evict(2) == 2);
  CHECK(rig.stored({1, 2, 3, 4}) == Bits{false, true, false, false});
  CHECK(rig.free_dram() == 7);
  CHECK(code_of([&] { rig.pool->free(addresses.data(), 1); }) == ErrorCode::kStaleAddress);
}

TEST_CASE("a copy that is refused stores nothing and keeps no block") {
  Rig rig(8);
  rig.put({1});
  Addresses from = alloc(*rig.pool, 2);
  const Addresses freed = alloc(*rig.pool, 1);
  rig.pool->free(freed.data(), 1);
  from[1] = freed[0];
  CHECK(code_of([&] { rig.save({1, 2, 3}, {from[0], from[0], from[1]}); }) == ErrorCode::kStaleAddress);
  CHECK(rig.stored({1, 2, 3}) == Bits{true, false, false});
  CHECK(rig.free_dram() == 7);
  CHECK(rig.cache->stats().evictable == 1);
  CHECK(code_of([&] { rig.save({1, 2, 3}, from); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { rig.load({1}, from); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { rig.load({1}, {from[1]}); }) == ErrorCode::kStaleAddress);
  CHECK(rig.save({2}, {from[0]}) == 1);
  rig.cache->audit();
}

TEST_CASE("a keyed cache of no blocks, or of more than the pool has, is refused") {
  const auto pool = std::make_shared<Pool>(small_options(2, 4));
  CHECK(code_of([&] { KeyedCache(pool, 16, 0); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { KeyedCache(pool, 16, 5); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { KeyedCache(pool, 7, 4); }) == ErrorCode::kArgument);
  CHECK(pool->stats().counters.allocated_blocks == 0);
}

TEST_CASE("two keyed caches share a pool") {
  Rig rig(3);
  const auto other = std::make_shared<KeyedCache>(rig.pool, 16, 3);
  rig.put({1, 2});
  CHECK(other->save_rows(keys_of({1}, 16).data(), 1, rows_of({90}).data()) == 1);
  CHECK(rig.get({1, 2}) == 2);
  CHECK(other->evict(9) == 1);
  CHECK(rig.get({1, 2}) == 2);
}

TEST_CASE("a closed cache gives its blocks back, those that are pinned when the pins go") {
  Rig rig(8);
  rig.put({1, 2, 3});
  Addresses addresses;
  KeyPins pins = rig.pin({1, 2}, &addresses);
  rig.cache->close();
  rig.cache->close();
  CHECK(rig.free_dram() == 6);
  CHECK(holds(rig, addresses[1], 2));
  CHECK(code_of([&] { rig.put({4}); }) == ErrorCode::kClosed);
  CHECK(code_of([&] { rig.stored({1}); }) == ErrorCode::kClosed);
  pins.release();
  CHECK(rig.free_dram() == 8);
  rig.pool->audit();
}

TEST_CASE("a cache whose last reference goes gives its blocks back") {
  Rig rig(8);
  rig.put({1, 2, 3});
  KeyPins pins = rig.pin({1});
  rig.cache.reset();
  CHECK(rig.free_dram() == 5);  // the pins keep it
  pins.release();
  CHECK(rig.free_dram() == 8);
}

TEST_CASE("a pool that is closed first takes the blocks with it") {
  Rig rig(8);
  rig.put({1, 2, 3});
  KeyPins pins = rig.pin({1});
  rig.pool->close();
  CHECK(code_of([&] { rig.get({1}); }) == ErrorCode::kClosed);
  pins.release();
  rig.cache->close();
}

TEST_CASE("blocks that others have freed are missed and harm nobody") {
  Rig rig(8);
  rig.put({1, 2});
  Addresses addresses;
  rig.pin({1, 2}, &addresses).release();
  rig.pool->free(addresses.data(), 1);  // they are not the caller's: G3 is broken
  CHECK(code_of([&] { rig.cache->audit(); }) == ErrorCode::kAudit);
  const Addresses into = alloc(*rig.pool, 1);
  CHECK(code_of([&] { rig.load({1}, into); }) == ErrorCode::kStaleAddress);
  CHECK(rig.load({2}, into) == 1);
  CHECK(rig.cache->evict(2) == 2);
  CHECK(rig.free_dram() == 8);
  rig.pool->audit();
}

// They used to be refused, and never freed afterwards.
TEST_CASE("in a pool whose HBM an engine allocates, blocks that are read are free when they are read no more") {
  std::vector<std::byte> memory(4 * kBlockBytes);
  PoolOptions options = small_options(0, 4);
  AdoptedMemory adopted;
  adopted.blocks = 4;
  adopted.segments = {{memory.data(), kBlockBytes, 64}, {memory.data() + 64, kBlockBytes, 64}};
  options.adopted_hbm = adopted;
  options.engine_allocates = true;
  Rig rig(std::make_shared<Pool>(options), 4);
  rig.put({1, 2, 3});
  Addresses addresses;
  rig.pin({1, 2}, &addresses).release();
  rig.pool->for_peers().hold_for_reading(addresses.data(), 1, 0);
  CHECK(rig.cache->evict(3) == 3);
  CHECK(rig.free_dram() == 3);
  CHECK(holds(rig, addresses[0], 1));
  rig.pool->for_peers().release_reading(addresses.data(), 1);
  CHECK(rig.free_dram() == 4);

  // And what a transfer reads can be saved meanwhile.
  const std::uint32_t block = 2;
  Addresses own(1);
  rig.pool->adopt(&block, 1, own.data());
  rig.pool->for_peers().hold_for_reading(own.data(), 1, 0);
  CHECK(rig.save({7}, own) == 1);
  rig.pool->for_peers().release_reading(own.data(), 1);
  rig.cache->audit();
  rig.pool->audit();
}

}  // namespace
}  // namespace kvpool::testing
