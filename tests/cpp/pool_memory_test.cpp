// The pool's verbs when memory runs out in the middle: they leave nothing behind.
#include <doctest/doctest.h>

#include "failing_alloc.h"
#include "pool_fixture.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

// Two prompts in HBM that share a page, one in DRAM, and two blocks of the caller.
struct Scene {
  std::shared_ptr<Pool> pool = std::make_shared<Pool>(small_options(10, 8));
  Tokens first = prompt(1, 3);
  Tokens second = prompt(1, 1);
  Tokens cold = prompt(3, 2);
  Addresses mine;

  Scene() {
    insert(pool, cold, alloc(*pool, 2));
    pool->swap_out(2);
    const Held held = insert(pool, first, alloc(*pool, 3));
    const Tokens tail = prompt(2, 2);
    second.insert(second.end(), tail.begin(), tail.end());
    Addresses blocks = {held.canonical[0]};
    const Addresses fresh = alloc(*pool, 2);
    blocks.insert(blocks.end(), fresh.begin(), fresh.end());
    insert(pool, second, blocks);
    mine = alloc(*pool, 2);
    // Everybody's content is known.
    for (const Tokens* tokens : {&first, &second, &cold}) {
      const Found found = match(pool, *tokens);
      for (const Address address : found.addresses) stamp(*pool, address, address);
    }
  }

  // The prompts that were there are there whole, at addresses with the stamps, and the caller has his blocks.
  void check_as_before(const PoolStats& before) const {
    const PoolStats after = pool->audit();
    for (std::size_t medium = 0; medium < 2; ++medium)
      CHECK(after.media[medium].by_state == before.media[medium].by_state);
    for (const Tokens* tokens : {&first, &second, &cold}) {
      const Found found = match(pool, *tokens);
      REQUIRE(found.hit.pages * kPage == tokens->size());
      for (const Address address : found.addresses) CHECK(has_stamp(*pool, address, address));
    }
    pool->free(mine.data(), mine.size());
  }
};

template <class Call>
void check_every_failure(Call&& call) {
  const int threw = fail_each_allocation([&](auto&& fail) {
    Scene scene;
    const PoolStats before = scene.pool->stats();
    if (fail([&] { call(scene); })) scene.check_as_before(before);
  });
  CHECK(threw > 0);
}

}  // namespace

TEST_CASE("an insertion that runs out of memory has inserted nothing") {
  check_every_failure([](Scene& scene) {
    Tokens tokens = prompt(1, 2);  // cuts the first prompt, and branches
    const Tokens tail = prompt(8, 2);
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    Addresses blocks(4);
    scene.pool->match("", tokens.data(), 2 * kPage, blocks.data());
    blocks[2] = scene.mine[0];
    blocks[3] = scene.mine[1];
    const InsertItem item{tokens.data(), tokens.size(), blocks.data(), 4, blocks.data()};
    Addresses canonical(4);
    InsertItem apart = item;
    apart.canonical = canonical.data();
    scene.pool->insert("", {&apart, 1}, false);
  });
}

TEST_CASE("a batch of insertions that runs out of memory has inserted nothing") {
  check_every_failure([](Scene& scene) {
    const Tokens one = prompt(6, 1);
    const Tokens two = prompt(7, 1);
    Addresses canonical(2);
    const InsertItem items[] = {{one.data(), one.size(), &scene.mine[0], 1, &canonical[0]},
                                {two.data(), two.size(), &scene.mine[1], 1, &canonical[1]}};
    scene.pool->insert("other", items, false);
  });
}

TEST_CASE("a match that runs out of memory pins nothing") {
  check_every_failure([](Scene& scene) {
    Addresses out(2);
    scene.pool->match("", scene.first.data(), 2 * kPage, out.data());  // ends inside a run: cuts it
  });
}

TEST_CASE("a swap out that runs out of memory moves nothing") {
  check_every_failure([](Scene& scene) { scene.pool->swap_out(4); });
}

TEST_CASE("a swap in that runs out of memory moves nothing") {
  check_every_failure([](Scene& scene) {
    Addresses cold(2);
    const IndexHit hit = scene.pool->match("", scene.cold.data(), scene.cold.size(), cold.data());
    Pins reader(scene.pool, hit.pin);  // so that the old blocks go to limbo
    Addresses hot(2);
    Pins pins(scene.pool, scene.pool->swap_in(cold, {}, hot.data()));
  });
}

TEST_CASE("an allocation that has to make room and runs out of memory allocates nothing") {
  check_every_failure([](Scene& scene) {
    Addresses out(6);
    scene.pool->alloc_evicting(6, Medium::kHbm, out.data());
  });
}

TEST_CASE("calls that free memory succeed when there is no memory left") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    Scene scene;
    fail([&] {
      CHECK(scene.pool->evict(1, Medium::kHbm) == 1);
      CHECK(scene.pool->erase("", scene.cold.data(), scene.cold.size(), false) == 2);
      scene.pool->free(scene.mine.data(), 2);
    });
    scene.pool->audit();
  });
  CHECK(threw == 0);
}
