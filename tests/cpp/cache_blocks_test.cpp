// The blocks of one cache in all media, without a pool.
#include "kvpool/blocks/cache_blocks.h"

#include <doctest/doctest.h>

#include <array>
#include <string>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

using Addresses = std::vector<Address>;

// The only cache of its space.
class Blocks {
 public:
  Blocks(std::uint32_t hbm, std::uint32_t dram, bool engine_allocates = false)
      : space_({hbm, dram}), blocks_(space_, {.engine_allocates = engine_allocates}) {}
  CacheBlocks& operator*() { return blocks_; }

 private:
  BlockSpace space_;
  CacheBlocks blocks_;
};

Addresses take(CacheBlocks& space, std::size_t n, MediumChoice choice, BlockState to = BlockState::kActive) {
  Addresses blocks(n);
  REQUIRE(space.take(n, choice, to, blocks.data()));
  return blocks;
}

template <class Call>
ErrorCode code_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  FAIL("nothing was thrown");
  return ErrorCode::kArgument;
}

TEST_CASE("every medium of the list has its blocks, and DISK has none") {
  Blocks kept(3, 5);
  CacheBlocks& space = *kept;
  CHECK(space.capacity(Medium::kHbm) == 3);
  CHECK(space.capacity(Medium::kDram) == 5);
  CHECK(space.capacity(Medium::kDisk) == 0);
  CHECK(space.capacity(kMixed) == 8);
  for (const Medium medium : kMedia) CHECK(space.store(medium).medium() == medium);
  Address out = 0;
  CHECK_FALSE(space.take(1, Medium::kDisk, BlockState::kActive, &out));
  CHECK(out == 0);
  space.audit();
}

TEST_CASE("MIXED is HBM first and the rest DRAM, all or nothing") {
  Blocks kept(3, 5);
  CacheBlocks& space = *kept;
  Addresses none(9);
  CHECK_FALSE(space.take(9, kMixed, BlockState::kActive, none.data()));
  CHECK(space.store(Medium::kHbm).free_count() == 3);
  const Addresses blocks = take(space, 5, kMixed);
  for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(medium_of(blocks[i]) == (i < 3 ? Medium::kHbm : Medium::kDram));
  space.release(blocks.data(), blocks.size());
  CHECK(space.store(Medium::kDram).free_count() == 5);
  space.audit();
}

TEST_CASE("MIXED takes no HBM that an engine allocates itself") {
  Blocks kept(3, 5, true);
  CacheBlocks& space = *kept;
  CHECK(space.capacity(kMixed) == 5);
  CHECK(space.capacity(Medium::kHbm) == 3);
  for (const Address block : take(space, 5, kMixed)) CHECK(medium_of(block) == Medium::kDram);
  Address out = 0;
  CHECK_FALSE(space.take(1, kMixed, BlockState::kActive, &out));
  CHECK(space.store(Medium::kHbm).free_count() == 3);
}

TEST_CASE("the audit finds an engine's block that is cached") {
  Blocks kept(3, 0, true);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 1, Medium::kHbm);
  space.audit();
  space.give(blocks, {BlockState::kLent, 77, 0});  // as the engine may
  space.audit();
  space.give(blocks, {BlockState::kHistorical, 0, 0});
  CHECK(code_of([&] { space.audit(); }) == ErrorCode::kAudit);
}

TEST_CASE("each kind of wrong address has its own error, which names the position") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 2, Medium::kHbm);
  space.check(blocks[0], 0, BlockState::kActive);
  const auto code = [&](Address address) { return code_of([&] { space.check(address, 7, BlockState::kActive); }); };
  CHECK(code(0) == ErrorCode::kArgument);
  for (std::uint32_t spare = 4; spare < 8; ++spare) {
    CHECK(code(make_address(0, static_cast<Medium>(spare), 1, 0)) == ErrorCode::kArgument);
  }
  CHECK(code(make_address(0, Medium::kDisk, 1, 0)) == ErrorCode::kArgument);
  CHECK(code(make_address(0, Medium::kHbm, 1, 4)) == ErrorCode::kArgument);
  CHECK(code(make_address(9, Medium::kHbm, 1, 0)) == ErrorCode::kNotOwner);
  CHECK(code(make_address(0, Medium::kDram, 1, 0)) == ErrorCode::kStaleAddress);  // free
  CHECK(code(blocks[0] + (Address{1} << kGenerationShift)) == ErrorCode::kStaleAddress);
  space.give({&blocks[1], 1}, {BlockState::kLent, 5, 0});
  CHECK(code(blocks[1]) == ErrorCode::kState);
  try {
    space.check(make_address(0, Medium::kDisk, 1, 6), 7, std::nullopt);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("position 7") != std::string::npos);
    CHECK(std::string(error.what()).find("DISK has 0 blocks, and this is block 6") != std::string::npos);
  }
}

TEST_CASE("a block that is twice in a list is refused, even under the id that it had before") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses before = take(space, 2, Medium::kHbm);
  space.set_instance(12);
  CHECK(space.instance() == 12);
  const Address renewed = space.store_of(before[0]).address_of(block_of(before[0]));
  CHECK(instance_of(renewed) == 12);
  CHECK(space.is_local(before[0]));
  CHECK(space.is_local(renewed));
  CHECK_FALSE(space.is_local(make_address(13, Medium::kHbm, 1, 0)));
  const std::array twice{before[0], before[1], renewed};
  CHECK(code_of([&] { space.check_active_and_distinct(twice.data(), twice.size(), false); }) == ErrorCode::kArgument);
  CHECK_FALSE(space.check_active_and_distinct(before.data(), before.size(), false));
}

