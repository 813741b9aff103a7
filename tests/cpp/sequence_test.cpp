// Sequences hold their blocks, and attention over them is computed once, by whichever thread comes first.
#include "kvpool/sequences/sequence.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "fake_driver.h"
#include "kvpool/base/clock.h"
#include "kvpool/sequences/attend_task.h"
#include "kvpool/sequences/attender.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kDim = 8;
constexpr std::int64_t kSecondsNs = 20'000'000'000;

// Two layers of one KV head in float32.
PoolOptions attendable(std::uint32_t hbm, std::uint32_t dram = 0) {
  PoolOptions options = small_options(hbm, dram);
  options.layout.piece_bytes.assign(4, kPage * kDim * sizeof(float));
  options.layout.format = {1, kDim, DType::kFloat32, false, false};
  return options;
}

std::shared_ptr<Pool> make_attendable(std::uint32_t hbm, std::uint32_t dram = 0) {
  return std::make_shared<Pool>(attendable(hbm, dram));
}

// V of a layer in all blocks; K is left as zeros, so that every token has the same weight.
void fill_values(Pool& pool, std::span<const Address> addresses, std::uint32_t layer, float value) {
  const std::vector<float> row(kPage * kDim, value);
  for (const Address address : addresses) {
    const Segment& segment = pool.arena(medium_of(address))->segments()[0];
    std::byte* const block = segment.base + block_of(address) * segment.stride;
    std::memcpy(block + (2 * layer + 1) * row.size() * sizeof(float), row.data(), row.size() * sizeof(float));
  }
}

AttendRequest request_of(std::vector<std::shared_ptr<Sequence>> sequences, std::uint32_t layer = 0) {
  AttendRequest request;
  request.layer = layer;
  request.query_heads = 2;
  request.query_dtype = DType::kFloat32;
  for (auto& sequence : sequences) request.sequences.push_back({std::move(sequence), 1});
  request.q.resize(request.sequences.size() * 2 * kDim * sizeof(float));
  return request;
}

std::vector<std::vector<float>> finished(AttendTask& task) {
  std::vector<std::vector<float>> results;
  const std::vector<PartialAttention> parts = task.take_parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].finish(DType::kFloat32, task.tokens()[i],
                    std::as_writable_bytes(std::span(results.emplace_back(2 * kDim))));
  }
  return results;
}

std::uint32_t free_blocks(Pool& pool) {
  return pool.stats().media[Medium::kHbm].by_state[static_cast<std::size_t>(BlockState::kFree)];
}

TEST_CASE("a sequence holds its blocks until it is closed") {
  const auto pool = make_attendable(4);
  const Addresses addresses = alloc(*pool, 3);
  Sequence sequence(*pool, addresses, std::nullopt);
  CHECK(sequence.tokens() == 3 * kPage);
  CHECK(sequence.addresses() == addresses);
  pool->free(addresses.data(), 3);
  CHECK(free_blocks(*pool) == 1);
  sequence.close();
  CHECK(free_blocks(*pool) == 4);
  sequence.close();
  CHECK(code_of([&] { sequence.append({}, std::nullopt); }) == ErrorCode::kState);
  CHECK(code_of([&] { sequence.set_tokens(1); }) == ErrorCode::kState);
  CHECK(code_of([&] { sequence.begin_reading(); }) == ErrorCode::kState);
  pool->audit();
}

TEST_CASE("a sequence that is refused holds nothing, and one that cannot grow is as before") {
  const auto pool = make_attendable(4);
  const Addresses addresses = alloc(*pool, 2);
  CHECK(code_of([&] { Sequence(*pool, addresses, 2 * kPage + 1); }) == ErrorCode::kArgument);
  Sequence sequence(*pool, {addresses.data(), 1}, 3);
  CHECK(code_of([&] { sequence.append({&addresses[1], 1}, 2 * kPage + 1); }) == ErrorCode::kArgument);
  const Addresses stale = alloc(*pool, 1);
  pool->free(stale.data(), 1);
  CHECK(code_of([&] { sequence.append(stale, std::nullopt); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { sequence.set_tokens(kPage + 1); }) == ErrorCode::kArgument);
  CHECK(sequence.tokens() == 3);
  CHECK(sequence.addresses() == Addresses{addresses[0]});
  sequence.close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 4);
}

TEST_CASE("attention cannot read raw blocks, or element types without a kernel") {
  const auto raw = std::make_shared<Pool>(small_options(4, 0));
  CHECK(code_of([&] { Sequence(*raw, alloc(*raw, 1), std::nullopt); }) == ErrorCode::kUnsupported);
  PoolOptions options = attendable(4);
  options.layout.format.dtype = DType::kInt8;
  const auto bytes = std::make_shared<Pool>(options);
  CHECK(code_of([&] { Sequence(*bytes, alloc(*bytes, 1), std::nullopt); }) == ErrorCode::kUnsupported);
}

