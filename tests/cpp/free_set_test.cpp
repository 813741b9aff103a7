// The free set beside a naive model: a map of runs, in which everything is looked up the slow and obvious way.
#include "kvpool/blocks/free_set.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/error.h"

namespace {

using kvpool::BlockMeta;
using kvpool::BlockState;
using kvpool::Error;
using kvpool::ErrorCode;
using kvpool::FreeSet;
using kvpool::testing::model_length;

// A free set with the metadata that its owner would keep.
struct Rig {
  explicit Rig(std::uint32_t blocks)
      : meta(static_cast<BlockMeta*>(std::calloc(std::max(blocks, 1U), sizeof(BlockMeta))), std::free),
        set(meta.get(), blocks) {}

  void mark_taken(std::uint32_t first, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) meta[first + i].set_state(BlockState::kActive);
  }
  std::uint32_t take(std::uint32_t n) {
    const std::uint32_t head = set.best_fit(n);
    if (head == FreeSet::kNone) return head;
    set.remove_front(head, n);
    mark_taken(head, n);
    return head;
  }
  void take_at(std::uint32_t first, std::uint32_t n) {
    set.remove(first, n);
    mark_taken(first, n);
  }
  void give(std::uint32_t first, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) meta[first + i].overwrite(0);
    set.insert(first, n);
  }
  bool broken() const {
    try {
      set.audit("test");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kAudit);
      return true;
    }
    return false;
  }

  std::unique_ptr<BlockMeta[], decltype(&std::free)> meta;
  FreeSet set;
};

class Model {
 public:
  explicit Model(std::uint32_t blocks) {
    if (blocks > 0) add(0, blocks);
  }

  std::size_t runs() const { return runs_.size(); }
  std::uint32_t longest() const { return lengths_.empty() ? 0 : *lengths_.rbegin(); }
  std::uint32_t best_fit(std::uint32_t n) const {
    const auto it = lengths_.lower_bound(n);
    return it == lengths_.end() ? 0 : *it;
  }
  std::uint32_t length_at(std::uint32_t head) const {
    const auto it = runs_.find(head);
    return it == runs_.end() ? 0 : it->second;
  }
  const std::map<std::uint32_t, std::uint32_t>& all() const { return runs_; }

  void take(std::uint32_t first, std::uint32_t n) {
    const auto it = std::prev(runs_.upper_bound(first));
    const auto [head, length] = *it;
    REQUIRE(head <= first);
    REQUIRE(first + n <= head + length);
    remove(head);
    if (head < first) add(head, first - head);
    if (first + n < head + length) add(first + n, head + length - first - n);
  }
  void give(std::uint32_t first, std::uint32_t n) {
    auto next = runs_.lower_bound(first);
    if (next != runs_.end() && next->first == first + n) {
      n += next->second;
      remove(next->first);
    }
    next = runs_.lower_bound(first);
    if (next != runs_.begin()) {
      const auto [head, length] = *std::prev(next);
      if (head + length == first) {
        remove(head);
        first = head;
        n += length;
      }
    }
    add(first, n);
  }

 private:
  void add(std::uint32_t head, std::uint32_t length) {
    runs_[head] = length;
    lengths_.insert(length);
  }
  void remove(std::uint32_t head) {
    lengths_.erase(lengths_.find(runs_.at(head)));
    runs_.erase(head);
  }

  std::map<std::uint32_t, std::uint32_t> runs_;
  std::multiset<std::uint32_t> lengths_;
};

// Fixed seeds and a fresh one; KVPOOL_SEED replays one alone.
std::vector<std::uint64_t> seeds() {
  if (const char* given = std::getenv("KVPOOL_SEED")) return {std::strtoull(given, nullptr, 0)};
  return {1, 2, std::random_device{}()};
}

struct Shape {
  std::uint32_t blocks;
  std::uint32_t length_max;  // of one request
  int events;
  int audit_every;
};

