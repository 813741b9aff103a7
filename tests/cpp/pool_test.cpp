#include "kvpool/pool/pool.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvpool/base/error.h"
#include "kvpool/pool/peer_claims.h"
#include "pool_counts.h"
#include "pool_fixture.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

TEST_CASE("an allocation of both media takes HBM first and keeps the order") {
  const auto pool = audited_pool(4, 4);
  const Addresses blocks = alloc(*pool, 6, kMixed);
  for (std::size_t i = 0; i < 6; ++i) CHECK(medium_of(blocks[i]) == (i < 4 ? Medium::kHbm : Medium::kDram));
  pool->free(blocks.data(), blocks.size());
  CHECK(hbm_counts(pool->stats()).by_state[0] == 4);
}

TEST_CASE("no pool has blocks on DISK, and a request for one is refused") {
  const auto pool = audited_pool(4, 4);
  Addresses out(1);
  CHECK(pool->capacity(Medium::kDisk) == 0);
  CHECK(code_of([&] { pool->try_alloc(1, Medium::kDisk, out.data()); }) == ErrorCode::kUnsupported);
  CHECK(code_of([&] { pool->alloc_evicting(1, Medium::kDisk, out.data()); }) == ErrorCode::kUnsupported);
  CHECK(code_of([&] { pool->evict(1, Medium::kDisk); }) == ErrorCode::kUnsupported);
  CHECK(code_of([&] {
          pool->for_peers().take(1, Medium::kDisk, BlockState::kLent, 7, 0, /*evict=*/true, out.data());
        }) == ErrorCode::kUnsupported);
  CHECK(pool->audit().media[Medium::kDisk].capacity == 0);
  CHECK(pool->arena(Medium::kDisk)->blocks() == 0);
}

TEST_CASE("an allocation that cannot be met throws with the counts and takes nothing") {
  const auto pool = audited_pool(4, 2);
  const Addresses kept = alloc(*pool, 3);
  Addresses out(4);
  CHECK_FALSE(pool->try_alloc(2, Medium::kHbm, out.data()));
  CHECK(code_of([&] { pool->alloc_evicting(2, Medium::kHbm, out.data()); }) == ErrorCode::kOutOfBlocks);
  CHECK(code_of([&] { pool->alloc_evicting(7, kMixed, out.data()); }) == ErrorCode::kOutOfBlocks);
  CHECK(count_in(hbm_counts(pool->stats()), BlockState::kActive) == 3);
  CHECK(count_in(dram_counts(pool->stats()), BlockState::kFree) == 2);
}

TEST_CASE("free refuses what is stale, cached, foreign, made up or listed twice, and frees nothing then") {
  const auto pool = audited_pool(8, 0);
  const Addresses blocks = alloc(*pool, 4);
  const Held held = insert(pool, prompt(1, 1), {blocks[3]});
  const auto try_free = [&](Address bad) {
    const Addresses list = {blocks[0], blocks[1], bad};
    return code_of([&] { pool->free(list.data(), list.size()); });
  };
  CHECK(try_free(blocks[3]) == ErrorCode::kState);
  CHECK(try_free(blocks[0]) == ErrorCode::kArgument);
  CHECK(try_free(make_address(7, Medium::kHbm, 1, 0)) == ErrorCode::kNotOwner);
  CHECK(try_free(make_address(0, Medium::kHbm, 1, 4000)) == ErrorCode::kArgument);
  CHECK(try_free(0) == ErrorCode::kArgument);
  CHECK(try_free(blocks[0] + 7) == ErrorCode::kStaleAddress);                     // never allocated
  CHECK(try_free(alloc(*audited_pool(8, 0), 1)[0]) == ErrorCode::kStaleAddress);  // another pool's
  CHECK(count_in(hbm_counts(pool->stats()), BlockState::kActive) == 3);
  pool->free(blocks.data(), 3);
  CHECK(try_free(blocks[2]) == ErrorCode::kStaleAddress);
}

