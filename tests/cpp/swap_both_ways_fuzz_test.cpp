// Threads that swap, cancel, insert and delete at random: no byte is wrong, and no block is lost. KVPOOL_LONG=1: more.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "device_kit.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/swap_handle.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr Token kPrompts = 12;
constexpr std::size_t kPages = 4;

std::uint64_t stamp_of(Token id, std::size_t page) { return static_cast<std::uint64_t>(id) * 1000 + page; }

class Swapper {
 public:
  Swapper(std::shared_ptr<Pool> pool, std::uint64_t seed, std::atomic<int>& wrong)
      : pool_(std::move(pool)), dice_(seed), wrong_(wrong) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      const auto error = error_of([&] { step(); });
      const bool expected = !error || error->code() == ErrorCode::kOutOfBlocks || error->code() == ErrorCode::kState ||
                            error->code() == ErrorCode::kStaleAddress || error->code() == ErrorCode::kCancelled;
      wrong_ += expected ? 0 : 1;
    }
    under_way_.clear();
    kept_.clear();
  }

 private:
  struct UnderWay {
    Token id;
    std::size_t first;
    std::shared_ptr<Swap> swap;
  };

  void step() {
    const Token id = static_cast<Token>(1 + dice_.below(kPrompts));
    switch (dice_.below(10)) {
      case 0:
      case 1: {  // some of the pages, wherever they lie
        Found found = match(pool_, prompt(id, kPages));
        const std::size_t first = found.addresses.empty() ? 0 : dice_.below(found.addresses.size());
        const Addresses part(found.addresses.begin() + static_cast<std::ptrdiff_t>(first), found.addresses.end());
        verify(id, first, swap_in(pool_, part).addresses);
        verify(id, 0, found.addresses);
        break;
      }
      case 2:
      case 3: {
        const Found found = match(pool_, prompt(id, kPages));
        if (under_way_.size() < 4) under_way_.push_back({id, 0, pool_->begin_swap_in(found.addresses, {})});
        break;
      }
      case 4:
        pool_->swap_out(1 + dice_.below(6));
        break;
      case 5: {
        const auto swap = pool_->begin_swap_out(1 + dice_.below(6));
        if (dice_.one_in(3)) swap->cancel();
        break;
      }
      case 6: {
        if (under_way_.empty()) break;
        UnderWay one = dice_.pick(under_way_);
        if (dice_.one_in(4)) one.swap->cancel();
        if (dice_.one_in(2)) wrong_ += eventually([&] { return one.swap->done(); }) ? 0 : 1;
        if (one.swap->done()) {
          std::erase_if(under_way_, [&](const UnderWay& any) { return any.swap == one.swap; });
          one.swap->rethrow_if_failed();
          verify(one.id, one.first, one.swap->addresses());
          if (dice_.one_in(2)) kept_.emplace_back(pool_, one.swap->take_pins());
        }
        break;
      }
      case 7: {
        const Tokens tokens = prompt(id, 1 + dice_.below(kPages));
        pool_->erase("", tokens.data(), tokens.size(), dice_.one_in(2));
        break;
      }
      case 8:
        if (!kept_.empty()) kept_.erase(kept_.begin());
        break;
      default:
        serve(id, 1 + dice_.below(kPages));
    }
  }

  void serve(Token id, std::size_t pages) {
    const Tokens tokens = prompt(id, pages);
    const Found found = match(pool_, tokens);
    verify(id, 0, found.addresses);
    Addresses whole = found.addresses;
    const Addresses fresh = alloc(*pool_, pages - whole.size(), dice_.one_in(3) ? Medium::kDram : Medium::kHbm);
    for (std::size_t i = 0; i < fresh.size(); ++i) stamp(*pool_, fresh[i], stamp_of(id, whole.size() + i));
    whole.insert(whole.end(), fresh.begin(), fresh.end());
    try {
      verify(id, 0, insert(pool_, tokens, whole, "", /*free_duplicates=*/true).canonical);
    } catch (...) {
      pool_->free(fresh.data(), fresh.size());
      throw;
    }
  }

  void verify(Token id, std::size_t first, const Addresses& addresses) {
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      wrong_ += has_stamp(*pool_, addresses[i], stamp_of(id, first + i)) ? 0 : 1;
    }
  }

  std::shared_ptr<Pool> pool_;
  Dice dice_;
  std::atomic<int>& wrong_;
  std::vector<UnderWay> under_way_;
  std::vector<Pins> kept_;
};

void check_swappers(const PoolOptions& options, std::uint64_t seed, int steps) {
  const auto pool = std::make_shared<Pool>(options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] { Swapper(pool, seed + i, wrong).run(steps); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  const auto quiet = [&] {  // the last handles were dropped while their swaps were under way
    const PoolStats stats = pool->audit();
    for (const MediumCounts& counts : stats.media) {
      if (counts.by_state[static_cast<std::size_t>(BlockState::kReserved)] > 0) return false;
      if (counts.evictable != counts.by_state[static_cast<std::size_t>(BlockState::kHistorical)]) return false;
    }
    return true;
  };
  CHECK(eventually(quiet));
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) CHECK(count(*pool, medium, BlockState::kActive) == 0);
}

TEST_CASE("threads that swap both ways, waiting or not, never see a wrong byte, and no block is lost") {
  const std::uint64_t seed = fuzz_seeds().back();
  announce_fuzz("swap", seed);
  check_swappers(small_options(20, 16), seed, fuzz_length(8000));
}

#ifdef KVPOOL_FAKE_CUDA
TEST_CASE("threads that swap both ways on a GPU never see a wrong byte, and no block is lost") {
  const std::uint64_t seed = fuzz_seeds().back();
  announce_fuzz("swap on a GPU", seed);
  const FakeCuda cuda;
  cuda.set("delay_us", 20);
  PoolOptions options = small_options(20, 16);
  options.device = 0;
  options.pin_dram = true;
  check_swappers(options, seed, fuzz_length(300));
}
#endif  // KVPOOL_FAKE_CUDA

}  // namespace
}  // namespace kvpool::testing
