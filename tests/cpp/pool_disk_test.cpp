// Blocks on disk as a medium of a pool, over files in memory that fail when they are told to.
#include <doctest/doctest.h>
#include <errno.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "kvpool/base/clock.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/pool.h"
#include "pool_fixture.h"
#include "power_disk.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::int64_t kSoon = 10'000'000'000;

PoolOptions disk_options_of(const std::shared_ptr<PowerDisk>& files, std::uint32_t dram, std::uint32_t slots,
                            std::uint32_t hbm = 0) {
  PoolOptions options = small_options(hbm, dram);
  options.audit = true;
  options.disk.emplace();
  options.disk->path = "(memory)";
  options.disk->blocks = slots;
  options.disk->directory = files;
  return options;
}

std::shared_ptr<Pool> open(const std::shared_ptr<PowerDisk>& files, std::uint32_t dram = 8, std::uint32_t slots = 32,
                           std::uint32_t hbm = 0) {
  return std::make_shared<Pool>(disk_options_of(files, dram, slots, hbm));
}

void flush(Pool& pool, bool everything = true) { pool.flush_disk(everything, monotonic_ns() + kSoon); }

// Block i of the prompt has the stamp `first` + i.
void store(const std::shared_ptr<Pool>& pool, const Tokens& tokens, std::uint64_t first) {
  const Addresses blocks = alloc(*pool, tokens.size() / kPage, Medium::kDram);
  for (std::size_t i = 0; i < blocks.size(); ++i) stamp(*pool, blocks[i], first + i);
  insert(pool, tokens, blocks);
}

// On DISK alone.
void store_on_disk(const std::shared_ptr<Pool>& pool, const Tokens& tokens, std::uint64_t first) {
  store(pool, tokens, first);
  flush(*pool);
  pool->evict(64, Medium::kDram);
}

// How many pages of a prompt come to DRAM with their stamps.
std::size_t brought(const std::shared_ptr<Pool>& pool, const Tokens& tokens, std::uint64_t first) {
  const Found found = match(pool, tokens);
  Addresses here(found.addresses.size());
  const Pins held(pool, pool->bring(found.addresses, here.data()));
  for (std::size_t i = 0; i < here.size(); ++i) {
    CHECK(medium_of(here[i]) != Medium::kDisk);
    CHECK(has_stamp(*pool, here[i], first + i));
  }
  return here.size();
}

const MediumCounts& disk(const PoolStats& stats) { return stats.media[Medium::kDisk]; }

std::uint32_t cached(const PoolStats& stats) {
  return disk(stats).by_state[static_cast<std::size_t>(BlockState::kHistorical)];
}

}  // namespace

TEST_CASE("a page that was written is found on disk when it is evicted, and comes back with its content") {
  const auto pool = open(std::make_shared<PowerDisk>());
  store_on_disk(pool, prompt(1, 4), 10);
  const Found found = match(pool, prompt(1, 4));
  REQUIRE(found.hit.pages == 4);
  for (const Address address : found.addresses) CHECK(medium_of(address) == Medium::kDisk);
  CHECK(brought(pool, prompt(1, 4), 10) == 4);
  CHECK(pool->audit().counters.brought_blocks == 4);
}

TEST_CASE("pages that go to HBM and back keep their copies on disk") {
  const auto pool = open(std::make_shared<PowerDisk>(), 8, 32, 4);
  store_on_disk(pool, prompt(1, 3), 10);
  for (int round = 0; round < 2; ++round) {
    {
      const Found found = match(pool, prompt(1, 3));
      Addresses here(3);
      const Pins held(pool, pool->swap_in(found.addresses, {}, here.data()));
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(medium_of(here[i]) == Medium::kHbm);
        CHECK(has_stamp(*pool, here[i], 10 + i));
      }
      CHECK(disk(pool->audit()).copies == 3);
    }
    CHECK(pool->swap_out(3).size() == 3);
    pool->evict(64, Medium::kDram);
  }
  CHECK(pool->audit().counters.disk_written_blocks == 3);
  CHECK(disk(pool->audit()).copies == 0);
}

