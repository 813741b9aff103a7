// The block store, call by call.
#include "kvpool/blocks/block_store.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "block_store_kit.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"

namespace {

using kvpool::Address;
using kvpool::AddressFault;
using kvpool::block_of;
using kvpool::BlockState;
using kvpool::BlockStore;
using kvpool::Error;
using kvpool::ErrorCode;
using kvpool::generation_of;
using kvpool::instance_of;
using kvpool::kBlocksMax;
using kvpool::kGenerationMax;
using kvpool::kInstanceMax;
using kvpool::make_address;
using kvpool::Medium;
using kvpool::testing::block_store::pieces_of;
using kvpool::testing::block_store::take_blocks;

using kvpool::testing::kSanitized;

}  // namespace

TEST_CASE("a new store is free, with generation 1, in one run") {
  BlockStore store(Medium::kDram, 100);
  CHECK(store.medium() == Medium::kDram);
  CHECK(store.capacity() == 100);
  CHECK(store.free_count() == 100);
  CHECK(store.count(BlockState::kActive) == 0);
  CHECK(store.free_runs().runs == 1);
  CHECK(store.free_runs().longest == 100);
  CHECK(store.generation(0) == 1);
  CHECK(store.generation(99) == 1);
  CHECK(store.instance() == 0);
  const std::vector<Address> all = take_blocks(store, 100);
  for (std::uint32_t block = 0; block < 100; ++block) {
    CHECK(all[block] == make_address(0, Medium::kDram, 1, block));
  }
  store.audit();
}

TEST_CASE("a store without blocks gives none and finds none") {
  BlockStore store(Medium::kHbm, 0);
  Address out = 7;
  CHECK(store.take(0, BlockState::kActive, &out));
  CHECK_FALSE(store.take(1, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(0, BlockState::kActive, &out));
  CHECK(out == 7);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, 0)) == AddressFault::kOutOfRange);
  CHECK(store.free_runs().runs == 0);
  CHECK(store.free_runs().longest == 0);
  store.release(0, 0);
  store.audit();
}

TEST_CASE("a store of one block gives it again and again under new addresses") {
  BlockStore store(Medium::kHbm, 1);
  std::set<Address> seen;
  for (int i = 0; i < 100; ++i) {
    const Address address = take_blocks(store, 1)[0];
    CHECK(seen.insert(address).second);
    CHECK(store.find(address) == AddressFault::kNone);
    store.release(0, 1);
    CHECK(store.find(address) == AddressFault::kStale);
  }
  store.audit();
}

TEST_CASE("sixteen million blocks cost nothing until they are used") {
  const auto resident_bytes = [] {
    std::uint64_t pages_total = 0;
    std::uint64_t pages_resident = 0;
    std::ifstream("/proc/self/statm") >> pages_total >> pages_resident;
    return pages_resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  };
  const std::uint64_t before = resident_bytes();
  BlockStore store(Medium::kDram, kBlocksMax);
  CHECK(store.metadata_bytes() < 16ULL * kBlocksMax + 65536);
  const std::vector<Address> some = take_blocks(store, 256);
  CHECK(pieces_of(some) == 1);
  Address last = 0;
  REQUIRE(store.take_block(kBlocksMax - 1, BlockState::kActive, &last));
  CHECK(block_of(last) == kBlocksMax - 1);
  CHECK(store.find(last) == AddressFault::kNone);
  CHECK(store.free_runs().longest == kBlocksMax - 257);
  if (!kSanitized) CHECK(resident_bytes() - before < 32ULL << 20);  // of 256 MiB; a page may be a huge one
  Address middle = 0;
  REQUIRE(store.take_block(kBlocksMax / 2 + 5, BlockState::kActive, &middle));
  CHECK(store.free_runs().runs == 2);
  store.release(kBlocksMax / 2 + 5, 1);
  store.release(kBlocksMax - 1, 1);
  store.release(0, 256);
  CHECK(store.free_runs().runs == 1);
  CHECK(store.free_runs().longest == kBlocksMax);
  store.audit();
}

