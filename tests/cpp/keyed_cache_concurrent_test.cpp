// A keyed cache that several threads use at once, or a forked child; and the streams of a GPU that copy for it.
#include <doctest/doctest.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "child_process.h"
#include "device_kit.h"
#include "keyed_cache_kit.h"
#include "kvpool/base/error.h"
#include "shared_space_kit.h"
#include "soon.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace keyed_caches;  // NOLINT(google-build-using-namespace)
namespace {

// It used to wait for its lock, which nobody gives back in a child.
TEST_CASE("whether a cache is closed is known while another thread uses it, and in a forked child") {
  Space space(16, 16, 2);
  Rig rig(space.make_pool(2), 4);
  rig.put({1});
  std::atomic<pid_t> id{0};
  std::optional<SpaceLock> lock(space.space->lock());
  std::thread other([&] {
    id = gettid();
    rig.cache->evict(1);  // waits for the space, with the lock of the cache
  });
  sleep_while([&] { return id == 0; });
  CHECK(falls_asleep(id));
  const int status = test::run_in_child([&] {
    alarm(60);  // it has hung
    return rig.cache->closed() ? 1 : 0;
  });
  CHECK(status == 0);
  lock.reset();
  other.join();
  CHECK_FALSE(rig.cache->closed());
  rig.cache->close();
  CHECK(rig.cache->closed());
}

TEST_CASE("threads that save, load and evict see whole blocks, each under its own key") {
  Rig rig(6, /*hbm=*/0, /*dram=*/12);
  std::vector<std::thread> threads;
  for (std::uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (std::uint64_t round = 0; round < 150; ++round) {
        const std::uint64_t first = (round * 5 + id) % 9;
        const Numbers numbers{first, first + 1};
        try {
          rig.put(numbers);
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kOutOfBlocks);  // all is pinned
        }
        rig.get(numbers);
        if (id == 0) rig.cache->evict(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  rig.cache->audit();
  rig.pool->audit();
  rig.cache->close();
  CHECK(rig.free_dram() == 12);
}

#ifdef KVPOOL_FAKE_CUDA

struct GpuRig {
  GpuRig() {
    PoolOptions options = small_options(8, 8);
    options.device = 0;
    options.pin_dram = true;
    pool = std::make_shared<Pool>(options);
    cache = std::make_shared<KeyedCache>(pool, 16, 4);
  }

  const FakeCuda cuda;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<KeyedCache> cache;
};

TEST_CASE("blocks on a GPU are saved to host memory under keys, and loaded into other blocks") {
  GpuRig rig;
  const Addresses from = alloc(*rig.pool, 3);
  const Addresses into = alloc(*rig.pool, 3);
  for (std::size_t i = 0; i < 3; ++i) stamp(*rig.pool, from[i], 100 + i);
  CHECK(rig.cache->save(keys_of({1, 2, 3}, 16).data(), 3, from, {}) == 3);
  for (const Address address : from) stamp(*rig.pool, address, 7);
  for (const Address address : into) stamp(*rig.pool, address, 8);
  CHECK(rig.cache->load(keys_of({3, 1, 9}, 16).data(), 3, into, {}) == 2);
  CHECK(has_stamp(*rig.pool, into[0], 102));
  CHECK(has_stamp(*rig.pool, into[1], 100));
  CHECK(has_stamp(*rig.pool, into[2], 8));
  std::vector<std::byte> rows(kBlockBytes);
  CHECK(rig.cache->load_rows(keys_of({2}, 16).data(), 1, rows.data()) == 1);
  std::uint64_t value = 0;
  std::memcpy(&value, rows.data(), sizeof value);
  CHECK(value == 101);
  rig.cache->audit();
}

TEST_CASE("a GPU that is lost while a save copies ends it, and the cache gives its blocks back") {
  GpuRig rig;
  const Addresses from = alloc(*rig.pool, 3);
  CHECK(rig.cache->save(keys_of({1}, 16).data(), 1, {from.data(), 1}, {}) == 1);
  rig.cuda.lose(0, 700);
  CHECK(code_of([&] { rig.cache->save(keys_of({2, 3}, 16).data(), 2, {from.data() + 1, 2}, {}); }) ==
        ErrorCode::kDeviceLost);
  CHECK(code_of([&] { stored_in(*rig.cache, {1}); }) == ErrorCode::kDeviceLost);
  rig.cache->close();
}

#endif  // KVPOOL_FAKE_CUDA

}  // namespace
}  // namespace kvpool::testing
