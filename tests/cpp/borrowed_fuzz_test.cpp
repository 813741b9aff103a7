#include <doctest/doctest.h>

#include <array>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "kvpool/transfer/borrowed.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::uint32_t kLender = 7;
constexpr MediumMap<std::uint32_t> kBlocks = {4, 6};

template <class Call>
bool works(Call&& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct NaiveBlock {
  std::uint32_t generation = 0;
  bool borrowed = false;
  bool written = false;
};

enum class Event : std::uint8_t { kLend, kBeginWrite, kGiveBack, kEndWrite, kCount };

bool allowed(Event event, const NaiveBlock& block, bool stale) {
  if (event == Event::kLend) return !block.borrowed;
  return block.borrowed && !stale && block.written == (event == Event::kEndWrite);
}

void carry_out(Event event, NaiveBlock& block) {
  if (event == Event::kLend) block = {block.generation + 1, true, false};
  if (event == Event::kGiveBack) block.borrowed = false;
  if (event == Event::kBeginWrite) block.written = true;
  if (event == Event::kEndWrite) block.written = false;
}

void carry_out(Event event, BorrowedBlocks& blocks, const std::vector<Address>& list) {
  if (event == Event::kLend) blocks.add(list);
  if (event == Event::kBeginWrite) blocks.begin_write(list);
  if (event == Event::kGiveBack) blocks.remove(list);
  if (event == Event::kEndWrite) blocks.end_write(list);
}

}  // namespace

TEST_CASE("the set of borrowed blocks agrees with a naive model after every event") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("borrowed", seed);
    Dice dice(seed);
    BorrowedBlocks blocks("peer", kLender, kBlocks);
    std::map<std::pair<Medium, std::uint32_t>, NaiveBlock> model;
    for (const std::uint32_t number : {0U, 1U, 2U, 3U}) model[{Medium::kHbm, number}];
    for (const std::uint32_t number : {0U, 5U}) model[{Medium::kDram, number}];

    for (int step = 0; step < fuzz_length(300); ++step) {
      const auto event = static_cast<Event>(dice.below(static_cast<std::uint64_t>(Event::kCount)));
      std::vector<Address> list;
      std::vector<NaiveBlock*> named;
      bool right = true;
      for (auto& [place, block] : model) {
        if (!dice.one_in(3)) continue;
        const bool stale = event != Event::kLend && block.generation > 0 && dice.one_in(20);
        const std::uint32_t generation = block.generation + (event == Event::kLend ? 1 : 0) - (stale ? 1 : 0);
        list.push_back(make_address(kLender, place.first, generation, place.second));
        named.push_back(&block);
        right = right && allowed(event, block, stale);
      }
      if (event == Event::kEndWrite && !right) continue;  // ending a write that was not begun is forbidden
      REQUIRE(works([&] { carry_out(event, blocks, list); }) == right);
      std::uint32_t count = 0;
      for (NaiveBlock* const block : named) {
        if (right) carry_out(event, *block);
      }
      for (const auto& [place, block] : model) count += block.borrowed ? 1 : 0;
      REQUIRE(blocks.count() == count);
    }
  }
}

TEST_CASE("of several threads that write the same borrowed blocks, one does at a time") {
  BorrowedBlocks blocks("peer", kLender, kBlocks);
  const std::vector<Address> lent = {make_address(kLender, Medium::kHbm, 1, 0),
                                     make_address(kLender, Medium::kDram, 1, 5)};
  blocks.add(lent);
  int writes = 0;  // guarded by the marks alone: ThreadSanitizer sees two writers
  int begun = 0;
  std::mutex begun_mutex;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 2000; ++turn) {
        if (!works([&] { blocks.begin_write(lent); })) continue;
        ++writes;
        blocks.end_write(lent);
        const std::lock_guard lock(begun_mutex);
        ++begun;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(writes == begun);
  CHECK(writes > 0);
}