TEST_CASE("a duplicate stays with the caller, or is freed if the caller asks for it") {
  const auto pool = audited_pool(8, 0);
  const Addresses first = alloc(*pool, 2);
  const Addresses second = alloc(*pool, 2);
  const Held stored = insert(pool, prompt(1, 2), first);
  const Held again = insert(pool, prompt(1, 2), second);
  CHECK(again.outcome.inserted == 0);
  CHECK(again.outcome.duplicates == second);
  CHECK(again.canonical == first);
  CHECK(count_in(hbm_counts(pool->stats()), BlockState::kActive) == 2);
  const Held freed = insert(pool, prompt(1, 2), second, "", /*free_duplicates=*/true);
  CHECK(count_in(hbm_counts(pool->stats()), BlockState::kActive) == 0);
}

TEST_CASE("a matched prefix can be inserted again with the pages behind it") {
  const auto pool = audited_pool(8, 0);
  insert(pool, prompt(1, 2), alloc(*pool, 2));
  const Found found = match(pool, prompt(1, 3));
  REQUIRE(found.hit.pages == 2);
  Addresses whole = found.addresses;
  whole.push_back(alloc(*pool, 1)[0]);
  const Held held = insert(pool, prompt(1, 3), whole);
  CHECK(held.outcome.inserted == 1);
  CHECK(held.outcome.duplicates.empty());
  CHECK(held.canonical == whole);
}

TEST_CASE("a cached block cannot be inserted as another page") {
  const auto pool = audited_pool(8, 0);
  const Addresses blocks = alloc(*pool, 2);
  insert(pool, prompt(1, 2), blocks);
  CHECK(code_of([&] { insert(pool, prompt(2, 2), blocks); }) == ErrorCode::kState);
  CHECK(code_of([&] { insert(pool, prompt(1, 2), {blocks[1], blocks[0]}); }) == ErrorCode::kState);
}

TEST_CASE("a batch of insertions is all or nothing") {
  const auto pool = audited_pool(8, 0);
  const Addresses blocks = alloc(*pool, 3);
  const Tokens good = prompt(1, 2);
  const Tokens bad = prompt(2, 1);
  Addresses canonical(3);
  const InsertItem items[] = {{good.data(), good.size(), blocks.data(), 2, canonical.data()},
                              {bad.data(), bad.size(), blocks.data() + 1, 1, canonical.data() + 2}};
  CHECK(code_of([&] { pool->insert("", items, false); }) == ErrorCode::kArgument);  // a block in both
  CHECK(match(pool, good).hit.pages == 0);
  CHECK(count_in(hbm_counts(pool->stats()), BlockState::kActive) == 3);
}

TEST_CASE("allocation moves the coldest prompts to DRAM and drops the coldest of DRAM, bytes intact") {
  const auto pool = audited_pool(4, 4);
  for (Token id = 1; id <= 3; ++id) {
    const Addresses blocks = alloc(*pool, 4);
    for (std::size_t i = 0; i < 4; ++i) stamp(*pool, blocks[i], static_cast<std::uint64_t>(id) * 10 + i);
    insert(pool, prompt(id, 4), blocks);
  }
  CHECK(match(pool, prompt(1, 4)).hit.pages == 0);  // dropped
  const Found second = match(pool, prompt(2, 4));   // moved
  REQUIRE(second.hit.pages == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(medium_of(second.addresses[i]) == Medium::kDram);
    CHECK(has_stamp(*pool, second.addresses[i], 20 + i));
  }
  CHECK(medium_of(match(pool, prompt(3, 4)).addresses[0]) == Medium::kHbm);
}

TEST_CASE("a pinned prompt is neither evicted, moved nor deleted") {
  const auto pool = audited_pool(4, 4);
  insert(pool, prompt(1, 4), alloc(*pool, 4));
  Found held = match(pool, prompt(1, 2));
  Addresses out(4);
  CHECK(code_of([&] { pool->alloc_evicting(3, Medium::kHbm, out.data()); }) == ErrorCode::kOutOfBlocks);
  CHECK(pool->swap_out(4).size() == 2);  // the blocks that the match did not cover
  const Tokens tokens = prompt(1, 4);
  CHECK(code_of([&] { pool->erase("", tokens.data(), tokens.size(), true); }) == ErrorCode::kState);
  held.pins.release();
  CHECK(pool->erase("", tokens.data(), tokens.size(), true) == 4);
}

