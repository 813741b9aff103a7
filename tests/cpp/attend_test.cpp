// Attention over sequences whose blocks lie in one pool is computed once, by whichever thread comes first.
#include "kvpool/distributed/attend.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/sequences/attender.h"
#include "sequence_kit.h"
#include "soon.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

TEST_CASE("attention over a batch reads the layer and the blocks of each sequence") {
  const auto node = make_attendable_node(8, 0, 2);
  Pool* const pool = &node->pool();
  const Addresses first = alloc(*pool, 2);
  const Addresses second = alloc(*pool, 1);
  fill_values(*pool, first, 1, 3.0F);
  fill_values(*pool, second, 1, 5.0F);
  const auto attend = Attend::start(*node, request_of({sequence_of(*node, first, 6), sequence_of(*node, second)}, 1),
                                    monotonic_ns() + kSecondsNs);
  CHECK(attend->wait(monotonic_ns() + kSecondsNs));
  attend->rethrow_if_failed();
  CHECK(attend->tokens() == std::vector<std::uint64_t>{6, kPage});
  const std::vector<std::vector<float>> results = finished(*attend);
  CHECK(results[0] == all_of_value(3.0F));
  CHECK(results[1] == all_of_value(5.0F));
}

TEST_CASE("closing a sequence lets no block go that attention still reads") {
  const auto node = make_attendable_node(2);
  Pool* const pool = &node->pool();
  const Addresses addresses = alloc(*pool, 2);
  fill_values(*pool, addresses, 0, 2.0F);
  const auto sequence = sequence_of(*node, addresses);
  Attend task(*node, request_of({sequence}));
  sequence->close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 0);
  CHECK_FALSE(task.wait(0));  // the time has passed: this thread does not compute
  CHECK(free_blocks(*pool) == 0);
  CHECK(task.wait(monotonic_ns() + kSecondsNs));
  CHECK(free_blocks(*pool) == 2);
  CHECK(finished(task).front() == all_of_value(2.0F));
}

TEST_CASE("attention that is cancelled, dropped or refused lets its blocks go") {
  const auto node = make_attendable_node(2);
  Pool* const pool = &node->pool();
  const Addresses addresses = alloc(*pool, 2);
  const auto sequence = sequence_of(*node, addresses);
  {
    Attend cancelled(*node, request_of({sequence}));
    CHECK(cancelled.cancel());
    CHECK_FALSE(cancelled.cancel());
    CHECK(cancelled.wait(0));
    CHECK(code_of([&] { cancelled.rethrow_if_failed(); }) == ErrorCode::kCancelled);
    const Attend dropped(*node, request_of({sequence}));
  }
  CHECK(code_of([&] { Attend(*node, request_of({sequence}, 2)); }) == ErrorCode::kArgument);
  Attend::Request short_q = request_of({sequence, sequence});
  short_q.q.resize(short_q.q.size() / 2);
  CHECK(code_of([&] { Attend(*node, std::move(short_q)); }) == ErrorCode::kArgument);
  const auto other = make_attendable_node(2);
  CHECK(code_of([&] { Attend(*other, request_of({sequence})); }) == ErrorCode::kNotOwner);
  sequence->close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 2);
}

TEST_CASE("attention is computed once when a thread of the pool and waiting threads meet") {
  const auto node = make_attendable_node(8, 0, 2);
  Pool* const pool = &node->pool();
  const Addresses addresses = alloc(*pool, 8);
  fill_values(*pool, addresses, 0, 1.5F);
  const auto sequence = sequence_of(*node, addresses);
  for (int round = 0; round < 50; ++round) {
    const auto task = Attend::start(*node, request_of({sequence}), monotonic_ns() + kSecondsNs);
    std::atomic<int> ended{0};
    const auto wait = [&] { ended += task->wait(monotonic_ns() + kSecondsNs) ? 1 : 0; };
    std::thread other(wait);
    wait();
    other.join();
    CHECK(ended == 2);
    CHECK(finished(*task).front() == all_of_value(1.5F));
  }
}

TEST_CASE("an Attender that is stopped waits for the attention that another thread computes") {
  const auto node = make_attendable_node(8, 0, 2);
  Pool* const pool = &node->pool();
  const auto sequence = sequence_of(*node, alloc(*pool, 8));
  for (int round = 0; round < 50; ++round) {
    Attend task(*node, request_of({sequence}));
    std::atomic<bool> waits{false};
    std::thread other([&] {
      waits = true;
      task.wait(monotonic_ns() + kSecondsNs);
    });
    while (!waits) std::this_thread::yield();  // after a sleep the computation would be over
    node->attender().stop();                   // either the computation has ended, or it does not begin
    const std::vector<std::byte> nothing(2 * 4 * kPage * kDim * sizeof(float));
    for (const Address address : sequence->addresses()) {
      const Segment& segment = pool->arena(medium_of(address))->segments()[0];
      std::memcpy(segment.base + block_of(address) * segment.stride, nothing.data(), segment.bytes);  // TSan watches
    }
    other.join();
    CHECK((!error_of([&] { task.rethrow_if_failed(); }) ||
           code_of([&] { task.rethrow_if_failed(); }) == ErrorCode::kClosed));
  }
}

TEST_CASE("attention that has not begun when its pool is closed ends with that") {
  const auto node = make_attendable_node(2);
  Pool* const pool = &node->pool();
  const auto sequence = sequence_of(*node, alloc(*pool, 1));
  Attend task(*node, request_of({sequence}));
  pool->close();
  CHECK(task.wait(monotonic_ns() + kSecondsNs));
  CHECK(code_of([&] { task.rethrow_if_failed(); }) == ErrorCode::kClosed);
}

}  // namespace
}  // namespace kvpool::testing
