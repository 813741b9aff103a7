// Blocks on disk of a pool with HBM on a (fake) GPU, which the CPU cannot read.
#include <doctest/doctest.h>

#include <memory>

#include "device_kit.h"
#include "kvpool/base/clock.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/pool.h"
#include "pool_fixture.h"
#include "power_disk.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

std::shared_ptr<Pool> open() {
  PoolOptions options = small_options(8, 8);
  options.device = 0;
  options.pin_dram = true;
  options.audit = true;
  options.disk.emplace();
  options.disk->path = "(memory)";
  options.disk->blocks = 32;
  options.disk->directory = std::make_shared<PowerDisk>();
  return std::make_shared<Pool>(options);
}

// What was used twice and can be written is written.
std::uint64_t written(Pool& pool) {
  pool.flush_disk(/*everything=*/false, monotonic_ns() + 10'000'000'000);
  return pool.audit().counters.disk_written_blocks;
}

void store(const std::shared_ptr<Pool>& pool, const Tokens& tokens) {
  const Addresses blocks = alloc(*pool, tokens.size() / kPage);
  for (std::size_t i = 0; i < blocks.size(); ++i) stamp(*pool, blocks[i], 10 + i);
  insert(pool, tokens, blocks);
}

TEST_CASE("what moves from a GPU to DRAM is written to disk if it was used twice") {
  const FakeCuda cuda;
  const auto pool = open();
  store(pool, prompt(1, 3));
  match(pool, prompt(1, 3));
  CHECK(written(*pool) == 0);
  CHECK(pool->swap_out(3).size() == 3);
  CHECK(written(*pool) == 3);
  pool->evict(8, Medium::kDram);
  const Found found = match(pool, prompt(1, 3));
  REQUIRE(found.hit.pages == 3);
  Addresses here(3);
  const Pins held(pool, pool->swap_in(found.addresses, {}, here.data()));
  for (std::size_t i = 0; i < 3; ++i) CHECK(has_stamp(*pool, here[i], 10 + i));
}

TEST_CASE("what was used once and moves from a GPU to DRAM is not written to disk") {
  const FakeCuda cuda;
  const auto pool = open();
  store(pool, prompt(1, 3));
  CHECK(pool->swap_out(3).size() == 3);
  CHECK(written(*pool) == 0);
}

TEST_CASE("what came to DRAM before the beginning of its prompt is written after that") {
  const FakeCuda cuda;
  const auto pool = open();
  store(pool, prompt(1, 4));
  match(pool, prompt(1, 4));
  match(pool, prompt(1, 2));  // cuts it
  CHECK(pool->swap_out(2).size() == 2);
  CHECK(written(*pool) == 0);
  CHECK(pool->swap_out(2).size() == 2);
  written(*pool);
  CHECK(written(*pool) == 4);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
