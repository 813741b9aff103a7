// Two and more caches with blocks of different sizes in one space.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::code_of;
using testing::error_of;
using Addresses = std::vector<Address>;

constexpr std::uint32_t kUnits = 24;

MediumMap<std::uint32_t> units(std::uint32_t hbm, std::uint32_t dram) { return {hbm, dram}; }

Addresses take(CacheBlocks& blocks, std::size_t n, MediumChoice choice, BlockState to = BlockState::kActive) {
  Addresses taken(n);
  REQUIRE(blocks.take(n, choice, to, taken.data()));
  return taken;
}

Address take_block(CacheBlocks& blocks, std::uint32_t block) {
  Address address = 0;
  REQUIRE(blocks.take_block(Medium::kHbm, block, BlockState::kActive, &address));
  return address;
}

std::uint32_t count(const CacheBlocks& blocks, BlockState state) { return blocks.store(Medium::kHbm).count(state); }

std::uint32_t free_units(const BlockSpace& space) {
  return space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kFree)];
}

struct Two {
  BlockSpace space{units(kUnits, kUnits), 2};
  CacheBlocks three{space, {.block_units = 3}};
  CacheBlocks four{space, {.block_units = 4}};

  void audit() const {
    three.audit();
    four.audit();
  }
};

}  // namespace

TEST_CASE("a block that one cache takes is unavailable to others until all of its units are free") {
  Two two;
  CHECK(two.three.store(Medium::kHbm).capacity() == 8);
  CHECK(two.four.store(Medium::kHbm).capacity() == 6);
  const Address first = take_block(two.three, 1);  // units 3 to 5: of the others' blocks 0 and 1
  CHECK(two.four.store(Medium::kHbm).state(0) == BlockState::kOverlapped);
  CHECK(two.four.store(Medium::kHbm).state(1) == BlockState::kOverlapped);
  CHECK(count(two.four, BlockState::kFree) == 4);
  CHECK(free_units(two.space) == kUnits - 3);
  Address none = 0;
  CHECK_FALSE(two.four.take_block(Medium::kHbm, 0, BlockState::kActive, &none));
  two.audit();

  const Address second = take_block(two.three, 2);  // units 6 to 8: of blocks 1 and 2
  two.three.release(&first, 1);
  CHECK(two.four.store(Medium::kHbm).state(0) == BlockState::kFree);
  CHECK(two.four.store(Medium::kHbm).state(1) == BlockState::kOverlapped);
  two.audit();
  two.three.release(&second, 1);
  CHECK(count(two.four, BlockState::kFree) == 6);
  CHECK(free_units(two.space) == kUnits);
  two.audit();
}

TEST_CASE("a cache takes all blocks or none, in a run where possible, and from no other medium") {
  Two two;
  take_block(two.four, 3);  // units 12 to 15: of blocks 4 and 5 of three units
  Addresses seven(7);
  CHECK_FALSE(two.three.take(7, Medium::kHbm, BlockState::kActive, seven.data()));
  CHECK(free_units(two.space) == kUnits - 4);
  const Addresses run = take(two.three, 4, Medium::kHbm);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(block_of(run[i]) == i);
  const Addresses rest = take(two.three, 2, Medium::kHbm);
  CHECK(block_of(rest[0]) == 6);
  CHECK(two.three.store(Medium::kDram).free_count() == 8);
  CHECK(two.four.store(Medium::kDram).free_count() == 6);
  CHECK(free_units(two.space) == 2);  // that is the price of blocks of two sizes
  two.audit();
}

TEST_CASE("a block that is read keeps its units from other caches until the last reader releases it") {
  Two two;
  const Addresses blocks = take(two.four, 6, Medium::kHbm);
  two.four.hold_for_reading(&blocks[2], 1, 0);
  two.four.release(blocks.data(), blocks.size());
  CHECK(count(two.three, BlockState::kOverlapped) == 2);  // units 8 to 11: of blocks 2 and 3
  two.audit();
  two.four.release_reading(&blocks[2], 1);
  CHECK(count(two.three, BlockState::kFree) == 8);
  two.audit();
}

