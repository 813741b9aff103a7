// Pools that share one space: pressure, places, ids, and what is left when memory runs out.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/blocks/cache_blocks.h"
#include "shared_space_kit.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

// Two pools of 3 and 4 units a block; the second has filled the space with unpinned prompts.
struct Full {
  Space space{48, 0, 2};
  std::shared_ptr<Pool> starved = space.make_pool(3);
  std::shared_ptr<Pool> rich = space.make_pool(4);

  Full() {
    for (Token id = 0; id < 4; ++id) insert(rich, prompt(id, 3), alloc(*rich, 3));
    CHECK(in_state(*starved, BlockState::kFree) == 0);
  }
  void set_hook(std::shared_ptr<PressureHook> hook) {
    const SpaceLock lock = space.space->lock();
    space.space->set_pressure_hook(std::move(hook));
  }
};

// Evicts from one pool as many blocks as the other one needs.
class EvictFrom final : public PressureHook {
 public:
  explicit EvictFrom(Pool& pool, std::size_t most = SIZE_MAX) : pool_(pool), most_(most) {}
  void relieve(const CacheBlocks& /*starved*/, MediumChoice medium, std::size_t blocks) override {
    ++calls;
    asked = blocks;
    pool_.evict(std::min(most_, blocks), medium);
  }
  int calls = 0;
  std::size_t asked = 0;

 private:
  Pool& pool_;
  std::size_t most_;
};

}  // namespace

