// Channels between two ranks, one or both of which have their memory on a (fake) GPU.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block_memory.h"
#include "child_process.h"
#include "device_kit.h"
#include "fuzz_seeds.h"
#include "kvpool/cuda/order.h"
#include "peer_process.h"
#include "rank_on_gpu.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

const std::vector<std::string> kGpuRoutes = {"loopback", "cuda_ipc", "sock", "nccl"};

std::vector<std::byte> content_of(const MediaSpans& spans, Address address, std::size_t bytes) {
  std::vector<std::byte> content(bytes);
  for (std::size_t i = 0; i < bytes; ++i) content[i] = content_byte(span_of(spans, address), block_of(address), i);
  return content;
}

TEST_CASE("ranks on GPUs exchange blocks with ranks on GPUs and ranks without") {
  const FakeCuda cuda;
  {
    const std::vector<std::string> all = {"loopback", "shm", "cuda_ipc", "sock"};
    RankHere a(0, all, on_gpu(0));
    RankHere b(1, all, on_gpu(1));
    RankHere far(2, all, on_gpu(2));  // a GPU that the first two do not reach
    RankHere host(3, all);
    RankHere* const ranks[] = {&a, &b, &far, &host};
    for (RankHere* from : ranks) {
      std::vector<MetadataRank> later;
      for (RankHere* to : ranks) {
        if (to->number > from->number) later.push_back(to->metadata());
      }
      from->channels.meet(meeting_of(5, later), in_seconds(10));
    }
    std::uint8_t value = 10;
    for (RankHere* from : ranks) {
      for (RankHere* to : ranks) {
        if (from == to) continue;
        CAPTURE(from->number);
        CAPTURE(to->number);
        fill(cuda, *from, 3, ++value);
        fill(cuda, *to, 6, 1);
        fill(cuda, *to, 7, 2);
        CHECK_FALSE(send(*from, *to, {from->at(3)}, {to->at(6)}));
        CHECK(is(cuda, *to, 6, value));
        CHECK(is(cuda, *to, 7, 2));
      }
    }
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("strips of blocks in any layout are sent between ranks on GPUs as they are in ordinary memory") {
  for (const std::uint64_t seed : fuzz_seeds()) {
    announce_fuzz("ranks on GPUs", seed);
    Dice dice(seed);
    for (const std::string& route : kGpuRoutes) {
      CAPTURE(route);
      const FakeCuda cuda;
      cuda.set("delay_us", 10);
      RankSpec spec_a = on_gpu(0);
      spec_a.pieces = {96, 160, 512};
      spec_a.aggregated = dice.one_in(2);
      const int gpu_of_b = static_cast<int>(dice.below(2));
      RankSpec spec_b = on_gpu(route == "nccl" ? 1 : gpu_of_b);  // NCCL refuses two ranks on one GPU
      spec_b.pieces = {64, 448};
      spec_b.aggregated = dice.one_in(2);
      RankHere a(0, {route}, spec_a);
      RankHere b(1, {route}, spec_b);
      a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(10));
      for (int step = 0; step < fuzz_length(6); ++step) {
        RankHere& from = dice.one_in(2) ? a : b;
        RankHere& to = &from == &a ? b : a;
        const std::size_t from_bytes = &from == &a ? 768 : 512;
        const std::size_t to_bytes = &to == &a ? 768 : 512;
        const MediaSpans source = host_view(cuda, from);
        const MediaSpans target = host_view(cuda, to);
        const Order order{{}, {from.at(1), from.at(4), from.at(5)}, {to.at(7), to.at(0), to.at(2)}};
        for (std::size_t i = 0; i < from_bytes; ++i) {
          for (const Address address : order.from) {
            content_byte(span_of(source, address), block_of(address), i) = static_cast<std::byte>(dice.below(256));
          }
        }
        ChannelWrite channel{to.number, 0, random_strips(dice, from_bytes, to_bytes)};
        channel.bytes = strip_bytes(channel.strips);
        std::vector<std::vector<std::byte>> expected;
        for (std::size_t i = 0; i < order.to.size(); ++i) {
          std::vector<std::byte> content = content_of(target, order.to[i], to_bytes);
          const std::vector<std::byte> sent = content_of(source, order.from[i], from_bytes);
          for (const BlockStrip& strip : channel.strips) {
            std::memcpy(content.data() + strip.to, sent.data() + strip.from, strip.bytes);
          }
          expected.push_back(std::move(content));
        }
        const auto outcome = std::make_shared<Outcome>();
        give(from, 5, {{channel}, order.from, order.to}, outcome);
        REQUIRE(soon([&] { return outcome->reports == 1; }));
        REQUIRE(outcome->code == -1);
        for (std::size_t i = 0; i < order.to.size(); ++i) {
          CHECK(content_of(target, order.to[i], to_bytes) == expected[i]);
        }
      }
    }
  }
}

TEST_CASE("an order of a rank on a GPU reads the results of earlier work of that GPU, and waits for it once") {
  for (const std::string& route : kGpuRoutes) {
    CAPTURE(route);
    const FakeCuda cuda;
    const EngineStream engine(cuda);
    RankHere a(0, {route}, on_gpu(0));
    RankHere b(1, {route}, on_gpu(1));
    RankHere c(2, {route}, on_gpu(1));
    a.channels.meet(meeting_of(5, {b.metadata(), c.metadata()}), in_seconds(10));
    fill(cuda, a, 3, 10);
    std::atomic<bool> may_end{false};
    engine.run([&] {
      while (!may_end) usleep(100);
      fill(cuda, a, 3, 70);
    });
    const auto outcome = std::make_shared<Outcome>();
    const auto asked = [&] { return cuda.count("cuCtxSynchronize") + cuda.count("cuCtxRecordEvent"); };
    const std::size_t before = asked();
    give(a, 5, {{part(1, 0, kPiece), part(2, 0, kPiece)}, {a.at(3)}, {b.at(6)}}, outcome, 20,
         DeviceOrder::after(CudaContext::retain(0, "a test"), std::nullopt));
    CHECK(soon([&] { return asked() == before + 1; }));
    CHECK(outcome->reports == 0);
    may_end = true;
    REQUIRE(soon([&] { return outcome->reports == 1; }));
    CHECK(outcome->code == -1);
    CHECK(is(cuda, b, 6, 70));
    CHECK(is(cuda, c, 6, 70));
    CHECK(asked() == before + 1);
  }
}

TEST_CASE("a rank that loses its GPU in a write does not report the end of its writes, and tells its own process") {
  for (const std::string& route : kGpuRoutes) {
    CAPTURE(route);
    const FakeCuda cuda;
    RankHere a(0, {route}, on_gpu(0));
    RankHere b(1, {route}, on_gpu(1));
    a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(10));
    cuda.lose(0, 719);
    CHECK(send(a, b, {a.at(3)}, {b.at(6)}) == ErrorCode::kPeerLost);
    CHECK(a.device_lost);
    std::atomic<int> clear{0};
    const Error why(ErrorCode::kPeerLost, "over");
    b.channels.depart(5, why, [&] { ++clear; });
    // How far the GPU of a had come is unknown. By sock and nccl it could not write at all.
    if (route == "sock" || route == "nccl") {
      CHECK(soon([&] { return clear == 1; }));
    } else {
      usleep(20'000);
      CHECK(clear == 0);
    }
  }
}

TEST_CASE("if any driver call fails in an order, the order reports, and a later meeting works") {
  for (const std::string& route : kGpuRoutes) {
    int failures = 0;
    for (int n = 1;; ++n) {
      CAPTURE(route);
      CAPTURE(n);
      const FakeCuda cuda;
      cuda.set("delay_us", 10);
      bool reached = false;
      {
        RankHere a(0, {route}, on_gpu(0));
        RankHere b(1, {route}, on_gpu(1));
        a.channels.meet(meeting_of(5, {b.metadata()}), in_seconds(10));
        fill(cuda, a, 3, 10);
        cuda.fail_nth(n, 304);
        const auto failure = send(a, b, {a.at(3)}, {b.at(6)});
        reached = cuda.failed();
        cuda.fail_nth(0, 0);
        if (failure) {
          ++failures;
          const bool own = *failure == ErrorCode::kRouteFailed || *failure == ErrorCode::kUnsupported;
          CHECK((*failure == ErrorCode::kPeerLost || own));
        } else {
          CHECK(is(cuda, b, 6, 10));
        }
        const Error why(ErrorCode::kPeerLost, "over");
        std::atomic<int> clear{0};
        for (RankHere* side : {&a, &b}) side->channels.depart(5, why, [&] { ++clear; });
        REQUIRE(soon([&] { return clear == 2; }));
        a.channels.meet(meeting_of(6, {b.metadata()}), in_seconds(10));
        const auto outcome = std::make_shared<Outcome>();
        give(a, 6, {{part(1, 0, kPiece)}, {a.at(3)}, {b.at(5)}}, outcome, 20);
        REQUIRE(soon([&] { return outcome->reports == 1; }));
        CHECK(outcome->code == -1);
        CHECK(is(cuda, b, 5, 10));
      }
      CHECK(cuda.left().find("bytes") == std::string::npos);
      if (!reached) break;
    }
    CHECK(failures >= 3);
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
