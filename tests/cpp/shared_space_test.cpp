// Two and more caches with blocks of different sizes in one space.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::code_of;
using testing::error_of;
using testing::text_of;
using Addresses = std::vector<Address>;

constexpr std::uint32_t kUnits = 24;

MediumMap<std::uint32_t> units(std::uint32_t hbm, std::uint32_t dram) { return {hbm, dram}; }

Addresses take(CacheBlocks& blocks, std::size_t n, MediumChoice choice, BlockState to = BlockState::kActive) {
  Addresses taken(n);
  REQUIRE(blocks.take(n, choice, to, taken.data()));
  return taken;
}

std::size_t fit(const CacheBlocks& blocks) { return blocks.free_blocks(Medium::kHbm); }

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

TEST_CASE("a block lies at any unit, and its units are anybody's when it is free again") {
  Two two;
  CHECK(two.three.store(Medium::kHbm).capacity() == 8);
  CHECK(two.three.store(Medium::kHbm).numbers() == 22);
  CHECK(two.four.store(Medium::kHbm).capacity() == 6);
  const Addresses first = take(two.three, 1, Medium::kHbm);
  const Addresses second = take(two.four, 1, Medium::kHbm);
  CHECK(block_of(first[0]) == 0);
  CHECK(block_of(second[0]) == 3);  // its first unit
  CHECK(free_units(two.space) == kUnits - 7);
  CHECK(fit(two.three) == 5);
  CHECK(fit(two.four) == 4);
  CHECK(two.four.displaced(Medium::kHbm) == 1);
  two.audit();

  const Addresses rest = take(two.three, 5, Medium::kHbm);  // units 7 to 21
  CHECK(fit(two.four) == 0);
  two.four.release(second.data(), 1);
  CHECK(block_of(take(two.three, 1, Medium::kHbm)[0]) == 3);
  CHECK(free_units(two.space) == 3);
  two.audit();
  two.three.release(rest.data(), rest.size());
  CHECK(fit(two.four) == 4);  // units 6 to 23
  CHECK(block_of(take(two.four, 1, Medium::kHbm)[0]) == 6);
  two.audit();
}

TEST_CASE("a cache takes all blocks or none, and from no other medium") {
  Two two;
  take(two.four, 1, Medium::kHbm);
  Addresses seven(7);
  CHECK_FALSE(two.three.take(7, Medium::kHbm, BlockState::kActive, seven.data()));
  CHECK(free_units(two.space) == kUnits - 4);
  const Addresses run = take(two.three, 4, Medium::kHbm);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(block_of(run[i]) == 4 + 3 * i);
  take(two.three, 2, Medium::kHbm);
  CHECK(two.three.store(Medium::kDram).free_count() == 8);
  CHECK(two.four.store(Medium::kDram).free_count() == 6);
  CHECK(free_units(two.space) == 2);
  two.audit();
}

TEST_CASE("blocks that do not find a run each are not taken at all, though there are units for them") {
  Two two;
  const Addresses all = take(two.four, 6, Medium::kHbm);
  two.four.release(&all[1], 1);
  two.four.release(&all[3], 1);
  CHECK(free_units(two.space) == 8);
  CHECK(fit(two.three) == 2);
  Addresses three(3);
  CHECK_FALSE(two.three.take(3, Medium::kHbm, BlockState::kActive, three.data()));
  CHECK_FALSE(two.three.take(8 + 3, kMixed, BlockState::kActive, Addresses(11).data()));
  CHECK(free_units(two.space) == 8);
  two.audit();
  CHECK(take(two.three, 2, Medium::kHbm).size() == 2);
  two.audit();
}

TEST_CASE("blocks are given back one by one in any order, also those of one list that lie apart") {
  Two two;
  Addresses mine = take(two.three, 4, Medium::kHbm);
  const Addresses others = take(two.four, 2, Medium::kHbm);
  const Addresses more = take(two.three, 1, Medium::kHbm);
  std::swap(mine[0], mine[3]);
  mine.push_back(more[0]);
  two.three.release(mine.data(), mine.size());
  two.audit();
  CHECK(free_units(two.space) == kUnits - 8);
  two.four.release(others.data(), 2);
  CHECK(two.space.unit_set(Medium::kHbm).longest_free() == kUnits);
  two.audit();
}