TEST_CASE("addresses on other instances are kept as they are and hold no memory here") {
  const auto pool = audited_pool(4, 0);
  const Addresses remote = {make_address(5, Medium::kDram, 3, 11), make_address(6, Medium::kHbm, 1, 2)};
  {
    const Held held = insert(pool, prompt(1, 2), remote);
  }
  CHECK(match(pool, prompt(1, 2)).addresses == remote);
  CHECK(count_in(hbm_counts(pool->audit()), BlockState::kFree) == 4);
}

TEST_CASE("a prompt that was used in DRAM outlives one that was moved there later and not used since") {
  const auto pool = audited_pool(1, 2);
  for (Token id = 1; id <= 3; ++id) insert(pool, prompt(id, 1), alloc(*pool, 1));
  // 1 and 2 are in DRAM, 3 in HBM. 1 is used; then room is made for a fourth: of DRAM, 2 is the coldest.
  REQUIRE(medium_of(match(pool, prompt(1, 1)).addresses[0]) == Medium::kDram);
  insert(pool, prompt(4, 1), alloc(*pool, 1));
  CHECK(match(pool, prompt(2, 1)).hit.pages == 0);
  REQUIRE(match(pool, prompt(1, 1)).hit.pages == 1);
  // 3 came to DRAM after that use of 1, but its own last use is older.
  alloc(*pool, 1);
  CHECK(match(pool, prompt(3, 1)).hit.pages == 0);
  CHECK(match(pool, prompt(1, 1)).hit.pages == 1);
}

TEST_CASE("deleting a partly cached prompt leaves its siblings alone") {
  const auto pool = audited_pool(8, 0);
  for (Token id = 2; id <= 3; ++id) {
    Tokens tokens = prompt(1, 1);
    const Tokens tail = prompt(id, 1);
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    const Found found = match(pool, tokens);
    Addresses blocks = found.addresses;
    const Addresses fresh = alloc(*pool, 2 - blocks.size());
    blocks.insert(blocks.end(), fresh.begin(), fresh.end());
    insert(pool, tokens, blocks);
  }
  Tokens other = prompt(1, 1);
  const Tokens tail = prompt(9, 1);
  other.insert(other.end(), tail.begin(), tail.end());
  CHECK(pool->erase("", other.data(), other.size(), true) == 0);
  CHECK(pool->erase("", other.data(), kPage, true) == 3);
}

TEST_CASE("a pool with LFU and one with FIFO choose other victims than LRU") {
  for (const auto policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo}) {
    PoolOptions options = small_options(3, 0);
    options.policy = policy;
    const auto pool = std::make_shared<Pool>(options);
    for (Token id = 1; id <= 3; ++id) insert(pool, prompt(id, 1), alloc(*pool, 1));
    match(pool, prompt(1, 1));
    match(pool, prompt(1, 1));
    match(pool, prompt(2, 1));
    match(pool, prompt(3, 1));
    match(pool, prompt(2, 1));
    // Last uses: 1, 3, 2. Uses: 1 twice, 2 twice, 3 once. Insertions: 1, 2, 3.
    alloc(*pool, 1);
    const Token expected = policy == EvictionPolicy::kLfu ? 3 : 1;
    CHECK(match(pool, prompt(expected, 1)).hit.pages == 0);
    pool->audit();
  }
}

