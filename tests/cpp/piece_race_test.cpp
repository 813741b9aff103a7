// Races between a kernel and the copy engines, with a clock that only the copies move.
#include "kvpool/cuda/piece_race.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "kvpool/base/error.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::array<std::size_t, 4> kLengths{32, 64, 128, 256};
constexpr std::int64_t kLimit = 1'000'000;

// The times of copies: by racer, length and number of the try.
using Cost = std::function<std::int64_t(Racer racer, std::size_t piece, int turn)>;

struct Run {
  std::optional<std::size_t> bound;
  std::size_t copies = 0;
  std::size_t longest = 0;  // of the pieces that were copied
};

Run race(const Cost& cost, int tries = 3, std::int64_t limit = kLimit) {
  std::int64_t now = 1'000;
  std::map<std::pair<Racer, std::size_t>, int> turns;
  Run run;
  run.bound = race_pieces(
      {kLengths, tries, 5, limit}, [&] { return now; },
      [&](Racer racer, std::size_t piece) {
        const std::int64_t taken = cost(racer, piece, turns[{racer, piece}]++);
        ++run.copies;
        run.longest = std::max(run.longest, piece);
        now += std::max<std::int64_t>(taken, 0);
        return taken >= 0;
      });
  return run;
}

// Engines that cost so much a piece of 1,024 bytes, beside a kernel that takes the same for all.
Cost by_piece(std::int64_t kernel, std::int64_t piece) {
  return [=](Racer racer, std::size_t length, int) {
    return racer == Racer::kKernel ? kernel : piece * 1024 / static_cast<std::int64_t>(length);
  };
}

TEST_CASE("where the copy engines always win, the kernel copies pieces shorter than all that were raced") {
  const Run run = race([](Racer racer, std::size_t, int) { return racer == Racer::kKernel ? 200 : 100; });
  CHECK(run.bound == 16);
  CHECK(run.copies == 2 * 3);  // it is known at once
}

TEST_CASE("where the kernel always wins, it copies up to the longest length that was raced") {
  const Run run = race([](Racer racer, std::size_t, int) { return racer == Racer::kKernel ? 100 : 200; });
  CHECK(run.bound == 256);
  CHECK(run.copies == 2 * 3 * 4);
}

TEST_CASE("the kernel copies up to the last length before the engines win, and longer ones are not raced") {
  CHECK(race(by_piece(100, 4)).bound == 32);  // the engines: 128, 64
  CHECK(race(by_piece(50, 4)).bound == 64);   // 128, 64, 32
  CHECK(race(by_piece(20, 4)).bound == 128);  // 128, 64, 32, 16
  CHECK(race(by_piece(20, 4)).longest == 256);
  CHECK(race(by_piece(100, 4)).longest == 64);
}

TEST_CASE("the kernel wins if it is faster by more than the rules ask for; a tie goes to the engines") {
  const auto against = [](std::int64_t engines) {
    return race([=](Racer racer, std::size_t, int) { return racer == Racer::kKernel ? 1000 : engines; }).bound;
  };
  CHECK(against(1000) == 16);
  CHECK(against(1050) == 16);
  CHECK(against(1051) == 256);
}

TEST_CASE("the best try of each counts, so a disturbed try decides nothing") {
  const Cost quiet = by_piece(50, 4);
  for (const int calm : {0, 1, 2}) {
    for (const Racer disturbed : {Racer::kKernel, Racer::kEngines}) {
      const Run run = race([&](Racer racer, std::size_t piece, int turn) {
        return quiet(racer, piece, turn) + (turn == calm || racer != disturbed ? 0 : 40 + 13 * turn);
      });
      CHECK(run.bound == 64);
    }
  }
}

TEST_CASE("a failed copy ends the race without a result") {
  for (int failing = 0; failing < 2 * 3 * 4; ++failing) {
    int number = 0;
    const Run run = race([&](Racer racer, std::size_t, int) {
      if (number++ == failing) return -1;
      return racer == Racer::kKernel ? 10 : 20;
    });
    CHECK_FALSE(run.bound);
    CHECK(run.copies == static_cast<std::size_t>(failing) + 1);
  }
  CHECK(code_of([] {
          race([](Racer, std::size_t, int) -> std::int64_t { throw Error(ErrorCode::kDeviceLost, "gone"); });
        }) == ErrorCode::kDeviceLost);
}

TEST_CASE("a race that takes too long ends without a result") {
  const Cost uneven = [](Racer racer, std::size_t, int) { return racer == Racer::kKernel ? 100 : 200; };
  CHECK(race(uneven, 3, 12 * 300).bound == 256);
  const Run late = race(uneven, 3, 12 * 300 - 1);
  CHECK_FALSE(late.bound);
  CHECK(late.copies == 24);
  const Run stuck = race([](Racer, std::size_t, int) { return kLimit + 1; });
  CHECK_FALSE(stuck.bound);
  CHECK(stuck.copies == 1);
}

TEST_CASE("a clock that stands still does not let the kernel win") {
  CHECK(race([](Racer, std::size_t, int) { return 0; }).bound == 16);
}

}  // namespace
}  // namespace kvpool::testing
