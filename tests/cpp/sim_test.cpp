#include <doctest/doctest.h>

#include <cstdlib>
#include <random>

#include "fuzz_seeds.h"
#include "sim_world.h"

namespace kvpool::testing {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr std::uint64_t kSeeds = 200;  // ten times slower: the program without a sanitizer runs the other ones
#else
constexpr std::uint64_t kSeeds = 2000;
#endif
constexpr std::uint64_t kSeedsLong = 100'000;
constexpr std::uint64_t kBugSeeds = 200;

std::vector<std::uint64_t> seeds() {
  if (const auto given = given_seeds()) return *given;
  const std::uint64_t fresh = std::random_device{}();
  const std::uint64_t n = std::getenv("KVPOOL_LONG") != nullptr ? kSeedsLong : kSeeds;
  std::vector<std::uint64_t> all;
  all.reserve(n);
  for (std::uint64_t i = 0; i < n; ++i) all.push_back(i % 2 == 0 ? i : fresh + i);  // half are the same each time
  return all;
}

// What the first world says in which the bug shows; empty when it shows in none.
std::string found(const SimBugs& bugs) {
  for (std::uint64_t seed = 0; seed < kBugSeeds; ++seed) {
    SimWorld world({.seed = seed, .bugs = bugs});
    std::string failure = world.run();
    if (!failure.empty()) return failure.substr(0, failure.find('\n'));
  }
  return {};
}

TEST_CASE("in a simulated world where everything fails, no byte is wrong, nothing leaks, and everything ends once") {
  std::map<std::string, std::uint64_t> happened;
  for (const std::uint64_t seed : seeds()) {
    SimWorld world({.seed = seed});
    const std::string failure = world.run();
    REQUIRE_MESSAGE(failure.empty(), failure);
    for (const auto& [what, n] : world.happened()) happened[what] += n;
  }
  if (std::getenv("KVPOOL_SEED") != nullptr) return;
  for (const char* what :
       {"transfers", "fetches", "borrowings", "successes",      "failures",          "cancellations",   "kills",
        "pauses",    "resets",  "cuts",       "disconnections", "slow applications", "items received",  "probes",
        "recalls",   "views",   "readings",   "matches",        "matches that held", "prompts fetched", "attends",
        "attended"}) {
    CHECK_MESSAGE(happened[what] > kSeeds / 20, std::string(what), ": ", happened[what]);
  }
}

TEST_CASE("a seed replays a simulated world bit by bit") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    SimWorld one({.seed = seed});
    SimWorld other({.seed = seed});  // both at once: nothing but the seed counts
    CHECK(one.run() == other.run());
    CHECK(one.log_lines() > 100);
    CHECK_MESSAGE(one.log_hash() == other.log_hash(), "KVPOOL_SEED=", seed);
    SimWorld next({.seed = seed + 1});
    next.run();
    CHECK(next.log_hash() != one.log_hash());
  }
}

// Each of them was a bug of some system once. The test of the tests: put in here, it is found.
TEST_CASE("planted: a reservation is freed at its deadline although its writer may still write") {
  CHECK(found({.free_at_deadline = true}).find("R1") != std::string::npos);
}

TEST_CASE("planted: the end of a link is taken for proof that a one-sided writer is gone") {
  CHECK(found({.free_at_link_loss = true}).find("R1") != std::string::npos);
}

TEST_CASE("planted: blocks of a peer that was lost are not released") {
  CHECK(found({.forget_lost_peer = true}).find("R2") != std::string::npos);
}

TEST_CASE("planted: blocks that were read for a transfer are not let go") {
  CHECK(found({.keep_holds = true}).find("R2") != std::string::npos);
}

TEST_CASE("planted: blocks are reused while a transfer reads them") { CHECK(found({.no_holds = true}) != ""); }

TEST_CASE("planted: a transfer is completed before all of it was placed") { CHECK(found({.done_early = true}) != ""); }

TEST_CASE("planted: the end of a link is taken for proof that nobody reads through a mapping any more") {
  CHECK(found({.unview_at_link_loss = true}).find("R1") != std::string::npos);
}

TEST_CASE("planted: what the network repeats is handled twice") { CHECK(found({.keep_replays = true}) != ""); }

}  // namespace
}  // namespace kvpool::testing