TEST_CASE("a block that is read keeps its units from other caches until the last reader releases it") {
  Two two;
  const Addresses blocks = take(two.four, 6, Medium::kHbm);
  two.four.hold_for_reading(&blocks[2], 1, 0);
  two.four.release(blocks.data(), blocks.size());
  CHECK(fit(two.three) == 6);  // two in units 0 to 7, four in 12 to 23
  two.audit();
  two.four.release_reading(&blocks[2], 1);
  CHECK(fit(two.three) == 8);
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
  const Address last = take(low, 1, Medium::kHbm)[0];
  CHECK(generation_of(last) == kHalf - 2);
  low.release(&last, 1);
  CHECK(store.state(0) == BlockState::kRetired);
  CHECK(code_of([&] { low.check(make_address(0, Medium::kHbm, kHalf - 1, 0), 0, {}); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { low.check(make_address(0, Medium::kHbm, kHalf + 1, 0), 0, {}); }) == ErrorCode::kNotOwner);
  CHECK(generation_of(high.store(Medium::kHbm).address_of(0)) == kHalf + 1);
  CHECK(fit(high) == 0);
  CHECK(fit(low) == 1);
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
  CHECK(fit(stays) == 3);  // one in units 0 to 3, two in 16 to 23

  // Another one in its place begins above its generations, and lacks the lost blocks.
  CacheBlocks comes(space, {.block_units = 4});
  CHECK(comes.number() == 1);
  CHECK(fit(comes) == 3);
  for (const Address address : take(comes, 3, Medium::kHbm)) {
    for (const Address old : given) CHECK(address != old);
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    CHECK(code_of([&] { comes.check(given[i], i, std::nullopt); }) == ErrorCode::kStaleAddress);
  }
  comes.audit();
}

TEST_CASE("a cache that joins later finds what others have taken") {
  BlockSpace space(units(kUnits, 0), 3);
  CacheBlocks first(space, {.block_units = 5});
  const Addresses blocks = take(first, 2, Medium::kHbm);  // units 0 to 9
  CacheBlocks late(space, {.block_units = 4});
  CHECK(fit(late) == 3);
  CacheBlocks small(space, {.block_units = 1});
  CHECK(fit(small) == 14);
  late.audit();
  first.release(blocks.data(), 1);
  CHECK(fit(late) == 4);
  CHECK(fit(small) == 19);
  small.audit();
}

TEST_CASE("several caches share no more units than an address can number") {
  constexpr std::uint32_t kMost = kBlocksMax;
  const auto error = error_of([] { BlockSpace(units(0, kMost + 1), 2); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kArgument);
  CHECK_FALSE(error_of([] { BlockSpace(units(0, kMost), 2); }));
  CHECK_FALSE(error_of([] { BlockSpace(units(0, kMost + 1), 1); }));
}

TEST_CASE("an engine allocates no blocks of a space that several caches share") {
  BlockSpace space(MediumMap<std::uint32_t>{8, 8, 0}, 2);
  CHECK(code_of([&] { CacheBlocks(space, {.block_units = 2, .engine_allocates = true}); }) == ErrorCode::kUnsupported);
  const CacheBlocks one(space, {.block_units = 2});
  const CacheBlocks other(space, {.block_units = 3});  // the one that was refused has left no trace
  CHECK_FALSE(one.engine_allocates());
  BlockSpace own(MediumMap<std::uint32_t>{8, 8, 0});
  CHECK(CacheBlocks(own, {.engine_allocates = true}).engine_allocates());
}

TEST_CASE("a cache that leaves gives back blocks between free runs and blocks of others") {
  BlockSpace space(MediumMap<std::uint32_t>{40, 0, 0}, 3);
  CacheBlocks stays(space, {.block_units = 2});
  Addresses twos(2);
  Addresses threes(6);
  {
    CacheBlocks leaves(space, {.block_units = 3});
    const auto take = [](CacheBlocks& blocks, Addresses& all, std::size_t at, std::size_t n) {
      REQUIRE(blocks.take(n, Medium::kHbm, BlockState::kActive, all.data() + at));
    };
    for (std::size_t i = 0; i < 3; ++i) {  // two of three units, then one of two
      take(leaves, threes, 2 * i, 2);
      if (i < 2) take(stays, twos, i, 1);
    }
    // A free run before a cached block, two cached ones side by side, and one between a block in use and a free run.
    leaves.release(threes.data(), 1);
    leaves.give({&threes[1], 1}, {BlockState::kHistorical, 0, 0});
    leaves.give({&threes[2], 2}, {BlockState::kHistorical, 0, 0});
    leaves.give({&threes[5], 1}, {BlockState::kHistorical, 0, 0});
  }
  stays.audit();
  const UnitCounts counts = space.counts(Medium::kHbm);
  CHECK(counts.by_state[static_cast<std::size_t>(BlockState::kFree)] == 40 - 2 * 2 - 3);
  CHECK(counts.by_state[static_cast<std::size_t>(BlockState::kRetired)] == 3);
  CHECK(space.unit_set(Medium::kHbm).free_runs() == 3);
  CacheBlocks next(space, {.block_units = 3});
  Address again = 0;
  REQUIRE(next.take(1, Medium::kHbm, BlockState::kActive, &again));
  for (const Address earlier : threes) CHECK(again != earlier);
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
    CHECK(fit(second) == 5);
    second.audit();
  });
  CHECK(threw > 0);
}