void fuzz(const Shape& shape, std::uint64_t seed) {
  std::fprintf(stderr, "free set fuzz: %u blocks, KVPOOL_SEED=%llu\n", shape.blocks,
               static_cast<unsigned long long>(seed));
  CAPTURE(seed);
  CAPTURE(shape.blocks);
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  Rig rig(shape.blocks);
  Model model(shape.blocks);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> taken;
  std::uint32_t pressure = 50;
  for (int event = 0; event < shape.events; ++event) {
    CAPTURE(event);
    if (event % 500 == 0) pressure = 25 + below(60);
    if (below(100) < pressure) {
      // Lengths are spread over all orders of magnitude, so that bins and trie are both used.
      const std::uint32_t n = 1 + below(1 + below(1 + below(shape.length_max)));
      const std::uint32_t fit = model.best_fit(n);
      const std::uint32_t head = rig.set.best_fit(n);
      REQUIRE((head == FreeSet::kNone) == (fit == 0));
      if (fit == 0) {
        const std::uint32_t longest = rig.set.longest();
        REQUIRE((longest == FreeSet::kNone) == (model.longest() == 0));
        if (longest != FreeSet::kNone) REQUIRE(model.length_at(longest) == model.longest());
      } else if (below(8) == 0) {
        // A block that the caller chose, anywhere in a run.
        auto it = model.all().lower_bound(below(shape.blocks));
        if (it == model.all().end()) it = model.all().begin();
        const std::uint32_t block = it->first + below(it->second);
        rig.take_at(block, 1);
        model.take(block, 1);
        taken.emplace_back(block, 1);
      } else {
        REQUIRE(model.length_at(head) == fit);  // the shortest that is long enough
        REQUIRE(rig.set.length(head) == fit);
        REQUIRE(rig.take(n) == head);
        REQUIRE(rig.meta[head].tag == 0);
        REQUIRE(rig.meta[head].mark == 0);
        REQUIRE(rig.meta[head + n - 1].mark == 0);
        model.take(head, n);
        taken.emplace_back(head, n);
      }
    } else if (!taken.empty()) {
      std::swap(taken[below(static_cast<std::uint32_t>(taken.size()))], taken.back());
      auto& [first, length] = taken.back();
      const std::uint32_t n = below(2) == 0 ? length : 1 + below(length);
      const std::uint32_t from = first + length - n;
      rig.give(from, n);
      model.give(from, n);
      length -= n;
      if (length == 0) taken.pop_back();
    }
    REQUIRE(rig.set.runs() == model.runs());
    const std::uint32_t longest = rig.set.longest();
    REQUIRE((longest == FreeSet::kNone ? 0 : rig.set.length(longest)) == model.longest());
    if (event % shape.audit_every == 0) {
      // Together with F1, which the audit checks, equal lengths at all heads mean equal sets.
      REQUIRE_NOTHROW(rig.set.audit("fuzz"));
      std::size_t wrong = 0;
      for (const auto& [head, length] : model.all()) wrong += rig.set.length(head) != length ? 1 : 0;
      REQUIRE(wrong == 0);
    }
  }
  for (const auto& [first, length] : taken) rig.give(first, length);
  REQUIRE(rig.set.runs() == 1);
  REQUIRE(rig.set.length(0) == shape.blocks);
  REQUIRE_NOTHROW(rig.set.audit("fuzz"));
}

}  // namespace

TEST_CASE("a new free set is one run, and an empty one has no run") {
  for (const std::uint32_t blocks : {1U, 2U, 4096U, 4097U, 100000U, 1U << 24}) {
    CAPTURE(blocks);
    Rig rig(blocks);
    CHECK(rig.set.runs() == 1);
    CHECK(rig.set.longest() == 0);
    CHECK(rig.set.length(0) == blocks);
    CHECK(rig.set.best_fit(1) == 0);
    CHECK(rig.set.best_fit(blocks) == 0);
    CHECK(rig.set.best_fit(blocks + 1) == FreeSet::kNone);
    rig.set.audit("new");
  }
  Rig none(0);
  CHECK(none.set.runs() == 0);
  CHECK(none.set.longest() == FreeSet::kNone);
  CHECK(none.set.best_fit(1) == FreeSet::kNone);
  none.set.audit("none");
}

TEST_CASE("freed blocks merge with the runs on both sides") {
  Rig rig(30);
  REQUIRE(rig.take(30) == 0);
  CHECK(rig.set.runs() == 0);
  rig.give(0, 10);
  rig.give(20, 10);
  CHECK(rig.set.runs() == 2);
  rig.give(12, 3);
  CHECK(rig.set.runs() == 3);
  rig.give(10, 2);
  CHECK(rig.set.runs() == 2);
  CHECK(rig.set.length(0) == 15);
  rig.give(15, 5);
  CHECK(rig.set.runs() == 1);
  CHECK(rig.set.length(0) == 30);
  rig.set.audit("merge");
}

TEST_CASE("a request takes the shortest run that is long enough") {
  Rig rig(1000);
  REQUIRE(rig.take(1000) == 0);
  rig.give(100, 7);
  rig.give(200, 1);
  rig.give(300, 64);
  rig.give(400, 5);
  rig.give(500, 5);
  CHECK(rig.set.best_fit(1) == 200);
  CHECK(rig.set.best_fit(2) == 400);
  CHECK(rig.set.best_fit(6) == 100);
  CHECK(rig.set.best_fit(8) == 300);
  CHECK(rig.set.best_fit(65) == FreeSet::kNone);
  CHECK(rig.set.longest() == 300);
}

TEST_CASE("of two equal runs the lower one is given out first") {
  Rig rig(100);
  REQUIRE(rig.take(100) == 0);
  rig.give(50, 3);
  rig.give(10, 3);
  rig.give(80, 3);
  CHECK(rig.take(3) == 10);
  CHECK(rig.take(3) == 50);
  CHECK(rig.take(3) == 80);

  Rig large(100000);
  REQUIRE(large.take(100000) == 0);
  large.give(50000, 9000);
  large.give(10000, 9000);
  large.give(80000, 9000);
  CHECK(large.take(9000) == 10000);
  CHECK(large.take(9000) == 50000);
  CHECK(large.take(9000) == 80000);
}

