// The ucx transport within one process: what it writes, what it refuses, how it ends.
#include <dlfcn.h>

#include <filesystem>
#include <thread>

#include "child_process.h"
#include "kvpool/base/fork_guard.h"
#include "ucx_kit.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// Two pools' memory of the same content length.
struct Pair {
  explicit Pair(const SpanShape& shape, bool shared = true) : a(shape, shape, shared), b(shape, shape, shared) {
    a.start();
    b.start();
    to_b = a.worker().make_route(b.metadata());
  }
  UcxSide a;
  UcxSide b;
  std::shared_ptr<UcxRoute> to_b;
};

void write_random_layouts(std::uint64_t seed, int rounds) {
  announce_fuzz("ucx layouts", seed);
  Dice dice(seed);
  for (int round = 0; round < fuzz_length(rounds); ++round) {
    const std::uint32_t blocks = 1 + dice.below(40);
    const std::size_t bytes = 1 + dice.below(9000);
    UcxSide a(random_shape(dice, blocks, bytes), random_shape(dice, blocks, bytes), dice.one_in(2));
    UcxSide b(random_shape(dice, blocks, bytes), random_shape(dice, blocks, bytes), dice.one_in(2));
    fill_random(dice, a.memory(), a.bytes());
    fill_random(dice, b.memory(), b.bytes());
    a.start();
    b.start();
    const auto route = a.worker().make_route(b.metadata());
    for (int write = 0; write < 8; ++write) {
      const auto from = random_blocks(dice, blocks, 1 + dice.below(2 * blocks));
      auto to = random_blocks(dice, blocks, from.size());
      const auto strips = random_strips(dice, bytes, bytes);
      std::vector<std::byte> before(b.memory(), b.memory() + b.bytes());
      MediaSpans expected = b.spans();
      for (MediumSpan& span : expected) {
        for (Segment& segment : span.segments) segment.base = before.data() + (segment.base - b.memory());
      }
      naive_write(a.spans(), expected, strips, from, to);
      const WriteOutcome outcome = write_blocks(*route, strips, from, to);
      CHECK(outcome.bytes == strip_bytes(strips) * from.size());
      REQUIRE(std::equal(before.begin(), before.end(), b.memory()));
    }
  }
}

}  // namespace

TEST_CASE("UCX: writes of random layouts are exact") {
  if (!alone("UCX: writes of random layouts are exact")) return;
  for (const auto seed : fuzz_seeds()) write_random_layouts(seed, 8);
}

TEST_CASE("UCX: writes of random layouts over tcp are exact") {
  if (!alone("UCX: writes of random layouts over tcp are exact", {"UCX_TLS=tcp"})) return;
  for (const auto seed : fuzz_seeds()) write_random_layouts(seed, 3);
}