TEST_CASE("without a hook no cache loses blocks to another, and the error counts them") {
  Full full;
  Addresses out(2);
  const auto error = error_of([&] { full.starved->alloc_evicting(2, Medium::kHbm, out.data()); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kOutOfBlocks);
  CHECK(std::string(error->what())
            .find("of 16, 0 are free, 0 active, 0 cached (0 evictable, 0 pinned); other caches "
                  "of the space have blocks where 16 would lie") != std::string::npos);
  CHECK(in_state(*full.rich, BlockState::kHistorical) == 12);
}

TEST_CASE("a hook may evict from another cache what the short one needs, and is asked for no more") {
  Full full;
  const auto hook = std::make_shared<EvictFrom>(*full.rich);
  full.set_hook(hook);
  CHECK(alloc(*full.starved, 2).size() == 2);
  CHECK(hook->asked == 2);
  CHECK(in_state(*full.rich, BlockState::kHistorical) == 10);
  // A request that fits is served without the hook.
  const int calls = hook->calls;
  Addresses out(1);
  if (full.starved->try_alloc(1, Medium::kHbm, out.data())) CHECK(hook->calls == calls);
  full.starved->audit();
  full.rich->audit();

  // No cache is asked for more than there is.
  const int before = hook->calls;
  CHECK(code_of([&] { full.starved->alloc_evicting(17, Medium::kHbm, out.data()); }) == ErrorCode::kOutOfBlocks);
  CHECK(hook->calls == before);
}

TEST_CASE("a hook that frees nothing is asked once, and its exceptions reach the caller") {
  Full full;
  const auto idle = std::make_shared<EvictFrom>(*full.rich, 0);
  full.set_hook(idle);
  Addresses out(2);
  CHECK(code_of([&] { full.starved->alloc_evicting(2, Medium::kHbm, out.data()); }) == ErrorCode::kOutOfBlocks);
  CHECK(idle->calls == 1);

  class Throws final : public PressureHook {
    void relieve(const CacheBlocks& /*starved*/, MediumChoice /*medium*/, std::size_t /*blocks*/) override {
      throw Error(ErrorCode::kBusy, "ask later");
    }
  };
  full.set_hook(std::make_shared<Throws>());
  CHECK(code_of([&] { full.starved->alloc_evicting(2, Medium::kHbm, out.data()); }) == ErrorCode::kBusy);
  full.set_hook(nullptr);
  CHECK(in_state(*full.rich, BlockState::kHistorical) == 12);
  CHECK(code_of([&] { full.starved->alloc_evicting(2, Medium::kHbm, out.data()); }) == ErrorCode::kOutOfBlocks);
  full.rich->audit();
}

TEST_CASE("two pools that evict from each other at once both go on") {
  Space space(60, 60, 2);
  const std::array pools{space.make_pool(3, /*audit=*/false), space.make_pool(4, /*audit=*/false)};
  class EvictOthers final : public PressureHook {
   public:
    explicit EvictOthers(const std::array<std::shared_ptr<Pool>, 2>& pools) : pools_(pools) {}
    void relieve(const CacheBlocks& starved, MediumChoice medium, std::size_t blocks) override {
      pools_[1 - starved.number()]->evict(blocks + 1, medium);
    }

   private:
    const std::array<std::shared_ptr<Pool>, 2>& pools_;
  };
  {
    const SpaceLock lock = space.space->lock();
    space.space->set_pressure_hook(std::make_shared<EvictOthers>(pools));
  }
  std::array<int, 2> done{};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const auto& pool = pools[i];
      for (Token round = 0; round < 300; ++round) {
        const std::size_t n = 1 + static_cast<std::size_t>(round) % 4;
        Addresses blocks(n);
        if (code_of([&] { pool->alloc_evicting(n, kMixed, blocks.data()); })) continue;
        for (const Address address : blocks) stamp(*pool, address, address);
        for (const Address address : blocks) done[i] += has_stamp(*pool, address, address) ? 1 : -1000;
        insert(pool, prompt(round, n), blocks, "", true);
        if (round % 7 == 0) pool->swap_out(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(done[i] > 100);
    pools[i]->audit();
  }
}

TEST_CASE("a pool joins a space with arenas that fit, and leaves it again") {
  Space space(24, 12, 2);
  const auto first = space.make_pool(3);
  auto second = space.make_pool(4);
  CHECK(code_of([&] { space.make_pool(4); }) == ErrorCode::kState);
  SpaceShare wrong{space.space, 5, first->arenas()};
  CHECK(code_of([&] { Pool(small_options(0, 0), wrong); }) == ErrorCode::kArgument);

  insert(second, prompt(1, 2), alloc(*second, 2));
  CHECK(displaced(*first) == 3);
  CHECK(in_state(*first, BlockState::kFree) == 5);
  second.reset();  // its prompts go with it
  CHECK(displaced(*first) == 0);
  second = space.make_pool(6);
  CHECK(alloc(*second, 4).size() == 4);
  CHECK(in_state(*first, BlockState::kFree) == 0);
  first->audit();
}

TEST_CASE("a pool of a space is refused where blocks must be numbered one after another, in pieces or not") {
  Space space(24, 12, 2);
  for (const std::uint32_t pieces : {1U, 2U}) {
    const auto pool = space.make_pool(4, true, pieces);
    std::string text;
    CHECK(code_of([&] { pool->check_unshared("a rank"); }, &text) == ErrorCode::kUnsupported);
    CHECK(text.find("a rank needs") == 0);
  }
  Pool(small_options(8, 4)).check_unshared("a rank");
}

TEST_CASE("pools of one space join a cluster under separate ids") {
  Space space(24, 12, 2);
  const auto first = space.make_pool(3);
  const auto second = space.make_pool(4);
  const Addresses before = alloc(*first, 1);
  first->set_instance(9);
  CHECK(code_of([&] { second->set_instance(9); }) == ErrorCode::kState);
  CHECK(second->instance() == 0);
  second->set_instance(10);
  first->free(before.data(), 1);
  CHECK(instance_of(alloc(*first, 1)[0]) == 9);
  CHECK(instance_of(alloc(*second, 1)[0]) == 10);
}

TEST_CASE("a verb that runs out of memory leaves both pools of a space unchanged") {
  struct Scene {
    Space space{60, 36, 2};
    std::shared_ptr<Pool> pool = space.make_pool(3, /*audit=*/false);
    std::shared_ptr<Pool> other = space.make_pool(4, /*audit=*/false);
    Tokens warm = prompt(1, 2);
    Addresses mine;

    Scene() {
      insert(pool, prompt(2, 2), alloc(*pool, 2));
      pool->swap_out(2);
      insert(pool, warm, alloc(*pool, 2));
      insert(other, prompt(3, 2), alloc(*other, 2));
      mine = alloc(*pool, 2);
    }
  };
  const auto check_every_failure = [](auto&& call) {
    const int threw = fail_each_allocation([&](auto&& fail) {
      Scene scene;
      const PoolStats before = scene.pool->stats();
      const PoolStats others = scene.other->stats();
      if (!fail([&] { call(scene); })) return;
      const PoolStats after = scene.pool->audit();
      for (const Medium medium : kTiers) {
        CHECK(after.media[medium].by_state == before.media[medium].by_state);
        CHECK(scene.other->audit().media[medium].by_state == others.media[medium].by_state);
      }
      scene.pool->free(scene.mine.data(), scene.mine.size());
    });
    CHECK(threw > 0);
  };
  check_every_failure([](Scene& scene) { insert(scene.pool, prompt(8, 2), scene.mine); });
  check_every_failure([](Scene& scene) { scene.pool->swap_out(2); });
  check_every_failure([](Scene& scene) {
    const Tokens cold = prompt(2, 2);
    const Found found = match(scene.pool, cold);
    Addresses out(2);
    const Pins pins(scene.pool, scene.pool->swap_in(found.addresses, {}, out.data()));
  });
  check_every_failure([](Scene& scene) {
    Addresses out(scene.pool->stats().media[Medium::kHbm].by_state[0] + 1);
    scene.pool->alloc_evicting(out.size(), Medium::kHbm, out.data());
  });
}
