// Writes by a route between two memories, checked against a naive copy.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "block_memory.h"
#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route.h"
#include "thrown.h"

namespace kvpool::testing {

inline constexpr std::int64_t kSecondNs = 1'000'000'000;

// A random transfer: where it comes from and goes to, and what it must leave behind.
struct Trial {
  Trial(Dice& dice, std::uint32_t blocks, std::size_t from_bytes, std::size_t to_bytes)
      : source(BlockMemory::random(dice, blocks, from_bytes)),
        target(BlockMemory::random(dice, blocks, to_bytes)),
        expected(target),
        strips(random_strips(dice, from_bytes, to_bytes)) {
    const std::size_t count = dice.below(2 * blocks + 1);
    from = random_blocks(dice, blocks, count);
    to = random_blocks(dice, blocks, count);
    merge = dice.one_in(2);
    gather = dice.one_in(2);
    naive_write(source.spans(), expected.spans(), strips, from, to);
  }

  static Trial small(Dice& dice) {
    const std::uint32_t blocks = 1 + dice.below(40);
    const std::size_t from_bytes = 1 + dice.below(300);
    return {dice, blocks, from_bytes, dice.one_in(2) ? from_bytes : 1 + dice.below(300)};
  }
  // Large enough for several threads, and for several frames of a socket.
  static Trial large(Dice& dice) {
    const std::size_t bytes = 20'000 + dice.below(300'000);
    return {dice, 20, bytes, bytes};
  }

  WriteRequest request() const {
    WriteRequest request;
    request.transfer = 7;
    request.strips = strips;
    request.from = from;
    request.to = to;
    request.merge = merge;
    request.gather = gather;
    request.deadline_ns = monotonic_ns() + 30 * kSecondNs;
    return request;
  }
  std::uint64_t bytes() const { return strip_bytes(strips) * from.size(); }

  BlockMemory source;
  BlockMemory target;
  BlockMemory expected;
  std::vector<BlockStrip> strips;
  std::vector<Address> from;
  std::vector<Address> to;
  bool merge = true;
  bool gather = true;
};

// The route writes what it should; returns its outcome. The caller checks the target.
inline WriteOutcome write_whole(Route& route, const Trial& trial) {
  std::atomic<std::uint64_t> done{0};
  WriteRequest request = trial.request();
  request.bytes_done = &done;
  const WriteOutcome outcome = route.write(request);
  CHECK(outcome.bytes == trial.bytes());
  CHECK(done.load() == trial.bytes());
  return outcome;
}

// Requests that every route refuses, without writing anything.
inline void check_refusals(Route& route, const Trial& trial) {
  const std::atomic<bool> cancelled{true};
  WriteRequest request = trial.request();
  request.cancelled = &cancelled;
  CHECK(code_of([&] { route.write(request); }) == ErrorCode::kCancelled);
  request = trial.request();
  request.deadline_ns = monotonic_ns() - 1;
  CHECK(code_of([&] { route.write(request); }) == ErrorCode::kDeadline);
  request = trial.request();
  std::vector<Address> beyond = trial.from;
  beyond.back() = make_address(0, Medium::kHbm, 0, 1000);
  request.from = beyond;
  CHECK(code_of([&] { route.write(request); }) == ErrorCode::kArgument);
  request = trial.request();
  request.from = request.from.first(request.from.size() - 1);
  CHECK(code_of([&] { route.write(request); }) == ErrorCode::kArgument);
  route.close();
  route.close();
  CHECK(code_of([&] { route.write(trial.request()); }) == ErrorCode::kPeerLost);
}

}  // namespace kvpool::testing