TEST_CASE("the audit of a space finds a block without units, and units of a free block") {
  // What is spoilt is never destroyed: caches that leave a space rely on it.
  static auto* const spoilt = new std::vector<std::unique_ptr<Two>>;
  const auto audit_of = [](auto&& spoil) {
    Two& two = *spoilt->emplace_back(std::make_unique<Two>());
    take(two.three, 2, Medium::kHbm);
    two.audit();
    spoil(two);
    return code_of([&] { two.space.audit(); });
  };
  // Behind the space's back.
  const auto store = [](CacheBlocks& blocks) -> BlockStore& {
    return const_cast<BlockStore&>(blocks.store(Medium::kHbm));
  };
  Address out = 0;
  CHECK(audit_of([](Two&) {}) == std::nullopt);
  CHECK(audit_of([&](Two& two) { store(two.four).place(1, 1, 1, BlockState::kActive, &out); }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { store(two.three).place(9, 1, 1, BlockState::kActive, &out); }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { store(two.three).unplace(3, 3, 1); }) == ErrorCode::kAudit);
  // As many blocks as extents, but not the same ones.
  CHECK(audit_of([&](Two& two) {
          store(two.three).unplace(3, 3, 1);
          store(two.three).place(4, 1, 1, BlockState::kActive, &out);
        }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) {
          auto& units = const_cast<UnitSet&>(two.space.unit_set(Medium::kHbm));
          units.take(4, 1, 0, [](std::uint32_t, std::uint32_t) {});  // four units for a cache of three
        }) == ErrorCode::kAudit);
  CHECK(audit_of([&](Two& two) { const_cast<UnitSet&>(two.space.unit_set(Medium::kHbm)).abandon(0); }) ==
        ErrorCode::kAudit);
}

TEST_CASE("a freed block that is read counts once in the audit, whatever slots no block ever had") {
  for (const bool at_zero : {true, false}) {
    CAPTURE(at_zero);
    BlockSpace space(units(kUnits, 0), 2);
    CacheBlocks one(space, {.block_units = 1});
    CacheBlocks two(space, {.block_units = 2});
    if (!at_zero) take(one, 1, Medium::kHbm);
    const Addresses block = take(two, 1, Medium::kHbm);
    REQUIRE(block_of(block[0]) == (at_zero ? 0 : 1));  // both have the first slot
    two.hold_for_reading(block.data(), 1, 0);
    two.release(block.data(), 1);
    CHECK(error_of([&] { two.audit(); }) == std::nullopt);
    two.release_reading(block.data(), 1);
    CHECK(two.store(Medium::kHbm).free_count() == 12);
    two.audit();
  }
}

TEST_CASE("what is said of a stale address names no generation that is another block's") {
  BlockSpace space(units(kUnits, 0), 2);
  CacheBlocks one(space, {.block_units = 1});
  CacheBlocks two(space, {.block_units = 2});
  const Addresses old = take(two, 1, Medium::kHbm);
  two.release(old.data(), 1);
  CHECK(text_of([&] { two.check(old[0], 0, std::nullopt); }).find("block 0 is at generation") != std::string::npos);
  take(one, 1, Medium::kHbm);
  const Addresses now = take(two, 1, Medium::kHbm);
  REQUIRE(block_of(now[0]) == 1);
  const std::string text = text_of([&] { two.check(old[0], 0, std::nullopt); });
  CHECK(text.find("has no block that begins at unit 0 now") != std::string::npos);
  CHECK(text.find("generation") == std::string::npos);
}

}  // namespace kvpool