TEST_CASE("taking more than is free changes nothing") {
  BlockStore store(Medium::kHbm, 64);
  const std::vector<Address> held = take_blocks(store, 60);
  store.release(10, 3);
  std::vector<Address> out(65, 99);
  for (const std::uint32_t n : {8U, 64U, 65U, 0xffffffffU}) {
    CHECK_FALSE(store.take(n, BlockState::kActive, out.data()));
  }
  CHECK(std::all_of(out.begin(), out.end(), [](Address address) { return address == 99; }));
  CHECK(store.free_count() == 7);
  CHECK(store.count(BlockState::kActive) == 57);
  CHECK(store.free_runs().runs == 2);
  store.audit();
  CHECK(take_blocks(store, 7).size() == 7);
  CHECK(store.free_count() == 0);
  store.audit();
}

TEST_CASE("a request gets one run when one is long enough, and otherwise as few runs as possible") {
  BlockStore store(Medium::kHbm, 1000);
  take_blocks(store, 1000);
  store.release(100, 10);
  store.release(200, 40);
  store.release(300, 25);
  store.release(400, 1);
  CHECK(block_of(take_blocks(store, 1)[0]) == 400);   // a hole, not a piece of a run
  CHECK(block_of(take_blocks(store, 25)[0]) == 300);  // the one that fits
  store.release(300, 25);
  store.release(400, 1);
  const std::vector<Address> mixed = take_blocks(store, 70);
  CHECK(pieces_of(mixed) == 3);
  CHECK(block_of(mixed[0]) == 200);   // 40, the longest
  CHECK(block_of(mixed[40]) == 300);  // 25, the next
  CHECK(block_of(mixed[65]) == 100);  // and 5 of 10
  CHECK(store.free_runs().runs == 2);
  store.audit();
}

TEST_CASE("a block that is asked for by its number is given only while it is free") {
  BlockStore store(Medium::kHbm, 32);
  Address out = 0;
  REQUIRE(store.take_block(7, BlockState::kLent, &out));
  CHECK(out == make_address(0, Medium::kHbm, 1, 7));
  CHECK(store.state(7) == BlockState::kLent);
  CHECK_FALSE(store.take_block(7, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(32, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(0xffffffffU, BlockState::kActive, &out));
  CHECK(store.free_runs().runs == 2);
  store.release(7, 1);
  CHECK(store.free_runs().runs == 1);
  store.audit();
}

TEST_CASE("each kind of bad address has its own fault") {
  BlockStore store(Medium::kHbm, 100);
  store.set_instance(kInstanceMax);
  CHECK(store.instance() == kInstanceMax);
  const Address address = take_blocks(store, 1)[0];
  const std::uint32_t block = block_of(address);
  CHECK(instance_of(address) == kInstanceMax);
  CHECK(store.find(address) == AddressFault::kNone);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, block)) == AddressFault::kNone);  // from before the pool joined
  CHECK(store.find(make_address(5, Medium::kHbm, 1, block)) == AddressFault::kForeign);
  CHECK(store.find(make_address(0, Medium::kDram, 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, Medium::kDisk, 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, static_cast<Medium>(4), 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, static_cast<Medium>(0), 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(0) == AddressFault::kNoMedium);
  CHECK(store.find(~Address{0}) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, 100)) == AddressFault::kOutOfRange);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, kBlocksMax - 1)) == AddressFault::kOutOfRange);
  CHECK(store.find(make_address(0, Medium::kHbm, 0, block)) == AddressFault::kStale);
  CHECK(store.find(make_address(0, Medium::kHbm, 2, block)) == AddressFault::kStale);
  CHECK(store.find(make_address(0, Medium::kHbm, kGenerationMax, block)) == AddressFault::kStale);

  const BlockStore local(Medium::kDram, 100);
  CHECK(local.find(make_address(1, Medium::kDram, 1, 0)) == AddressFault::kForeign);
  CHECK(local.find(make_address(0, Medium::kDram, 1, 0)) == AddressFault::kNone);
}