TEST_CASE("a page whose write failed is not on disk, nor is what continues it, and the pool goes on without a disk") {
  const auto files = std::make_shared<PowerDisk>();
  std::atomic<bool> fails = false;
  files->fault = [&](PowerDisk::Call call, const std::string&) {
    return fails && call == PowerDisk::Call::kWrite ? ENOSPC : 0;
  };
  const auto pool = open(files);
  store_on_disk(pool, prompt(1, 3), 10);
  store(pool, prompt(2, 3), 20);
  fails = true;
  CHECK(code_of([&] { flush(*pool); }) == ErrorCode::kStoreFailed);
  const DiskTierStats stats = pool->disk_stats();
  CHECK_FALSE(stats.health.on);
  CHECK(stats.health.error == ENOSPC);
  CHECK(cached(pool->audit()) == 0);
  CHECK(match(pool, prompt(1, 3)).hit.pages == 0);
  CHECK(brought(pool, prompt(2, 3), 20) == 3);
  CHECK(code_of([&] { flush(*pool); }) == ErrorCode::kStoreFailed);
  pool->evict(64, Medium::kDram);
  CHECK(match(pool, prompt(2, 3)).hit.pages == 0);
}

TEST_CASE("a page that the drive cannot read is lost, also for the next pool, and the rest on disk stays") {
  const auto files = std::make_shared<PowerDisk>();
  std::atomic<bool> fails = false;
  files->fault = [&](PowerDisk::Call call, const std::string&) {
    return fails && call == PowerDisk::Call::kRead ? EIO : 0;
  };
  auto pool = open(files);
  store_on_disk(pool, prompt(1, 3), 10);
  store_on_disk(pool, prompt(2, 2), 20);
  fails = true;
  {
    const Found found = match(pool, prompt(1, 3));
    Addresses here(3);
    const auto error = error_of([&] { Pins(pool, pool->bring(found.addresses, here.data())); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kStaleAddress);
    CHECK(error->cause() == ErrorCause::kLostOnDisk);
  }
  fails = false;
  CHECK(pool->disk_stats().health.on);
  CHECK(match(pool, prompt(1, 3)).hit.pages == 0);
  CHECK(brought(pool, prompt(2, 2), 20) == 2);
  flush(*pool);  // what was erased
  pool->audit();
  pool.reset();
  pool = open(files);
  CHECK(match(pool, prompt(1, 3)).hit.pages == 0);
  CHECK(brought(pool, prompt(2, 2), 20) == 2);
}

TEST_CASE("reads that fail again and again end with the error of the store, and nothing on disk is cached any more") {
  const auto files = std::make_shared<PowerDisk>();
  std::atomic<bool> fails = false;
  files->fault = [&](PowerDisk::Call call, const std::string&) {
    return fails && call == PowerDisk::Call::kRead ? EIO : 0;
  };
  const auto pool = open(files);
  constexpr int kErrors = 8;
  for (int i = 1; i < kErrors; ++i) store_on_disk(pool, prompt(10 + i, 1), 10);
  store_on_disk(pool, prompt(1, 3), 10);
  fails = true;
  for (int i = 1; i < kErrors; ++i) {
    const Found found = match(pool, prompt(10 + i, 1));
    Addresses here(1);
    CHECK(code_of([&] { Pins(pool, pool->bring(found.addresses, here.data())); }) == ErrorCode::kStaleAddress);
  }
  {
    const Found found = match(pool, prompt(1, 3));
    Addresses here(3);
    const auto error = error_of([&] { Pins(pool, pool->bring(found.addresses, here.data())); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kStoreFailed);
    CHECK(error->cause() == ErrorCause::kLostOnDisk);
    CHECK(match(pool, prompt(1, 3)).hit.pages == 0);
  }
  const PoolStats stats = pool->audit();
  CHECK(cached(stats) == 0);
  CHECK(stats.media[Medium::kDram].free_runs.longest == 8);
}

TEST_CASE("an allocation does not wait for a drive that hangs, nor do matches") {
  const auto files = std::make_shared<PowerDisk>();
  const auto pool = open(files, 4);
  std::atomic<bool> hangs{true};
  std::atomic<bool> hung{false};
  files->fault = [&](PowerDisk::Call call, const std::string&) {
    if (call != PowerDisk::Call::kWrite) return 0;
    hung = true;
    while (hangs) std::this_thread::yield();
    return 0;
  };
  store(pool, prompt(1, 4), 10);
  CHECK(match(pool, prompt(1, 4)).hit.pages == 4);  // the second use
  while (!hung) std::this_thread::yield();
  const Addresses all = alloc(*pool, 4, Medium::kDram);
  CHECK(match(pool, prompt(1, 4)).hit.pages == 0);
  pool->free(all.data(), all.size());
  hangs = false;
  flush(*pool);
  CHECK(cached(pool->audit()) == 0);
}

TEST_CASE("after a kill at any moment every page that is found has its content, from the first one on") {
  const auto files = std::make_shared<PowerDisk>();
  std::vector<std::shared_ptr<PowerDisk>> killed;
  std::atomic<int> changes{0};
  {
    const auto pool = open(files, 8, 6);
    files->changed = [&] {
      if (++changes % 3 == 0 && killed.size() < 60) killed.push_back(files->after_kill());
    };
    for (Token id = 1; id <= 5; ++id) {
      store_on_disk(pool, prompt(id, 3), static_cast<std::uint64_t>(10 * id));
      if (id == 3) pool->erase("", prompt(2, 3).data(), 3 * kPage, true);
    }
    flush(*pool);
    files->changed = nullptr;
    killed.push_back(files->after_kill());
  }
  REQUIRE(killed.size() > 5);
  for (const auto& left : killed) {
    const auto pool = open(left, 8, 6);
    for (Token id = 1; id <= 5; ++id) brought(pool, prompt(id, 3), static_cast<std::uint64_t>(10 * id));
    pool->audit();
  }
  const auto last = open(killed.back(), 8, 6);
  CHECK(brought(last, prompt(5, 3), 50) == 3);
  CHECK(match(last, prompt(2, 3)).hit.pages == 0);
}

TEST_CASE("prompts that are written together, and those with a common beginning, are found with their content") {
  const auto files = std::make_shared<PowerDisk>();
  const auto pool = open(files, 16, 32);
  store(pool, prompt(1, 4), 10);
  Tokens other = prompt(1, 4);
  other.back() += 7;
  const Found begin = match(pool, prompt(1, 3));
  Addresses blocks = begin.addresses;
  blocks.push_back(alloc(*pool, 1, Medium::kDram).front());
  stamp(*pool, blocks.back(), 99);
  insert(pool, other, blocks);
  store(pool, prompt(2, 2), 20);
  flush(*pool);
  const PoolStats stats = pool->audit();
  CHECK(stats.counters.disk_written_blocks == 7);
  CHECK(pool->disk_stats().store.blocks_written == 7);
  const auto next = open(files->after_kill(), 16, 32);
  CHECK(brought(next, prompt(1, 4), 10) == 4);
  CHECK(brought(next, prompt(2, 2), 20) == 2);
  CHECK(match(next, other).hit.pages == 4);
}

TEST_CASE("a namespace that is too long for an entry keeps its prompts off the disk, and no others") {
  const auto pool = open(std::make_shared<PowerDisk>());
  const Addresses blocks = alloc(*pool, 1, Medium::kDram);
  insert(pool, prompt(1, 1), blocks, std::string(kDiskMetaBytesMax, 'n'));
  store(pool, prompt(2, 2), 20);
  flush(*pool);
  CHECK(pool->audit().counters.disk_written_blocks == 2);
}

TEST_CASE("a damaged block leaves the index with what continues it, and what is before it is served") {
  const auto files = std::make_shared<PowerDisk>();
  const auto pool = open(files);
  store_on_disk(pool, prompt(1, 4), 10);
  {
    const Found found = match(pool, prompt(1, 4));
    const std::size_t slot = block_of(found.addresses[2]);
    files->bytes_of("kvpool.blocks")[kDiskAlignment * (1 + slot) + 5] ^= std::byte{1};
    Addresses here(4);
    const auto error = error_of([&] { Pins(pool, pool->bring(found.addresses, here.data())); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kStaleAddress);
    CHECK(error->cause() == ErrorCause::kLostOnDisk);
  }
  CHECK(brought(pool, prompt(1, 4), 10) == 2);
  CHECK(pool->audit().counters.lost_disk_blocks == 1);
  CHECK(pool->disk_stats().store.corrupt == 1);
}

TEST_CASE("what is forgotten while it is pinned is not there after a restart") {
  const auto files = std::make_shared<PowerDisk>();
  const auto pool = open(files);
  store(pool, prompt(1, 3), 10);
  flush(*pool);
  const Found held = match(pool, prompt(1, 3));
  CHECK(pool->forget(std::span(held.addresses).subspan(1)) == 2);
  flush(*pool);
  const auto next = open(files->after_kill());
  CHECK(match(next, prompt(1, 3)).hit.pages == 1);
  CHECK(brought(next, prompt(1, 3), 10) == 1);
}

TEST_CASE("the budget counts what is flushed as well as what is written in the background") {
  PoolOptions options = disk_options_of(std::make_shared<PowerDisk>(), 8, 32);
  options.disk->bytes_day = 3 * options.layout.block_bytes();
  const auto pool = std::make_shared<Pool>(options);
  store(pool, prompt(1, 3), 10);
  flush(*pool);
  CHECK(pool->disk_stats().bytes_today == 3 * kDiskAlignment);  // a block is smaller than what it takes
  store(pool, prompt(2, 3), 20);
  CHECK(code_of([&] { pool->flush_disk(true, monotonic_ns() + 30'000'000); }) == ErrorCode::kDeadline);
  CHECK(pool->audit().counters.disk_written_blocks == 3);
}

TEST_CASE("a write makes room on disk with nothing that lies in memory, nor with what that continues") {
  for (const bool other_first : {false, true}) {
    CAPTURE(other_first);
    const auto pool = open(std::make_shared<PowerDisk>(), 16, 4);
    store_on_disk(pool, prompt(1, 2), 10);
    if (other_first) store(pool, prompt(2, 4), 20);
    {
      const Found begin = match(pool, prompt(1, 2));
      Addresses blocks = begin.addresses;
      REQUIRE(blocks.size() == 2);
      for (const Address address : alloc(*pool, 2, Medium::kDram)) {
        stamp(*pool, address, 10 + blocks.size());
        blocks.push_back(address);
      }
      insert(pool, prompt(1, 4), blocks);
    }
    if (!other_first) store(pool, prompt(2, 4), 20);
    flush(*pool);
    CHECK(brought(pool, prompt(1, 4), 10) == 4);
    CHECK(brought(pool, prompt(2, 4), 20) == 4);
    pool->audit();
  }
}

TEST_CASE("a disk that is smaller than what memory caches takes what is hotter") {
  const auto pool = open(std::make_shared<PowerDisk>(), 16, 4);
  store(pool, prompt(1, 4), 10);
  flush(*pool);
  store(pool, prompt(2, 3), 20);
  flush(*pool);
  CHECK(disk(pool->audit()).copies == 4);
  CHECK(pool->audit().counters.disk_written_blocks == 7);
  pool->evict(64, Medium::kDram);
  CHECK(brought(pool, prompt(1, 4), 10) == 1);  // the last pages went
  CHECK(brought(pool, prompt(2, 3), 20) == 3);
}

TEST_CASE("blocks that are filled after their insertion are written when everything is admitted") {
  PoolOptions options = disk_options_of(std::make_shared<PowerDisk>(), 8, 32);
  options.disk->admission = DiskAdmission::kAlways;
  const auto pool = std::make_shared<Pool>(options);
  const Tokens tokens = prompt(1, 3);
  const Addresses blocks = alloc(*pool, 3, Medium::kDram);
  Addresses canonical(3);
  const InsertItem item{tokens.data(), tokens.size(), blocks.data(), blocks.size(), canonical.data()};
  const Pins held(pool, pool->insert_unfilled("", item, false).pin);
  flush(*pool, /*everything=*/false);
  CHECK(pool->audit().counters.disk_written_blocks == 0);
  for (std::size_t i = 0; i < 3; ++i) stamp(*pool, blocks[i], 10 + i);
  pool->filled(canonical);
  flush(*pool, /*everything=*/false);
  CHECK(pool->audit().counters.disk_written_blocks == 3);
}

TEST_CASE("a page on disk that is computed again lies in its new block, and keeps its slot") {
  const auto pool = open(std::make_shared<PowerDisk>());
  store_on_disk(pool, prompt(1, 4), 10);
  const Found before = match(pool, prompt(1, 4));
  Addresses blocks = alloc(*pool, 4, Medium::kDram);
  for (std::size_t i = 0; i < 4; ++i) stamp(*pool, blocks[i], 10 + i);
  pool->free(&blocks[1], 1);
  blocks[1] = before.addresses[1];  // of this one the caller has no other
  {
    const Held held = insert(pool, prompt(1, 4), blocks);
    CHECK(held.canonical == blocks);
    CHECK(held.outcome.duplicates.empty());
    CHECK(held.outcome.inserted == 0);
  }
  CHECK(disk(pool->audit()).copies == 3);
  CHECK(match(pool, prompt(1, 4)).addresses == blocks);
  Addresses here(4);
  {
    const Pins held(pool, pool->bring(before.addresses, here.data()));
    for (std::size_t i = 0; i < 4; ++i) CHECK(has_stamp(*pool, here[i], 10 + i));
  }
  CHECK(pool->audit().counters.brought_blocks == 1);
  CHECK(pool->audit().counters.disk_written_blocks == 4);
}

TEST_CASE("a page that moves while it is written has its copy, and one that goes has none") {
  const auto files = std::make_shared<PowerDisk>();
  const auto pool = open(files, 8, 32, 4);
  std::atomic<bool> held_up{true};
  std::atomic<bool> writing{false};
  files->fault = [&](PowerDisk::Call call, const std::string&) {
    if (call != PowerDisk::Call::kWrite) return 0;
    writing = true;
    while (held_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  };
  bool stays = true;
  bool comes_back = true;
  SUBCASE("it moves to HBM") { comes_back = false; }
  SUBCASE("it moves to HBM and back") {}
  SUBCASE("it goes") { stays = false; }
  store(pool, prompt(1, 3), 10);
  {
    const Found found = match(pool, prompt(1, 3));
    while (!writing) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Addresses here(3);
    if (stays) const Pins pins(pool, pool->swap_in(found.addresses, {}, here.data()));
  }
  if (stays && comes_back) pool->swap_out(3);
  if (!stays) pool->evict(64, Medium::kDram);
  held_up = false;
  flush(*pool, /*everything=*/false);
  CHECK(disk(pool->audit()).copies == (stays ? 3 : 0));
  CHECK(pool->audit().counters.disk_written_blocks == (stays ? 3 : 0));
  pool->evict(64, Medium::kDram);
  CHECK(brought(pool, prompt(1, 3), 10) == (stays ? 3 : 0));
}

TEST_CASE("threads that store, match, bring and evict never see a wrong byte") {
  const auto pool = open(std::make_shared<PowerDisk>(), 24, 40);
  std::atomic<bool> wrong{false};
  const auto work = [&](std::uint32_t seed) {
    for (int step = 0; step < 120; ++step) {
      seed = seed * 1664525 + 1013904223;
      const auto id = static_cast<Token>(1 + (seed >> 8) % 6);
      const Tokens tokens = prompt(id, 1 + (seed >> 16) % 4);
      try {
        switch ((seed >> 24) % 4) {
          case 0: {
            const Addresses blocks = alloc(*pool, tokens.size() / kPage, Medium::kDram);
            for (std::size_t i = 0; i < blocks.size(); ++i) {
              stamp(*pool, blocks[i], static_cast<std::uint64_t>(100 * id) + i);
            }
            insert(pool, tokens, blocks, "", true);
            break;
          }
          case 1:
            pool->evict(4, seed & 1 ? Medium::kDram : Medium::kDisk);
            break;
          default: {
            const Found found = match(pool, tokens);
            Addresses here(found.addresses.size());
            const Pins held(pool, pool->bring(found.addresses, here.data()));
            for (std::size_t i = 0; i < here.size(); ++i) {
              if (!has_stamp(*pool, here[i], static_cast<std::uint64_t>(100 * id) + i)) wrong = true;
            }
          }
        }
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kOutOfBlocks) wrong = true;
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 3; ++i) threads.emplace_back(work, 7 * i + 1);
  for (std::thread& thread : threads) thread.join();
  CHECK_FALSE(wrong);
  pool->audit();
}
