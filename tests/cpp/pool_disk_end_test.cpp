// Blocks on disk when a call gives up, when the pool closes, and when the drive does not answer.
#include <doctest/doctest.h>
#include <errno.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "failing_alloc.h"
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
constexpr std::int64_t kInstant = 50'000'000;

PoolOptions disk_pool(const std::shared_ptr<PowerDisk>& files) {
  PoolOptions options = small_options(0, 8);
  options.audit = true;
  options.disk.emplace();
  options.disk->path = "(memory)";
  options.disk->blocks = 32;
  options.disk->directory = files;
  return options;
}

std::shared_ptr<Pool> open(const PoolOptions& options) { return std::make_shared<Pool>(options); }

void flush(Pool& pool) { pool.flush_disk(true, monotonic_ns() + kSoon); }

void store(const std::shared_ptr<Pool>& pool, const Tokens& tokens) {
  insert(pool, tokens, alloc(*pool, tokens.size() / kPage, Medium::kDram));
}

void store_on_disk(const std::shared_ptr<Pool>& pool, const Tokens& tokens) {
  store(pool, tokens);
  flush(*pool);
  pool->evict(64, Medium::kDram);
}

void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// A flush of everything in a thread. wait() returns when it waits.
class Flusher {
 public:
  explicit Flusher(const std::shared_ptr<Pool>& pool, std::int64_t ns)
      : thread_([this, pool, ns] {
          code = code_of([&] {
            pool->flush_disk(true, Waiting(monotonic_ns() + ns, [this] {
                               ++looks;
                               return stop.load();
                             }));
          });
          ended = true;
        }) {}
  ~Flusher() {
    stop = true;
    if (thread_.joinable()) thread_.join();
  }
  void wait() const {
    while (looks < 3 && !ended) rest();
  }
  void join() { thread_.join(); }

  std::atomic<int> looks{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> ended{false};
  std::optional<ErrorCode> code;

 private:
  std::thread thread_;
};

// A drive that does not answer calls of one kind for as long as it is told to.
struct Hang {
  explicit Hang(PowerDisk& files, PowerDisk::Call which) {
    files.fault = [this, which](PowerDisk::Call call, const std::string&) {
      if (call != which) return 0;
      while (on) rest();
      return 0;
    };
  }
  std::atomic<bool> on{false};
};

}  // namespace

TEST_CASE("what is forgotten on DISK while it is pinned is not there after a restart") {
  const auto files = std::make_shared<PowerDisk>();
  std::shared_ptr<PowerDisk> killed;
  {
    const auto pool = open(disk_pool(files));
    store_on_disk(pool, prompt(1, 3));
    const Found held = match(pool, prompt(1, 3));
    REQUIRE(held.addresses.size() == 3);
    for (const Address address : held.addresses) REQUIRE(medium_of(address) == Medium::kDisk);
    CHECK(pool->forget(std::span(held.addresses).subspan(1)) == 2);
    flush(*pool);
    killed = files->after_kill();
    CHECK(pool->audit().media[Medium::kDisk].by_state[static_cast<std::size_t>(BlockState::kHistorical)] == 3);
    pool->close();  // before the pins go
  }
  CHECK(match(open(disk_pool(killed)), prompt(1, 3)).hit.pages == 1);
  CHECK(match(open(disk_pool(files)), prompt(1, 3)).hit.pages == 1);
}

TEST_CASE("a slot whose page was forgotten while it was pinned is free, and erased once, when the pin goes") {
  const auto pool = open(disk_pool(std::make_shared<PowerDisk>()));
  for (Token id = 1; id <= 12; ++id) {
    store_on_disk(pool, prompt(id, 3));
    const Found held = match(pool, prompt(id, 3));
    CHECK(pool->forget(held.addresses) == 3);
    if (id % 2 == 0) flush(*pool);
  }
  flush(*pool);
  CHECK(pool->disk_stats().store.blocks_erased == 36);
  CHECK(pool->disk_stats().store.entries == 0);
  CHECK(pool->audit().media[Medium::kDisk].free_runs.longest == 32);
}

TEST_CASE("what is forgotten is erased while a flush waits for the budget") {
  PoolOptions options = disk_pool(std::make_shared<PowerDisk>());
  options.disk->bytes_s = 1;
  const auto pool = open(options);
  store_on_disk(pool, prompt(1, 3));
  store(pool, prompt(2, 3));
  Flusher flusher(pool, kSoon);
  flusher.wait();
  pool->forget(match(pool, prompt(1, 3)).addresses);
  while (pool->disk_stats().store.blocks_erased < 3 && !flusher.ended) rest();
  CHECK_FALSE(flusher.ended);
  CHECK(pool->disk_stats().store.blocks_erased == 3);
}

TEST_CASE("a close ends a flush that waits for the budget") {
  PoolOptions options = disk_pool(std::make_shared<PowerDisk>());
  options.disk->bytes_s = 1;
  const auto pool = open(options);
  store_on_disk(pool, prompt(1, 3));
  store(pool, prompt(2, 3));
  Flusher flusher(pool, kSoon / 2);
  flusher.wait();
  pool->close();
  flusher.join();
  CHECK(flusher.code == ErrorCode::kClosed);
}