TEST_CASE("UCX: eight threads write a thousand times at once") {
  if (!alone("UCX: eight threads write a thousand times at once")) return;
  constexpr std::uint32_t kThreads = 8;
  constexpr std::uint32_t kEach = 125;
  constexpr std::size_t kBlock = 8192;
  Pair pair(plain_shape(kThreads * kEach, {kBlock}));
  Dice dice(1);
  fill_random(dice, pair.a.memory(), pair.a.bytes());
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        const std::uint32_t block = thread * kEach + i;
        try {
          write_blocks(*pair.to_b, {{0, 0, 100}, {100, 100, kBlock - 100}}, blocks_of(Medium::kDram, block, 1),
                       blocks_of(Medium::kDram, block, 1));
        } catch (const Error&) {
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  const std::size_t half = pair.a.bytes() / 2;  // DRAM is the second
  CHECK(std::equal(pair.a.memory() + half, pair.a.memory() + 2 * half, pair.b.memory() + half));
}

TEST_CASE("UCX: eight threads write a thousand times at once over tcp") {
  if (!alone("UCX: eight threads write a thousand times at once over tcp", {"UCX_TLS=tcp"})) return;
  constexpr std::size_t kBlock = 100'000;
  Pair pair(plain_shape(64, {kBlock}));
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (std::uint32_t thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      std::memset(pair.a.memory() + thread * 8 * kBlock, static_cast<int>(thread + 1), 8 * kBlock);
      for (std::uint32_t i = 0; i < 125; ++i) {
        const auto block = blocks_of(Medium::kHbm, thread * 8 + i % 8, 1);
        if (write_blocks(*pair.to_b, {{0, 0, kBlock}}, block, block).bytes == kBlock) ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(done == 1000);
  CHECK(std::equal(pair.a.memory(), pair.a.memory() + 64 * kBlock, pair.b.memory()));
}

TEST_CASE("UCX: closing a route or a worker ends the writes of other threads") {
  if (!alone("UCX: closing a route or a worker ends the writes of other threads", {"UCX_TLS=tcp"})) return;
  constexpr std::size_t kBlock = 1 << 20;
  Pair pair(plain_shape(8, {kBlock}));
  const auto blocks = blocks_of(Medium::kHbm, 0, 8);
  for (const bool whole_worker : {false, true}) {
    const auto route = pair.a.worker().make_route(pair.b.metadata());
    std::atomic<int> lost{0};
    std::vector<std::thread> threads;
    threads.reserve(3);
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] {
        if (code_of([&] {
              for (;;) write_blocks(*route, {{0, 0, kBlock}}, blocks, blocks);
            }) == ErrorCode::kPeerLost)
          ++lost;
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (whole_worker) {
      CHECK(pair.a.worker().close());
      CHECK(pair.a.worker().close());
    } else {
      route->close();
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(lost == 3);
    route->close();
    CHECK(route->lanes().empty());
  }
  CHECK(code_of([&] { pair.a.worker().make_route(pair.b.metadata()); }) == ErrorCode::kClosed);
}

TEST_CASE("UCX: workers and routes that come and go leave nothing behind") {
  if (!alone("UCX: workers and routes that come and go leave nothing behind")) return;
  const SpanShape shape = plain_shape(64, {64 << 10});
  const auto block = blocks_of(Medium::kHbm, 3, 1);
  const auto mapped_kb = [] {
    long pages = 0;
    long resident = 0;
    FILE* file = std::fopen("/proc/self/statm", "r");
    REQUIRE(file != nullptr);
    REQUIRE(std::fscanf(file, "%ld %ld", &pages, &resident) == 2);
    std::fclose(file);
    return resident * 4;
  };
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  long kb = 0;
  for (int round = 0; round < 30; ++round) {
    {
      UcxSide a(shape, shape, true);
      a.start();
      UcxSide b(shape, shape, true);
      b.start();
      for (int i = 0; i < 5; ++i) write_blocks(*a.worker().make_route(b.metadata()), {{0, 0, 4096}}, block, block);
    }
    if (round == 5) {
      descriptors = entries("/proc/self/fd");
      threads = entries("/proc/self/task");
      kb = mapped_kb();
    }
  }
  CHECK(entries("/proc/self/fd") == descriptors);
  CHECK(entries("/proc/self/task") == threads);
#if defined(__SANITIZE_ADDRESS__)
  constexpr long kKept = 256 * 1024;  // what was freed, for a while
#else
  constexpr long kKept = 0;
#endif
  CHECK(mapped_kb() < kb + kKept + 25 * 1024);  // 24 rounds more, each with 16 MiB of blocks
}

TEST_CASE("UCX: a forked child is refused and frees nothing") {
  if (!alone("UCX: a forked child is refused and frees nothing")) return;
  Pair pair(plain_shape(8, {4096}));
  const auto block = blocks_of(Medium::kHbm, 0, 1);
  write_blocks(*pair.to_b, {{0, 0, 4096}}, block, block);
  CHECK(test::run_in_child([&] {
          const auto write = [&] { write_blocks(*pair.to_b, {{0, 0, 4096}}, block, block); };
          const auto connect = [&] { pair.a.worker().make_route(pair.b.metadata()); };
          if (code_of(write) != ErrorCode::kFork || code_of(connect) != ErrorCode::kFork) return 1;
          pair.to_b->close();
          pair.a.worker().close();
          pair.to_b.reset();
          pair.a.stop();
          pair.b.stop();
          return 0;
        }) == 0);
  CHECK(write_blocks(*pair.to_b, {{0, 0, 4096}}, block, block).bytes == 4096);
}

TEST_CASE("UCX: metadata whose keys do not open their blocks are refused") {
  if (!alone("UCX: metadata whose keys do not open their blocks are refused")) return;
  Pair pair(plain_shape(8, {4096}));
  const PeerMetadata good = pair.b.metadata();
  const auto refused = [&](const PeerMetadata& metadata) {
    return code_of([&] { pair.a.worker().make_route(metadata); }) == ErrorCode::kProtocol;
  };
  PeerMetadata metadata = good;
  metadata.media[Medium::kHbm].blocks = 9'000;
  CHECK(refused(metadata));
  metadata = good;
  metadata.media[Medium::kDram].segments[0].address -= 1 << 20;
  CHECK(refused(metadata));
  metadata = good;
  metadata.media[Medium::kDram].segments[0].stride = std::uint64_t{1} << 62;
  CHECK(refused(metadata));
  for (std::size_t bytes = 0; bytes < good.ucx.size(); ++bytes) {
    metadata = good;
    metadata.ucx.resize(bytes);
    REQUIRE(refused(metadata));
  }
  metadata = good;
  metadata.ucx.push_back(std::byte{0});
  CHECK(refused(metadata));
  CHECK(pair.a.worker().make_route(good) != nullptr);
}

TEST_CASE("UCX: blocks that do not exist are refused before anything is written") {
  if (!alone("UCX: blocks that do not exist are refused before anything is written")) return;
  Pair pair(plain_shape(8, {4096}));
  const auto wrong = [&](const std::vector<Address>& from, const std::vector<Address>& to) {
    return code_of([&] { write_blocks(*pair.to_b, {{0, 0, 4096}}, from, to); }) == ErrorCode::kArgument;
  };
  CHECK(wrong(blocks_of(Medium::kHbm, 8, 1), blocks_of(Medium::kHbm, 0, 1)));
  CHECK(wrong(blocks_of(Medium::kHbm, 0, 1), blocks_of(Medium::kDram, 8, 1)));
  CHECK(wrong(blocks_of(Medium::kHbm, 0, 2), blocks_of(Medium::kHbm, 0, 1)));
  CHECK(pair.to_b->reaches(Medium::kHbm));
  const MediaSet hbm = media_set_of(Medium::kHbm);
  CHECK(pair.to_b->estimate_us(hbm, hbm, {1, 4096}, 0) < pair.to_b->estimate_us(hbm, hbm, {100, 409'600}, 0));
}

TEST_CASE("UCX: what is missing is told with what to install") {
  // The library is not opened by these, so they need no separate process.
  for (const char* where : {"/nowhere", "wheel", ""}) {
    std::string text;
    CHECK(code_of([&] { describe_ucx(where); }, &text) == ErrorCode::kUnsupported);
    CHECK(text.find("kvpool[ucx]") != std::string::npos);
    CHECK(text.find("cuda13") != std::string::npos);
  }
}

TEST_CASE("UCX: a copy that somebody else has opened is used or refused by its name") {
  if (!alone("UCX: a copy that somebody else has opened is used or refused by its name", {}, false)) return;
  std::filesystem::path ours = ucx_place();
  if (!std::filesystem::exists(ours / "libucs.so.0")) ours /= "lib";  // of the wheel
  if (!std::filesystem::exists(ours / "libucs.so.0")) {
    MESSAGE("skipped: no folder with UCX is known");
    return;
  }
  const std::filesystem::path other = std::filesystem::temp_directory_path() / ("ucx" + std::to_string(getpid()));
  std::filesystem::create_directory(other);
  for (const char* library : {"libucm.so.0", "libucs.so.0"}) {
    std::filesystem::create_symlink(ours / library, other / library);
  }
  REQUIRE(dlopen((other / "libucs.so.0").c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
  std::string text;
  CHECK(code_of([&] { describe_ucx(ours); }, &text) == ErrorCode::kUnsupported);
  CHECK(text.find(other / "libucs.so.0") != std::string::npos);
  for (const char* library : {"libuct.so.0", "libucp.so.0"}) {
    std::filesystem::create_symlink(ours / library, other / library);
  }
  CHECK(describe_ucx("/elsewhere").find(other) != std::string::npos);
  std::filesystem::remove_all(other);
}
