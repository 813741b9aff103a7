// For tests of swaps under way: a pool with copies that the test controls, and waits for what other threads do.
#pragma once

#include <doctest/doctest.h>
#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/swap_handle.h"
#include "kvpool/pool/tier_mover.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {

constexpr std::chrono::seconds kLong{60};  // what takes longer has failed

template <class Holds>
bool eventually(Holds&& holds, std::chrono::seconds within = kLong) {
  const auto until = std::chrono::steady_clock::now() + within;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Returns when a thread of this process has slept for some time without a break: it waits for another one.
inline bool falls_asleep(pid_t thread) {
  std::string before;
  int looks = 0;
  return eventually([&] {
    std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
    std::string now;
    bool sleeps = false;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("State:")) sleeps = line.find("sleeping") != std::string::npos;
      if (line.find("ctxt_switches") != std::string::npos) now += line;
    }
    looks = sleeps && now == before ? looks + 1 : 0;
    before = now;
    return looks == 20;  // a millisecond between two
  });
}

inline std::uint32_t count(Pool& pool, Medium medium, BlockState state) {
  return pool.stats().media[medium].by_state[static_cast<std::size_t>(state)];
}

// Copies nothing, and lets each direction begin and end when the test says so.
class HeldMover final : public TierMover {
 public:
  ~HeldMover() = default;

  void move(const Address* from, const Address* /*to*/, std::size_t /*n*/) override {
    const TierWay way = medium_of(from[0]) == Medium::kHbm ? TierWay::kOut : TierWay::kIn;
    std::unique_lock lock(mutex_);
    Side& own = side(way);
    ++own.begun;
    changed_.notify_all();
    late_ = !changed_.wait_for(lock, kLong, [&] { return !own.held || own.ended < own.let_go; }) || late_;
    ++own.ended;
    changed_.notify_all();
    if (fails_) throw Error(*fails_, "it cannot be done now");
  }

  // From now on: each copy fails with this, or none.
  void fail(std::optional<ErrorCode> with) {
    const std::lock_guard lock(mutex_);
    fails_ = with;
  }
  // From now on.
  void hold(TierWay way, bool held) {
    const std::lock_guard lock(mutex_);
    side(way).held = held;
    changed_.notify_all();
  }
  // The copies up to this one may end, though the direction is held.
  void let_go(TierWay way, int copies) {
    const std::lock_guard lock(mutex_);
    side(way).let_go = copies;
    changed_.notify_all();
  }
  // Returns when so many copies of this direction have begun.
  bool begun(TierWay way, int copies = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLong, [&] { return side(way).begun >= copies; });
  }
  int under_way(TierWay way) {
    const std::lock_guard lock(mutex_);
    return side(way).begun - side(way).ended;
  }
  bool late() {
    const std::lock_guard lock(mutex_);
    return late_;
  }

 private:
  struct Side {
    bool held = false;
    int begun = 0;
    int ended = 0;
    int let_go = 0;
  };
  Side& side(TierWay way) { return sides_[static_cast<std::size_t>(way)]; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Side, 2> sides_;
  std::optional<ErrorCode> fails_;
  bool late_ = false;
};

// A pool whose content lies elsewhere, and what copies it.
struct HeldPool {
  HeldPool(std::uint32_t hbm_blocks, std::uint32_t dram_blocks) {
    PoolOptions options = small_options(hbm_blocks, dram_blocks);
    options.sharding = Sharding({1, 1, 4, DType::kFloat32, kPage}, {});
    options.audit = true;
    pool = std::make_shared<Pool>(options);
    pool->set_mover(&mover);
  }
  ~HeldPool() {
    for (const TierWay way : {TierWay::kOut, TierWay::kIn}) mover.hold(way, false);
    if (!pool->closed()) pool->set_mover(nullptr);
    CHECK_FALSE(mover.late());
  }
  HeldPool(const HeldPool&) = delete;
  HeldPool& operator=(const HeldPool&) = delete;

  // A cached prompt of so many pages, in HBM or in DRAM.
  Tokens store(Token id, std::size_t pages, Medium medium = Medium::kHbm) {
    const Tokens tokens = prompt(id, pages);
    insert(pool, tokens, alloc(*pool, pages, medium));
    return tokens;
  }
  std::uint32_t count(Medium medium, BlockState state) { return testing::count(*pool, medium, state); }

  HeldMover mover;
  std::shared_ptr<Pool> pool;
};

// As a caller has it: the addresses, and the pins on them.
struct Brought {
  Addresses addresses;
  Pins pins;
};

inline Brought swap_in(const std::shared_ptr<Pool>& pool, const Addresses& addresses, const Addresses& into = {},
                       const CallerStream& after = {}) {
  Brought brought;
  brought.addresses.resize(addresses.size());
  brought.pins = Pins(pool, pool->swap_in(addresses, into, brought.addresses.data(), after));
  return brought;
}

// How it has ended.
inline std::optional<ErrorCode> end_of(Swap& swap) {
  REQUIRE(eventually([&] { return swap.done(); }));
  return code_of([&] { swap.rethrow_if_failed(); });
}

// How many blocks are in each state, to compare.
inline std::vector<std::uint32_t> states_of(Pool& pool) {
  const PoolStats stats = pool.audit();
  std::vector<std::uint32_t> states;
  for (const MediumCounts& counts : stats.media) {
    states.insert(states.end(), counts.by_state.begin(), counts.by_state.end());
    states.push_back(counts.evictable);
  }
  return states;
}

inline bool all_in(const Addresses& addresses, Medium medium) {
  for (const Address address : addresses) {
    if (medium_of(address) != medium) return false;
  }
  return true;
}

}  // namespace kvpool::testing