TEST_CASE("no two caches of a space give out the same address, before they join a cluster and after") {
  BlockSpace space(units(kUnits, 0), BlockSpace::kCachesMax);
  std::vector<std::unique_ptr<CacheBlocks>> caches;
  for (std::uint32_t i = 0; i < BlockSpace::kCachesMax; ++i) {
    // All wish for the same generations.
    caches.push_back(std::make_unique<CacheBlocks>(space, CacheShape{.block_units = 2}));
    CHECK(caches.back()->number() == i);
  }
  std::vector<Address> given;
  const auto give_out_all = [&] {
    for (const auto& cache : caches) {
      const Addresses blocks = take(*cache, kUnits / 2, Medium::kHbm);
      cache->release(blocks.data(), blocks.size());
      given.insert(given.end(), blocks.begin(), blocks.end());
    }
  };
  give_out_all();
  give_out_all();
  for (const auto& cache : caches) cache->set_instance(100 + cache->number());
  give_out_all();
  std::sort(given.begin(), given.end());
  CHECK(std::adjacent_find(given.begin(), given.end()) == given.end());
  CHECK(code_of([&] { caches[3]->set_instance(102); }) == ErrorCode::kState);
  CHECK(caches[3]->instance() == 103);

  // An address of one is not the others', whether or not it carries an id.
  const Addresses held = take(*caches[0], 1, Medium::kHbm);
  for (std::uint32_t i = 1; i < caches.size(); ++i) {
    const Address place = held[0] & ((Address{1} << kInstanceShift) - 1);
    CHECK(code_of([&] { caches[i]->check(place, 0, std::nullopt); }) == ErrorCode::kNotOwner);
    CHECK(code_of([&] { caches[i]->check(held[0], 0, std::nullopt); }) == ErrorCode::kNotOwner);
  }
}

TEST_CASE("the generations of a cache end where the next one's begin, and a retired block keeps its units") {
  BlockSpace space(units(4, 0), 2);
  constexpr std::uint32_t kHalf = (kGenerationMax + 1) / 2;
  CacheBlocks low(space, {.block_units = 2, .first_generations = same_for_all_media(kHalf / 2)});
  CacheBlocks high(space, {.block_units = 4});
  auto& store = const_cast<BlockStore&>(low.store(Medium::kHbm));
  store.set_generation_for_test(0, kHalf - 2);
  Address last = take_block(low, 0);
  CHECK(generation_of(last) == kHalf - 2);
  low.release(&last, 1);
  CHECK(store.state(0) == BlockState::kRetired);
  CHECK(code_of([&] { low.check(make_address(0, Medium::kHbm, kHalf - 1, 0), 0, {}); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { low.check(make_address(0, Medium::kHbm, kHalf + 1, 0), 0, {}); }) == ErrorCode::kNotOwner);
  CHECK(generation_of(high.store(Medium::kHbm).address_of(0)) == kHalf + 1);
  CHECK(count(high, BlockState::kOverlapped) == 1);
  CHECK(free_units(space) == 2);
  CHECK(space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kRetired)] == 2);
  low.audit();
  high.audit();
}

TEST_CASE("blocks of a cache that leaves are free if nobody can write or read them, and otherwise lost to the space") {
  BlockSpace space(units(kUnits, 0), 2);
  CacheBlocks stays(space, {.block_units = 3});
  Addresses given;
  {
    CacheBlocks leaves(space, {.block_units = 4});
    given = take(leaves, 5, Medium::kHbm);
    leaves.give({&given[0], 2}, {BlockState::kHistorical, 0, 0});
    leaves.hold_for_reading(&given[1], 1, 0);
    leaves.give({&given[2], 1}, {BlockState::kQuarantined, 7, 0});
    leaves.release(&given[4], 1);
  }
  stays.audit();
  // Blocks 1 (read), 2 (perhaps written) and 3 (the application's) of four units: units 4 to 15.
  CHECK(free_units(space) == kUnits - 12);
  CHECK(space.counts(Medium::kHbm).by_state[static_cast<std::size_t>(BlockState::kRetired)] == 12);
  CHECK(count(stays, BlockState::kFree) == 3);
  CHECK(count(stays, BlockState::kOverlapped) == 5);

  // Another one in its place begins above its generations, and lacks the lost blocks.
  CacheBlocks comes(space, {.block_units = 4});
  CHECK(comes.number() == 1);
  CHECK(count(comes, BlockState::kFree) == 3);
  for (const Address address : take(comes, 3, Medium::kHbm)) {
    for (const Address old : given) CHECK(address != old);
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    CHECK(code_of([&] { comes.check(given[i], i, std::nullopt); }) == ErrorCode::kStaleAddress);
  }
  comes.audit();
}

