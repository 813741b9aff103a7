// What peers sent for the application, and who waits for it.
#include "kvpool/pool/received_queue.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "kvpool/transport/reactor.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

std::int64_t in_a_minute() { return monotonic_ns() + 60'000'000'000; }

void push_one(ReceivedQueue& queue) {
  queue.reserve();
  queue.push(std::make_unique<Received>());
}

bool is_readable(int descriptor) {
  pollfd wanted{descriptor, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

TEST_CASE("who waits for what peers send hears why nothing more comes") {
  for (const bool fails : {false, true}) {
    CAPTURE(fails);
    ReceivedQueue queue(4);
    std::atomic<bool> waits{false};
    std::optional<ErrorCode> heard;
    std::thread waiter([&] {
      waits = true;
      heard = code_of([&] { queue.pop(in_a_minute()); });
    });
    while (!waits) std::this_thread::yield();
    if (fails) {
      queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
    } else {
      queue.close();
    }
    waiter.join();
    const ErrorCode expected = fails ? ErrorCode::kDeviceLost : ErrorCode::kClosed;
    CHECK(heard == expected);
    CHECK(code_of([&] { queue.pop(0); }) == expected);
    CHECK(code_of([&] { queue.reserve(); }) == expected);
  }
}

TEST_CASE("who waits for what peers send hears that the pool has failed") {
  const auto pool = std::make_shared<Pool>(small_options(4, 4));
  ServiceOptions options;
  options.secret = "s3cret";
  Service& service = pool->start_service(options);
  std::atomic<bool> waits{false};
  std::optional<ErrorCode> heard;
  std::thread waiter([&] {
    waits = true;
    heard = code_of([&] { service.receive(in_a_minute()); });
  });
  while (!waits) std::this_thread::yield();
  pool->fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  waiter.join();
  CHECK(heard == ErrorCode::kDeviceLost);
}

TEST_CASE("what came before a pool failed can still be taken, and the first reason counts") {
  ReceivedQueue queue(4);
  const int descriptor = queue.descriptor();
  CHECK_FALSE(is_readable(descriptor));
  push_one(queue);
  queue.reserve();  // promised to a peer that is in the middle of a transfer
  queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  queue.fail(Error(ErrorCode::kPeerLost, "a rank is gone"));
  queue.push(std::make_unique<Received>());
  CHECK(queue.pop(in_a_minute()) != nullptr);
  CHECK(queue.pop(in_a_minute()) != nullptr);
  CHECK(code_of([&] { queue.pop(in_a_minute()); }) == ErrorCode::kDeviceLost);
  queue.close();
  CHECK(code_of([&] { queue.pop(in_a_minute()); }) == ErrorCode::kDeviceLost);
}

TEST_CASE("the descriptor stays readable once nothing more comes, so that whoever polls it hears why") {
  for (const bool fails : {false, true}) {
    for (const bool asked_before : {false, true}) {
      ReceivedQueue queue(4);
      if (asked_before) static_cast<void>(queue.descriptor());
      push_one(queue);
      if (fails) {
        queue.fail(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
      } else {
        queue.close();
      }
      CHECK(is_readable(queue.descriptor()));
      CHECK(queue.pop(0) != nullptr);
      CHECK(is_readable(queue.descriptor()));
    }
  }
}

}  // namespace
}  // namespace kvpool::testing