TEST_CASE("an address is stale as soon as its block is released, and stays so when the block is given again") {
  BlockStore store(Medium::kDram, 8);
  const std::vector<Address> old = take_blocks(store, 8);
  store.release(2, 4);
  for (std::uint32_t i = 0; i < 8; ++i) {
    CHECK(store.find(old[i]) == (i >= 2 && i < 6 ? AddressFault::kStale : AddressFault::kNone));
  }
  const std::vector<Address> fresh = take_blocks(store, 4);
  for (const Address address : fresh) {
    CHECK(store.find(address) == AddressFault::kNone);
    CHECK(generation_of(address) == 2);
    CHECK(store.find(old[block_of(address)]) == AddressFault::kStale);
  }
}

TEST_CASE("tag and mark are zero when a block is given and the owner's until it is released") {
  BlockStore store(Medium::kHbm, 4);
  for (int round = 0; round < 3; ++round) {
    for (const Address address : take_blocks(store, 4)) {
      const std::uint32_t block = block_of(address);
      CHECK(store.tag(block) == 0);
      CHECK(store.mark(block) == 0);
      store.set_tag(block, ~std::uint64_t{0} - block);
      store.set_mark(block, 0x80000000U | block);
      store.set_state(block, BlockState::kHistorical);
      CHECK(store.tag(block) == ~std::uint64_t{0} - block);
      CHECK(store.mark(block) == (0x80000000U | block));
    }
    store.release(1, 2);
    store.release(3, 1);
    store.release(0, 1);
    store.audit();
  }
}

TEST_CASE("states are counted through every change, and a range of mixed states is released at once") {
  BlockStore store(Medium::kHbm, 10);
  take_blocks(store, 10, BlockState::kReserved);
  CHECK(store.count(BlockState::kReserved) == 10);
  store.set_state(3, BlockState::kHistorical);
  store.set_state(4, BlockState::kQuarantined);
  store.set_state(5, BlockState::kActive);
  store.set_state(5, BlockState::kLent);
  CHECK(store.count(BlockState::kReserved) == 7);
  CHECK(store.count(BlockState::kActive) == 0);
  store.audit();
  store.release(0, 10);
  CHECK(store.free_count() == 10);
  CHECK(store.count(BlockState::kReserved) == 0);
  CHECK(store.count(BlockState::kLent) == 0);
  CHECK(store.free_runs().runs == 1);
  store.audit();
}

TEST_CASE("names of states are words") {
  CHECK(std::string(block_state_name(BlockState::kFree)) == "free");
  CHECK(std::string(block_state_name(BlockState::kQuarantined)) == "quarantined");
  CHECK(std::string(block_state_name(BlockState::kRetired)) == "retired");
  CHECK(std::string(block_state_name(static_cast<BlockState>(99))) == "unknown");
}

#ifndef KVPOOL_DEBUG
// With costly checks on, the misuse itself aborts.
TEST_CASE("the audit notices blocks that changed hands behind the store's back") {
  const auto broken = [](const BlockStore& store) {
    try {
      store.audit();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kAudit;
    }
    return false;
  };
  BlockStore store(Medium::kHbm, 16);
  take_blocks(store, 8);
  CHECK_FALSE(broken(store));
  store.set_state(3, BlockState::kFree);
  CHECK(broken(store));
  store.set_state(3, BlockState::kRetired);
  CHECK(broken(store));
  store.set_state(3, BlockState::kActive);
  CHECK_FALSE(broken(store));
  store.set_mark(8, 7);
  CHECK(broken(store));
  store.set_mark(8, 8);
  CHECK_FALSE(broken(store));
  store.set_tag(15, 1);
  CHECK(broken(store));
}
#endif