TEST_CASE("adopted memory: states follow the engine's calls, and its blocks are never cached") {
  std::vector<std::byte> memory(4 * 128);
  PoolOptions options = small_options(0, 4);
  options.audit = true;
  AdoptedMemory adopted;
  adopted.blocks = 4;
  adopted.segments = {{memory.data(), 128, 64}, {memory.data() + 64, 128, 64}};
  options.adopted_hbm = adopted;
  options.engine_allocates = true;
  const auto pool = std::make_shared<Pool>(options);
  Addresses out(2);
  CHECK(code_of([&] { pool->try_alloc(1, Medium::kHbm, out.data()); }) == ErrorCode::kState);
  const std::uint32_t ids[] = {3, 1};
  pool->adopt(ids, 2, out.data());
  CHECK(block_of(out[0]) == 3);
  CHECK(code_of([&] {
          Addresses again(2);
          pool->adopt(ids, 2, again.data());
        }) == ErrorCode::kState);

  // The engine may use its blocks again at any moment: no match may ever find them.
  const auto audited = pool->audit();
  CHECK(code_of([&] { insert(pool, prompt(1, 2), out); }) == ErrorCode::kState);
  CHECK(code_of([&] { pool->swap_out(2); }) == ErrorCode::kState);
  CHECK(code_of([&] { pool->begin_swap_out(2); }) == ErrorCode::kState);
  Addresses cached(2);
  REQUIRE(pool->try_alloc(2, Medium::kDram, cached.data()));
  Addresses mixed = {cached[0], out[1]};
  CHECK(code_of([&] { insert(pool, prompt(1, 2), mixed); }) == ErrorCode::kState);
  CHECK(pool->audit().media[Medium::kHbm].by_state == audited.media[Medium::kHbm].by_state);
  CHECK(match(pool, prompt(1, 2)).hit.pages == 0);

  // Cached blocks of the pool do not move into the engine's.
  insert(pool, prompt(1, 2), cached);
  Found cold = match(pool, prompt(1, 2));
  REQUIRE(cold.addresses == cached);
  Addresses hot(2);
  CHECK(code_of([&] { Pins none(pool, pool->swap_in(cold.addresses, out, hot.data())); }) == ErrorCode::kState);
  CHECK(code_of([&] { Pins none(pool, pool->swap_in(cold.addresses, {}, hot.data())); }) == ErrorCode::kState);
  CHECK(pool->audit().media[Medium::kHbm].by_state == audited.media[Medium::kHbm].by_state);

  // Given back, an address names nothing any more, though the block is the engine's again.
  pool->free(out.data(), 2);
  Addresses again(2);
  pool->adopt(ids, 2, again.data());
  CHECK(code_of([&] { pool->for_peers().hold_for_reading(out.data(), 1, 0); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { pool->free(out.data(), 1); }) == ErrorCode::kStaleAddress);
  pool->for_peers().hold_for_reading(again.data(), 2, 0);
  CHECK(code_of([&] { pool->free(again.data(), 2); }) == ErrorCode::kState);
  pool->for_peers().release_reading(again.data(), 2);
  pool->free(again.data(), 2);
}

TEST_CASE("a closed pool refuses every verb, and its pins can still be released") {
  const auto pool = audited_pool(4, 0);
  Held held = insert(pool, prompt(1, 2), alloc(*pool, 2));
  const auto arena = pool->arena(Medium::kHbm);
  pool->close();
  pool->close();
  Addresses out(1);
  CHECK(code_of([&] { pool->try_alloc(1, Medium::kHbm, out.data()); }) == ErrorCode::kClosed);
  CHECK(code_of([&] { pool->stats(); }) == ErrorCode::kClosed);
  CHECK(code_of([&] { pool->free(held.canonical.data(), 1); }) == ErrorCode::kClosed);
  held.pins.release();
  *arena->segments()[0].base = std::byte{1};  // a view outlives the pool
}

TEST_CASE("in a forked child every verb throws and teardown leaves the parent alone") {
  auto pool = audited_pool(4, 0);
  auto held = std::make_unique<Held>(insert(pool, prompt(1, 2), alloc(*pool, 2)));
  const pid_t child = fork();
  if (child == 0) {
    Addresses out(1);
    bool fine = false;
    try {
      pool->try_alloc(1, Medium::kHbm, out.data());
    } catch (const Error& error) {
      fine = error.code() == ErrorCode::kFork;
    }
    held.reset();
    pool.reset();
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(match(pool, prompt(1, 2)).hit.pages == 2);
  pool->audit();
}

TEST_CASE("blocks are zeroed on request") {
  PoolOptions options = small_options(2, 2);
  options.zero_on_alloc = true;
  Pool pool(options);
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    Addresses blocks = alloc(pool, 2, medium);
    for (const Address block : blocks) stamp(pool, block, 9);
    pool.free(blocks.data(), 2);
    blocks = alloc(pool, 2, medium);
    for (const Address block : blocks) CHECK(has_stamp(pool, block, 0));
  }
}