#ifdef KVPOOL_FAKE_CUDA
TEST_CASE("of a pool on a GPU attention reads the blocks in DRAM and refuses those on the GPU") {
  const FakeCuda cuda;
  PoolOptions options = attendable(2, 2);
  options.device = 0;
  options.pin_dram = true;
  const auto pool = std::make_shared<Pool>(options);
  Addresses mixed = alloc(*pool, 1, Medium::kDram);
  fill_values(*pool, mixed, 0, 4.0F);
  Sequence sequence(*pool, mixed, std::nullopt);
  mixed.push_back(alloc(*pool, 1, Medium::kHbm)[0]);
  const auto error = error_of([&] { Sequence(*pool, mixed, std::nullopt); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kUnsupported);
  CHECK(code_of([&] { sequence.append({&mixed[1], 1}, std::nullopt); }) == ErrorCode::kUnsupported);
  pool->free(&mixed[1], 1);
  CHECK(free_blocks(*pool) == 2);  // the refused ones are not held
  Attender attender(pool->executor(), 1);
  const auto in_dram = std::make_shared<Sequence>(*pool, sequence.addresses(), std::nullopt);
  AttendTask task(*pool, request_of({in_dram}), attender);
  CHECK(task.wait(monotonic_ns() + kSecondsNs));
  task.rethrow_if_failed();
  CHECK(finished(task).front() == std::vector<float>(2 * kDim, 4.0F));
}
#endif

TEST_CASE("a layer's K and V are found in every block of both tiers") {
  const auto pool = make_attendable(3, 3);
  Addresses addresses = alloc(*pool, 2, Medium::kHbm);
  for (const Address address : alloc(*pool, 2, Medium::kDram)) addresses.push_back(address);
  const std::size_t piece = pool->layout().piece_bytes[0];
  const LayerPlaces places(pool->layout(), pool->arenas(), 1);
  std::vector<const std::byte*> k(4);
  std::vector<const std::byte*> v(4);
  places.fill(addresses, k.data(), v.data());
  for (std::size_t i = 0; i < 4; ++i) {
    const Segment& segment = pool->arena(medium_of(addresses[i]))->segments()[0];
    const std::byte* const block = segment.base + block_of(addresses[i]) * segment.stride;
    CHECK(k[i] == block + 2 * piece);
    CHECK(v[i] == block + 3 * piece);
  }
}

TEST_CASE("K or V that is cut into several runs of bytes is refused") {
  const PoolOptions options = attendable(2);
  const std::size_t piece = options.layout.piece_bytes[0];
  std::vector<std::byte> memory(2 * 4 * piece);
  // Half of K, the rest of K and V, and the second layer.
  std::vector<Segment> segments = {{memory.data(), piece / 2, piece / 2},
                                   {memory.data() + piece, 3 * piece / 2, 3 * piece / 2},
                                   {memory.data() + 4 * piece, 2 * piece, 2 * piece}};
  MediumMap<std::shared_ptr<Arena>> arenas;
  arenas[Medium::kHbm] = make_adopted_arena(Medium::kHbm, 2, std::move(segments), nullptr);
  CHECK(code_of([&] { LayerPlaces(options.layout, arenas, 0); }) == ErrorCode::kUnsupported);
  const LayerPlaces second(options.layout, arenas, 1);
  const Address address = make_address(0, Medium::kHbm, 1, 1);
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  second.fill({&address, 1}, &k, &v);
  CHECK(k == memory.data() + 6 * piece);
  CHECK(v == memory.data() + 7 * piece);
}

TEST_CASE("attention over a batch reads the layer and the blocks of each sequence") {
  const auto pool = make_attendable(8);
  Executor executor;
  Attender attender(executor, 2);
  const Addresses first = alloc(*pool, 2);
  const Addresses second = alloc(*pool, 1);
  fill_values(*pool, first, 1, 3.0F);
  fill_values(*pool, second, 1, 5.0F);
  const auto a = std::make_shared<Sequence>(*pool, first, 6);
  const auto b = std::make_shared<Sequence>(*pool, second, std::nullopt);
  AttendTask task(*pool, request_of({a, b}, 1), attender);
  CHECK(task.wait(monotonic_ns() + kSecondsNs));
  task.rethrow_if_failed();
  CHECK(task.tokens() == std::vector<std::uint64_t>{6, kPage});
  const std::vector<std::vector<float>> results = finished(task);
  CHECK(results[0] == std::vector<float>(2 * kDim, 3.0F));
  CHECK(results[1] == std::vector<float>(2 * kDim, 5.0F));
}

TEST_CASE("closing a sequence lets no block go that attention still reads") {
  const auto pool = make_attendable(2);
  Executor executor;
  Attender attender(executor, 1);
  const Addresses addresses = alloc(*pool, 2);
  fill_values(*pool, addresses, 0, 2.0F);
  const auto sequence = std::make_shared<Sequence>(*pool, addresses, std::nullopt);
  AttendTask task(*pool, request_of({sequence}), attender);
  sequence->close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 0);
  CHECK_FALSE(task.wait(0));  // the time has passed: this thread does not compute
  CHECK(free_blocks(*pool) == 0);
  task.run();
  CHECK(task.done());
  CHECK(free_blocks(*pool) == 2);
  CHECK(finished(task).front() == std::vector<float>(2 * kDim, 2.0F));
}