TEST_CASE("a cache that joins later finds the blocks of others overlapped") {
  BlockSpace space(units(kUnits, 0), 3);
  CacheBlocks first(space, {.block_units = 5});
  const Addresses blocks = take(first, 2, Medium::kHbm);  // units 0 to 9
  CacheBlocks late(space, {.block_units = 4});
  CHECK(count(late, BlockState::kOverlapped) == 3);
  CacheBlocks small(space, {.block_units = 1});
  CHECK(count(small, BlockState::kOverlapped) == 10);
  late.audit();
  first.release(blocks.data(), 1);
  CHECK(count(late, BlockState::kOverlapped) == 2);
  CHECK(count(small, BlockState::kOverlapped) == 5);
  small.audit();
}

TEST_CASE("a space has no more caches than it was made for") {
  CHECK(code_of([] { BlockSpace(units(4, 4), 0); }) == ErrorCode::kArgument);
  CHECK(code_of([] { BlockSpace(units(4, 4), BlockSpace::kCachesMax + 1); }) == ErrorCode::kArgument);
  BlockSpace space(units(4, 4), 2);
  CHECK(code_of([&] { CacheBlocks(space, {.block_units = 0}); }) == ErrorCode::kArgument);
  const CacheBlocks one(space, {});
  std::optional<CacheBlocks> two;
  two.emplace(space, CacheShape{.block_units = 4});
  CHECK(code_of([&] { CacheBlocks(space, {}); }) == ErrorCode::kState);
  two.reset();
  two.emplace(space, CacheShape{.block_units = 2});

  // A space for one cache would not know what the first one left behind.
  BlockSpace own(units(4, 4));
  two.emplace(own, CacheShape{});
  CHECK(code_of([&] { CacheBlocks(own, {}); }) == ErrorCode::kState);
  two.reset();
  CHECK(code_of([&] { CacheBlocks(own, {}); }) == ErrorCode::kState);
}

TEST_CASE("a cache that runs out of memory while it is made frees its place in the space") {
  const int threw = testing::fail_each_allocation([](auto&& fail) {
    BlockSpace space(units(kUnits, kUnits), 2);
    CacheBlocks first(space, {.block_units = 3});
    const Addresses blocks = take(first, 1, Medium::kHbm);
    const bool failed = fail([&] {
      const auto error = error_of([&] { CacheBlocks(space, {.block_units = 4}); });
      if (!error) return;
      CHECK(error->code() == ErrorCode::kOutOfMemory);
      throw std::bad_alloc();
    });
    if (!failed) return;
    first.audit();
    CHECK(free_units(space) == kUnits - 3);
    CacheBlocks second(space, {.block_units = 4});
    CHECK(second.number() == 1);
    CHECK(count(second, BlockState::kOverlapped) == 1);
    second.audit();
  });
  CHECK(threw > 0);
}

TEST_CASE("the audit of a space finds a unit in two blocks, and a free unit of a block in use") {
  const auto audit_of = [](auto&& spoil) {
    Two two;
    take_block(two.three, 1);
    two.audit();
    spoil(two);
    return code_of([&] { two.space.audit(); });
  };
  // Behind the space's back.
  const auto store = [](CacheBlocks& blocks) -> BlockStore& {
    return const_cast<BlockStore&>(blocks.store(Medium::kHbm));
  };
  CHECK(audit_of([&](Two& two) {
          store(two.four).end_overlap(0, 1);
          Address taken = 0;
          store(two.four).take_block(0, BlockState::kActive, &taken);
        }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { store(two.four).end_overlap(0, 1); }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { store(two.four).overlap(4, 1); }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { store(two.three).release(1, 1); }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) {
          Address taken = 0;
          store(two.three).take_block(5, BlockState::kActive, &taken);
        }) == ErrorCode::kAudit);
}

}  // namespace kvpool