TEST_CASE("runs on both sides of the longest bin are told apart by length") {
  Rig rig(60000);
  REQUIRE(rig.take(60000) == 0);
  rig.give(0, 4095);
  rig.give(5000, 4096);
  rig.give(10000, 4097);
  rig.give(20000, 4098);
  rig.give(30000, 20000);
  CHECK(rig.set.best_fit(4095) == 0);
  CHECK(rig.set.best_fit(4096) == 5000);
  CHECK(rig.set.best_fit(4097) == 10000);
  CHECK(rig.set.best_fit(4098) == 20000);
  CHECK(rig.set.best_fit(4099) == 30000);
  CHECK(rig.set.best_fit(20000) == 30000);
  CHECK(rig.set.best_fit(20001) == FreeSet::kNone);
  CHECK(rig.set.longest() == 30000);
  rig.set.audit("bounds");
}

TEST_CASE("any block of a run can be taken out of it, however far away the run's head is") {
  const std::uint32_t blocks = 1U << 20;  // 256 blocks a sector
  Rig rig(blocks);
  const auto runs_after = [&rig](std::uint32_t block) {
    rig.take_at(block, 1);
    rig.set.audit("take");
    return rig.set.runs();
  };
  CHECK(runs_after(blocks / 2 + 17) == 2);  // inside, head in sector 0
  CHECK(runs_after(blocks / 2 + 19) == 3);  // leaves a run of one block between
  CHECK(runs_after(blocks / 2 + 18) == 2);
  CHECK(runs_after(0) == 2);           // a head
  CHECK(runs_after(blocks - 1) == 2);  // a tail
  CHECK(runs_after(255) == 3);         // ends of sectors
  CHECK(runs_after(256) == 3);
  CHECK(runs_after(1) == 3);
  CHECK(runs_after(3) == 4);
  CHECK(runs_after(2) == 3);
}

TEST_CASE("the free set agrees with a naive model after every event") {
  for (const std::uint64_t seed : seeds()) {
    fuzz({1, 1, model_length(200), 1}, seed);
    fuzz({17, 6, model_length(4000), 1}, seed);
    fuzz({300, 64, model_length(6000), 1}, seed);
    fuzz({4096, 600, model_length(6000), 16}, seed);
    fuzz({20000, 12000, model_length(8000), 64}, seed);
    fuzz({300000, 30000, model_length(8000), 512}, seed);
  }
}

TEST_CASE("the audit notices every wrong bit in the boundary tags") {
  SUBCASE("short runs") {
    Rig rig(60);
    REQUIRE(rig.take(60) == 0);
    for (const auto& [first, n] : {std::pair{0U, 5U}, {8U, 1U}, {12U, 1U}, {16U, 2U}, {22U, 5U}, {30U, 5U}}) {
      rig.give(first, n);
    }
    REQUIRE_FALSE(rig.broken());
    std::size_t missed = 0;
    for (std::uint32_t block = 0; block < 60; ++block) {
      if (!rig.meta[block].is_free()) continue;
      for (int bit = 0; bit < 96; ++bit) {
        BlockMeta& meta = rig.meta[block];
        const BlockMeta before = meta;
        if (bit < 32) {
          meta.mark ^= 1U << bit;
        } else {
          meta.tag ^= std::uint64_t{1} << (bit - 32);
        }
        missed += rig.broken() ? 0 : 1;
        meta = before;
      }
    }
    CHECK(missed == 0);
    CHECK_FALSE(rig.broken());
  }
  SUBCASE("long runs") {
    Rig rig(60000);
    REQUIRE(rig.take(60000) == 0);
    for (const auto& [first, n] : {std::pair{1U, 5000U}, {6000U, 5000U}, {12000U, 9000U}, {30000U, 4097U}}) {
      rig.give(first, n);
    }
    std::size_t missed = 0;
    for (const std::uint32_t head : {1U, 6000U, 12000U, 30000U}) {
      for (int bit = 0; bit < 64; ++bit) {
        rig.meta[head].tag ^= std::uint64_t{1} << bit;
        missed += rig.broken() ? 0 : 1;
        rig.meta[head].tag ^= std::uint64_t{1} << bit;
      }
    }
    CHECK(missed == 0);
    CHECK_FALSE(rig.broken());
  }
}

TEST_CASE("the audit notices a block whose state changed behind the set's back") {
  Rig rig(60);
  REQUIRE(rig.take(20) == 0);
  for (std::uint32_t block = 0; block < 60; ++block) {
    BlockMeta& meta = rig.meta[block];
    const BlockMeta before = meta;
    meta.set_state(meta.is_free() ? BlockState::kActive : BlockState::kFree);
    CHECK(rig.broken());
    meta = before;
  }
  CHECK_FALSE(rig.broken());
}