TEST_CASE("two lists that are checked with one stamp may not share a block") {
  Blocks kept(4, 0);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 3, Medium::kHbm);
  const std::uint64_t stamp = space.new_stamp();
  space.check_distinct(blocks.data(), 2, stamp);
  space.check_distinct(&blocks[2], 1, stamp);
  CHECK(code_of([&] { space.check_distinct(&blocks[1], 1, stamp); }) == ErrorCode::kArgument);
  space.check_distinct(&blocks[1], 1, space.new_stamp());
}

TEST_CASE("a block that is read becomes free when its last reader releases it") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 3, Medium::kDram);
  space.hold_for_reading(blocks.data(), 2, 0);
  space.hold_for_reading(&blocks[1], 1, 0);
  CHECK(code_of([&] { space.check_unread(blocks.data(), 1); }) == ErrorCode::kState);
  space.check_unread(&blocks[2], 1);
  space.release(blocks.data(), blocks.size());
  CHECK(space.store(Medium::kDram).free_count() == 2);
  CHECK(space.store(Medium::kDram).count(BlockState::kReserved) == 2);
  space.audit();
  space.release_reading(blocks.data(), 2);
  CHECK(space.store(Medium::kDram).free_count() == 3);
  space.release_reading(&blocks[1], 1);
  CHECK(space.store(Medium::kDram).free_count() == 4);
  space.audit();
}

TEST_CASE("of an engine's cache, only the engine's own blocks cannot be freed while they are read") {
  for (const bool engine_allocates : {false, true}) {
    Blocks kept(4, 4, engine_allocates);
    CacheBlocks& space = *kept;
    Addresses blocks(2);
    REQUIRE(space.take_block(Medium::kHbm, 1, BlockState::kActive, &blocks[0]));
    REQUIRE(space.take_block(Medium::kDram, 1, BlockState::kActive, &blocks[1]));
    space.hold_for_reading(blocks.data(), 2, 0);
    space.check_freeable(&blocks[1], 1);
    if (engine_allocates) {
      CHECK(code_of([&] { space.check_freeable(blocks.data(), 2); }) == ErrorCode::kState);
    } else {
      space.check_freeable(blocks.data(), 2);
    }
    space.release_reading(blocks.data(), 2);
    space.check_freeable(blocks.data(), 2);
    space.release(blocks.data(), 2);
  }
}

TEST_CASE("if one of several blocks cannot be read, none is held") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 2, Medium::kHbm);
  space.give({&blocks[1], 1}, {BlockState::kLent, 5, 0});
  CHECK(code_of([&] { space.hold_for_reading(blocks.data(), 2, 6); }) == ErrorCode::kNotOwner);
  space.check_unread(blocks.data(), 2);
  space.hold_for_reading(blocks.data(), 2, 5);
  space.release_reading(blocks.data(), 2);
  space.check_unread(blocks.data(), 2);
}

TEST_CASE("a peer that names a block that was recalled is told that it is stale") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 2, Medium::kHbm);
  space.give({&blocks[1], 1}, {BlockState::kQuarantined, 5, 0});
  CHECK(code_of([&] { space.hold_for_reading(blocks.data(), 2, 5); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { space.hold_for_reading(blocks.data(), 2, 0); }) == ErrorCode::kState);
  space.check_unread(blocks.data(), 2);
}

TEST_CASE("a transfer may write blocks that are reserved for it, and not those lent to its owner") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Addresses blocks = take(space, 2, Medium::kHbm, BlockState::kReserved);
  space.give({&blocks[0], 1}, {BlockState::kLent, 5, 0});
  space.give({&blocks[1], 1}, {BlockState::kReserved, 5, 8});
  CHECK(space.owner_of(blocks[1]).incarnation == 5);
  CHECK(space.owner_of(blocks[1]).mark == 8);
  space.check_reserved(&blocks[1], 1, 5, 8);
  const auto code = [&](Address address, std::uint64_t incarnation, std::uint32_t mark) {
    return code_of([&] { space.check_reserved(&address, 1, incarnation, mark); });
  };
  CHECK(code(blocks[0], 5, 0) == ErrorCode::kNotOwner);
  CHECK(code(blocks[0], 5, 8) == ErrorCode::kNotOwner);
  CHECK(code(blocks[1], 6, 8) == ErrorCode::kNotOwner);
  CHECK(code(blocks[1], 5, 9) == ErrorCode::kNotOwner);
  space.accept_instance(7);  // the same block by its other address
  space.check_reserved(&blocks[1], 1, 5, 8);
  const Address later = blocks[1] | Address{7} << kInstanceShift;
  space.check_reserved(&later, 1, 5, 8);
}

TEST_CASE("as_made() gives the address that is given out now, for either address of a block") {
  Blocks kept(4, 4);
  CacheBlocks& space = *kept;
  const Address made = take(space, 1, Medium::kHbm, BlockState::kReserved)[0];
  const Address later = made | Address{7} << kInstanceShift;
  space.accept_instance(7);
  CHECK(space.as_made(made) == made);
  CHECK(space.as_made(later) == made);
  space.set_instance(7);
  CHECK(space.as_made(made) == later);
  CHECK(space.as_made(later) == later);
}

}  // namespace
}  // namespace kvpool