TEST_CASE("attention that is cancelled, dropped or refused lets its blocks go") {
  const auto pool = make_attendable(2);
  Executor executor;
  Attender attender(executor, 1);
  const Addresses addresses = alloc(*pool, 2);
  const auto sequence = std::make_shared<Sequence>(*pool, addresses, std::nullopt);
  {
    AttendTask cancelled(*pool, request_of({sequence}), attender);
    CHECK(cancelled.cancel());
    CHECK_FALSE(cancelled.cancel());
    CHECK(cancelled.wait(0));
    CHECK(code_of([&] { cancelled.rethrow_if_failed(); }) == ErrorCode::kCancelled);
    const AttendTask dropped(*pool, request_of({sequence}), attender);
  }
  CHECK(code_of([&] { AttendTask(*pool, request_of({sequence}, 2), attender); }) == ErrorCode::kArgument);
  AttendRequest short_q = request_of({sequence, sequence});
  short_q.q.resize(short_q.q.size() / 2);
  CHECK(code_of([&] { AttendTask(*pool, std::move(short_q), attender); }) == ErrorCode::kArgument);
  const auto other = make_attendable(2);
  CHECK(code_of([&] { AttendTask(*other, request_of({sequence}), attender); }) == ErrorCode::kNotOwner);
  sequence->close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 2);
}

TEST_CASE("attention is computed once when a thread of the pool and waiting threads meet") {
  const auto pool = make_attendable(8);
  const Addresses addresses = alloc(*pool, 8);
  fill_values(*pool, addresses, 0, 1.5F);
  const auto sequence = std::make_shared<Sequence>(*pool, addresses, std::nullopt);
  Attender attender(pool->executor(), 2);
  for (int round = 0; round < 50; ++round) {
    const auto task = std::make_shared<AttendTask>(*pool, request_of({sequence}), attender);
    std::atomic<int> ended{0};
    const auto wait = [&] { ended += task->wait(monotonic_ns() + kSecondsNs) ? 1 : 0; };
    attender.start(task);
    std::thread other(wait);
    wait();
    other.join();
    CHECK(ended == 2);
    CHECK(finished(*task).front() == std::vector<float>(2 * kDim, 1.5F));
  }
}

TEST_CASE("an Attender ends when the attention that it has begun has ended") {
  const auto pool = make_attendable(8);
  const auto sequence = std::make_shared<Sequence>(*pool, alloc(*pool, 8), std::nullopt);
  for (int round = 0; round < 50; ++round) {
    std::shared_ptr<AttendTask> task;
    {
      Attender attender(pool->executor(), 3);
      task = std::make_shared<AttendTask>(*pool, request_of({sequence}), attender);
      attender.start(task);
    }
    CHECK(task->done());
    CHECK_NOTHROW(task->rethrow_if_failed());
  }
}

TEST_CASE("an Attender that is stopped waits for the attention that another thread computes") {
  const auto pool = make_attendable(8);
  const auto sequence = std::make_shared<Sequence>(*pool, alloc(*pool, 8), std::nullopt);
  for (int round = 0; round < 50; ++round) {
    Attender attender(pool->executor(), 1);
    AttendTask task(*pool, request_of({sequence}), attender);
    std::atomic<bool> waits{false};
    std::thread other([&] {
      waits = true;
      task.wait(monotonic_ns() + kSecondsNs);
    });
    while (!waits) std::this_thread::yield();
    attender.stop();  // either the computation has ended, or it does not begin
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
  const auto pool = make_attendable(2);
  const auto sequence = std::make_shared<Sequence>(*pool, alloc(*pool, 1), std::nullopt);
  Attender attender(pool->executor(), 1);
  AttendTask task(*pool, request_of({sequence}), attender);
  pool->close();
  CHECK(task.wait(monotonic_ns() + kSecondsNs));
  CHECK(code_of([&] { task.rethrow_if_failed(); }) == ErrorCode::kClosed);
}

}  // namespace
}  // namespace kvpool::testing
