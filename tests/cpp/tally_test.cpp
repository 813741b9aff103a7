#include "kvpool/transfer/tally.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "doctest/doctest.h"

namespace kvpool::testing {
namespace {

const std::optional<Error> kWell;

std::uint64_t ended_with(const TransferTally::Counts& counts, ErrorCode code) {
  return counts.ended[1 + static_cast<std::size_t>(code)];
}

}  // namespace

TEST_CASE("the tally has a counter for every error") {
  TransferTally tally;
  for (std::size_t code = 0; code < kErrorCodes; ++code) {
    tally.ended(TransferKind::kFetch, Error(static_cast<ErrorCode>(code), "failed"), 0, 0);
  }
  const auto counts = tally.counts(TransferKind::kFetch);
  CHECK(counts.ended[0] == 0);
  CHECK(std::count(counts.ended.begin() + 1, counts.ended.end(), 1U) == static_cast<std::ptrdiff_t>(kErrorCodes));
  CHECK(counts.bytes == 0);
}

TEST_CASE("the tally keeps kinds and outcomes apart") {
  TransferTally tally;
  tally.ended(TransferKind::kSend, kWell, 100, 5'000);
  tally.ended(TransferKind::kSend, Error(ErrorCode::kPeerLost, "gone"), 40, 7'000);
  tally.ended(TransferKind::kFetch, Error(ErrorCode::kCancelled, "enough"), 0, 9'000);

  const auto sent = tally.counts(TransferKind::kSend);
  CHECK(sent.ended[0] == 1);
  CHECK(ended_with(sent, ErrorCode::kPeerLost) == 1);
  CHECK(ended_with(sent, ErrorCode::kCancelled) == 0);
  CHECK(sent.bytes == 140);
  CHECK(sent.duration_ns == 5'000);  // the time of a failed one says nothing

  const auto fetched = tally.counts(TransferKind::kFetch);
  CHECK(fetched.ended[0] == 0);
  CHECK(ended_with(fetched, ErrorCode::kCancelled) == 1);
  CHECK(std::accumulate(fetched.durations.begin(), fetched.durations.end(), std::uint64_t{0}) == 0);
}

TEST_CASE("a time falls into the first bucket whose bound is not below it") {
  TransferTally tally;
  const auto& bounds = TransferTally::kBoundsNs;
  for (const std::int64_t bound : bounds) {
    tally.ended(TransferKind::kSend, kWell, 0, bound);
    tally.ended(TransferKind::kSend, kWell, 0, bound + 1);
  }
  tally.ended(TransferKind::kSend, kWell, 0, 0);
  const auto counts = tally.counts(TransferKind::kSend);
  CHECK(counts.durations[0] == 2);
  for (std::size_t i = 1; i < bounds.size(); ++i) CHECK(counts.durations[i] == 2);
  CHECK(counts.durations[bounds.size()] == 1);
}

TEST_CASE("threads that count at once lose nothing") {
  constexpr std::uint64_t kEach = 20'000;
  TransferTally tally;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&tally] {
      for (std::uint64_t n = 0; n < kEach; ++n) tally.ended(TransferKind::kSend, kWell, 3, 1'000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto counts = tally.counts(TransferKind::kSend);
  CHECK(counts.ended[0] == 4 * kEach);
  CHECK(counts.bytes == 12 * kEach);
  CHECK(counts.durations[0] == 4 * kEach);
}

}  // namespace kvpool::testing