TEST_CASE("a close ends a flush that waits for the drive") {
  const auto files = std::make_shared<PowerDisk>();
  Hang hang(*files, PowerDisk::Call::kWrite);
  const auto pool = open(disk_pool(files));
  store(pool, prompt(1, 3));
  hang.on = true;
  Flusher flusher(pool, kSoon / 2);
  flusher.wait();
  std::thread drive([&] {
    while (!flusher.ended) rest();
    hang.on = false;
  });
  pool->close();
  drive.join();
  flusher.join();
  CHECK(flusher.code == ErrorCode::kClosed);
}

TEST_CASE("the thread that waits in a flush may close the pool, as a handler of a signal does") {
  const auto files = std::make_shared<PowerDisk>();
  Hang hang(*files, PowerDisk::Call::kWrite);
  const auto pool = open(disk_pool(files));
  store(pool, prompt(1, 3));
  hang.on = true;
  std::atomic<int> asked{0};
  const Waiting closing(monotonic_ns() + kSoon, [&] {
    if (++asked == 5) {  // by then it waits for the drive
      pool->close();
      hang.on = false;
    }
    return false;
  });
  CHECK(code_of([&] { pool->flush_disk(true, closing); }) == ErrorCode::kClosed);
  CHECK(asked == 5);
}

TEST_CASE("threads that close a pool at the same time all return") {
  for (int round = 0; round < 20; ++round) {
    const auto pool = open(disk_pool(std::make_shared<PowerDisk>()));
    store_on_disk(pool, prompt(1, 3));
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { pool->close(); });
    for (std::thread& thread : threads) thread.join();
    CHECK(code_of([&] { flush(*pool); }) == ErrorCode::kClosed);
  }
}

TEST_CASE("a flush keeps its deadline on a drive that does not answer, and the next one writes all") {
  const auto files = std::make_shared<PowerDisk>();
  Hang hang(*files, PowerDisk::Call::kWrite);
  const auto pool = open(disk_pool(files));
  store(pool, prompt(1, 3));
  hang.on = true;
  CHECK(code_of([&] { pool->flush_disk(true, monotonic_ns() + kInstant); }) == ErrorCode::kDeadline);
  CHECK(pool->audit().media[Medium::kDisk].copies == 0);
  hang.on = false;
  flush(*pool);
  CHECK(pool->disk_stats().health.on);
  CHECK(pool->audit().media[Medium::kDisk].copies == 3);
  CHECK(match(open(disk_pool(files->after_kill())), prompt(1, 3)).hit.pages == 3);
}

TEST_CASE("a flush that gave up an erase is followed by one that waits for it") {
  const auto files = std::make_shared<PowerDisk>();
  Hang hang(*files, PowerDisk::Call::kFlush);
  const auto pool = open(disk_pool(files));
  store_on_disk(pool, prompt(1, 3));
  hang.on = true;
  pool->forget(match(pool, prompt(1, 3)).addresses);
  CHECK(code_of([&] { pool->flush_disk(true, monotonic_ns() + kInstant); }) == ErrorCode::kDeadline);
  hang.on = false;
  flush(*pool);
  CHECK(match(open(disk_pool(files->after_kill())), prompt(1, 3)).hit.pages == 0);
}

TEST_CASE("a bring that waits for the drive can be given up") {
  const auto files = std::make_shared<PowerDisk>();
  Hang hang(*files, PowerDisk::Call::kRead);
  const auto pool = open(disk_pool(files));
  store_on_disk(pool, prompt(1, 3));
  const Found found = match(pool, prompt(1, 3));
  hang.on = true;
  Addresses here(3);
  const GivenUp given_up = [] { return true; };
  CHECK(code_of([&] { Pins(pool, pool->bring(found.addresses, here.data(), given_up)); }) == ErrorCode::kCancelled);
  hang.on = false;
  CHECK(pool->audit().media[Medium::kDram].free_runs.longest == 8);
  const Pins held(pool, pool->bring(found.addresses, here.data()));
  for (const Address address : here) CHECK(medium_of(address) == Medium::kDram);
}

TEST_CASE("a flush that is given up leaves to the writer what waits to be written") {
  PoolOptions options = disk_pool(std::make_shared<PowerDisk>());
  options.disk->bytes_s = 4096 * 3 / 2;  // slots of 4 KiB are charged; so the writer waits meanwhile
  const auto pool = open(options);
  store_on_disk(pool, prompt(1, 4));
  store(pool, prompt(2, 2));
  CHECK(match(pool, prompt(2, 2)).hit.pages == 2);  // the second use
  const Waiting given_up(monotonic_ns() + kSoon, [] { return true; });
  CHECK(code_of([&] { pool->flush_disk(false, given_up); }) == ErrorCode::kCancelled);
  const std::int64_t until = monotonic_ns() + kSoon;
  while (pool->audit().counters.disk_written_blocks < 6 && monotonic_ns() < until) rest();
  CHECK(pool->audit().counters.disk_written_blocks == 6);
}

TEST_CASE("an erase for which memory runs out is tried again, and its slots can be written") {
  PoolOptions options = disk_pool(std::make_shared<PowerDisk>());
  options.disk->blocks = 3;
  const auto pool = open(options);
  for (Token id = 1; id <= 60; ++id) {
    CAPTURE(id);
    store_on_disk(pool, prompt(id, 3));
    REQUIRE(match(pool, prompt(id, 3)).hit.pages == 3);
    CHECK(pool->forget(match(pool, prompt(id, 3)).addresses) == 3);
    try {
      const FailNthAllocation failing(static_cast<std::uint64_t>(1 + id % 12));
      pool->flush_disk(false, monotonic_ns() + kSoon);
    } catch (const std::bad_alloc&) {
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kOutOfMemory);
    }
  }
}
