// Many threads against one pool. Every block carries the stamp of the page that it holds; a reader that finds another
// one has read another owner's data (R1). Run under ThreadSanitizer too.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "pool_fixture.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr Token kPrompts = 24;
constexpr std::size_t kPagesMax = 6;

std::uint64_t stamp_of(Token id, std::size_t page) { return static_cast<std::uint64_t>(id) * 1000 + page; }

class Worker {
 public:
  Worker(std::shared_ptr<Pool> pool, std::uint64_t seed, std::atomic<int>& wrong)
      : pool_(std::move(pool)), dice_(seed), wrong_(wrong) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      try {
        step();
      } catch (const Error& error) {
        const bool expected = error.code() == ErrorCode::kOutOfBlocks || error.code() == ErrorCode::kState ||
                              error.code() == ErrorCode::kStaleAddress;
        if (!expected) ++wrong_;
      }
    }
    held_.clear();
  }

 private:
  void step() {
    const Token id = static_cast<Token>(1 + dice_.below(kPrompts));
    const std::size_t pages = 1 + dice_.below(kPagesMax);
    switch (dice_.below(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        serve(id, pages);
        break;
      case 4:
      case 5:
      case 6:
        look(id, pages);
        break;
      case 7: {
        Found found = match(pool_, prompt(id, pages));
        Addresses hot(found.addresses.size());
        Pins pins(pool_, pool_->swap_in(found.addresses, {}, hot.data()));
        verify(id, hot);
        verify(id, found.addresses);
        break;
      }
      case 8:
        pool_->swap_out(1 + dice_.below(6));
        break;
      case 9: {
        const Tokens tokens = prompt(id, pages);
        pool_->erase("", tokens.data(), tokens.size(), dice_.one_in(2));
        break;
      }
      case 10:
        if (held_.size() < 3) held_.push_back(match(pool_, prompt(id, pages)));
        break;
      default:
        if (!held_.empty()) held_.erase(held_.begin());
    }
  }

  // As an engine does: reuse what is cached, compute the rest, store it.
  void serve(Token id, std::size_t pages) {
    const Tokens tokens = prompt(id, pages);
    const Found found = match(pool_, tokens);
    verify(id, found.addresses);
    Addresses whole = found.addresses;
    Addresses fresh(pages - found.addresses.size());
    const MediumChoice medium = dice_.one_in(3) ? kMixed : MediumChoice(Medium::kHbm);
    if (!pool_->try_alloc(fresh.size(), medium, fresh.data()))
      pool_->alloc_evicting(fresh.size(), medium, fresh.data());
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      stamp(*pool_, fresh[i], stamp_of(id, whole.size() + i));
    }
    whole.insert(whole.end(), fresh.begin(), fresh.end());
    try {
      const Held held = insert(pool_, tokens, whole, "", /*free_duplicates=*/true);
      verify(id, held.canonical);
    } catch (...) {
      pool_->free(fresh.data(), fresh.size());
      throw;
    }
  }

  void look(Token id, std::size_t pages) {
    const Found found = match(pool_, prompt(id, pages));
    verify(id, found.addresses);
    std::this_thread::yield();
    verify(id, found.addresses);  // still: it is pinned
  }

  void verify(Token id, const Addresses& addresses) {
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      if (!has_stamp(*pool_, addresses[i], stamp_of(id, i))) ++wrong_;
    }
  }

  std::shared_ptr<Pool> pool_;
  Dice dice_;
  std::atomic<int>& wrong_;
  std::vector<Found> held_;
};

}  // namespace

TEST_CASE("eight threads never read a wrong byte, and no block is lost") {
  const std::uint64_t seed = fuzz_seeds().back();
  announce_fuzz("threads", seed);
  const auto pool = std::make_shared<Pool>(small_options(64, 48));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  const int steps = fuzz_length(5000);
  for (std::uint64_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] { Worker(pool, seed + i, wrong).run(steps); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  const PoolStats stats = pool->audit();
  for (const MediumCounts& counts : stats.media) {
    CHECK(counts.by_state[static_cast<std::size_t>(BlockState::kActive)] == 0);
    CHECK(counts.by_state[static_cast<std::size_t>(BlockState::kReserved)] == 0);
    CHECK(counts.evictable == counts.by_state[static_cast<std::size_t>(BlockState::kHistorical)]);
  }
}
