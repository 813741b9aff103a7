#include "kvpool/base/copy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"
#include "kvpool/base/copy_kernel.h"
#include "lent_team.h"

namespace kvpool {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(&bytes[at], &word, 8);
  }
  for (; at < count; ++at) {
    bytes[at] = static_cast<std::byte>(random());
  }
  return bytes;
}

// Two equal pairs of buffers: one for the code under test, one for memcpy. The buffers are compared in full, so that a
// byte written outside of the pieces is found as well.
class Trial {
 public:
  explicit Trial(std::size_t capacity, std::uint64_t seed = 1)
      : source_(random_bytes(capacity, seed)), actual_(random_bytes(capacity, seed + 1)), expected_(actual_) {}

  void add(std::size_t dst, std::size_t src, std::size_t bytes) {
    REQUIRE(dst + bytes <= actual_.size());
    REQUIRE(src + bytes <= source_.size());
    pieces_.push_back(CopyPiece{actual_.data() + dst, source_.data() + src, bytes});
    std::copy_n(source_.begin() + static_cast<std::ptrdiff_t>(src), bytes,
                expected_.begin() + static_cast<std::ptrdiff_t>(dst));
  }

  // Fills the buffers with pieces of these sizes: destinations in order with gaps between them, sources anywhere.
  void add_all(const std::vector<std::size_t>& sizes, std::mt19937_64& random, std::size_t gap_max) {
    std::size_t dst = random() % 64;
    for (const std::size_t bytes : sizes) {
      add(dst, random() % (source_.size() - bytes + 1), bytes);
      dst += bytes + random() % (gap_max + 1);
    }
    std::shuffle(pieces_.begin(), pieces_.end(), random);
  }

  std::span<const CopyPiece> pieces() const { return pieces_; }
  bool is_copied() const { return actual_ == expected_; }
  std::size_t address_modulo(std::size_t modulus) const {
    return reinterpret_cast<std::uintptr_t>(actual_.data()) % modulus;
  }

 private:
  Bytes source_;
  Bytes actual_;
  Bytes expected_;
  std::vector<CopyPiece> pieces_;
};

int copy_threads_alive() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    count += name == "kvpool-work" ? 1 : 0;
  }
  return count;
}

std::vector<std::size_t> sizes_of_total(std::size_t total, std::size_t piece_max, std::mt19937_64& random) {
  std::vector<std::size_t> sizes;
  while (total > 0) {
    sizes.push_back(std::min<std::size_t>(total, random() % (piece_max + 1)));
    total -= sizes.back();
  }
  return sizes;
}

TEST_CASE("every copy kernel copies tiles of all sizes at random alignments") {
  for (const CopyKernel& kernel : copy_kernels()) {
    CAPTURE(kernel.name);
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      CAPTURE(seed);
      std::vector<std::size_t> sizes;
      for (std::size_t bytes = 0; bytes <= 4096; ++bytes) {
        sizes.push_back(bytes);
      }
      std::mt19937_64 random(seed);
      Trial trial(std::size_t{9} << 20, seed);
      trial.add_all(sizes, random, 70);
      kernel.copy(trial.pieces());
      CHECK(trial.is_copied());
    }
  }
}

TEST_CASE("every copy kernel copies at each alignment of source and destination") {
  for (const CopyKernel& kernel : copy_kernels()) {
    CAPTURE(kernel.name);
    for (const std::size_t bytes : {511, 512, 513, 639, 640, 1024, 4033, 4096}) {
      CAPTURE(bytes);
      Trial trial(64 * 8192 + 128, bytes);
      for (std::size_t dst = 0; dst < 64; ++dst) {
        trial.add(dst * 8192 + dst, (dst * 8191 + bytes) % 4096 + dst / 8, bytes);
      }
      kernel.copy(trial.pieces());
      CHECK(trial.is_copied());
      for (std::size_t src = 0; src < 64; ++src) {
        Trial one(3 * 4096, src);
        one.add(64 - one.address_modulo(64), src, bytes);
        one.add(4096 + 64 + 17, src + 64, bytes);
        kernel.copy(one.pieces());
        CHECK(one.is_copied());
      }
    }
  }
}

TEST_CASE("every copy kernel copies groups of full, short and missing tiles") {
  for (const CopyKernel& kernel : copy_kernels()) {
    CAPTURE(kernel.name);
    for (std::size_t count = 0; count <= 40; ++count) {
      std::mt19937_64 random(count);
      std::vector<std::size_t> sizes;
      for (std::size_t i = 0; i < count; ++i) {
        sizes.push_back(random() % 3 == 0 ? random() % 4097 : 4096);
      }
      Trial trial(64 * 8192, count);
      trial.add_all(sizes, random, count % 2 == 0 ? 0 : 63);
      kernel.copy(trial.pieces());
      CHECK(trial.is_copied());
    }
  }
}

TEST_CASE("a team copies batches around its thresholds with any number of threads") {
  constexpr std::size_t kKib = 1024;
  for (const int threads : {0, 1, 2, 5}) {
    CAPTURE(threads);
    testing::LentTeam team(threads);
    for (const std::size_t total : {std::size_t{0}, std::size_t{1}, 256 * kKib - 1, 256 * kKib, 256 * kKib + 1,
                                    CopyTeam::kInlineBytes, CopyTeam::kInlineBytes + 1, 2000 * kKib + 17}) {
      for (const std::size_t piece_max : {std::size_t{300}, 9 * kKib, 700 * kKib}) {
        CAPTURE(total);
        CAPTURE(piece_max);
        std::mt19937_64 random(total + piece_max);
        const std::vector<std::size_t> sizes = sizes_of_total(total, piece_max, random);
        Trial trial(total + sizes.size() * 65 + 64, total);
        trial.add_all(sizes, random, 64);
        team.run(trial.pieces());
        CHECK(trial.is_copied());
      }
    }
  }
}

TEST_CASE("a team splits one large piece at any alignment") {
  testing::LentTeam team(3);
  for (const std::size_t dst : {0, 1, 63, 64, 100}) {
    Trial trial((std::size_t{6} << 20) + 4096, dst);
    trial.add(dst, 37 * dst, (std::size_t{6} << 20) - dst);
    team.run(trial.pieces());
    CHECK(trial.is_copied());
  }
}

TEST_CASE("a team accepts pieces of zero bytes without an address") {
  testing::LentTeam team(2);
  std::vector<CopyPiece> pieces(100000, CopyPiece{nullptr, nullptr, 0});
  team.run(pieces);
  const Bytes source = random_bytes(std::size_t{2} << 20, 1);
  Bytes destination(source.size());
  pieces[50000] = CopyPiece{destination.data(), source.data(), source.size()};
  team.run(pieces);
  CHECK(destination == source);
}

TEST_CASE("several threads use one team at once") {
  testing::LentTeam team(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      Bytes source = random_bytes(std::size_t{3} << 20, caller);
      Bytes destination(source.size());
      for (std::size_t round = 0; round < 12; ++round) {
        std::vector<CopyPiece> pieces;
        const std::size_t piece = std::size_t{2048} << (round % 6);
        for (std::size_t at = 0; at < source.size(); at += piece) {
          pieces.push_back(CopyPiece{&destination[source.size() - at - piece], &source[at], piece});
        }
        source[round * 4096] = static_cast<std::byte>(round);
        team.run(pieces);
        for (std::size_t at = 0; at < source.size(); at += piece) {
          if (std::memcmp(&destination[source.size() - at - piece], &source[at], piece) != 0) {
            wrong.fetch_add(1);
          }
        }
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(wrong.load() == 0);
}

TEST_CASE("workers start with the first large batch, block all signals and end with the team") {
  Trial small(CopyTeam::kInlineBytes);
  small.add(0, 0, CopyTeam::kInlineBytes);
  Trial large(std::size_t{8} << 20);
  large.add(0, 0, std::size_t{8} << 20);
  {
    CopyTeam alone;
    alone.run(large.pieces());
    CHECK(copy_threads_alive() == 0);
    testing::LentTeam team(3);
    team.run(small.pieces());
    CHECK(copy_threads_alive() == 0);
    for (int i = 0; i < 1000 && copy_threads_alive() < 2; ++i) {  // a new thread takes its name when it first runs
      team.run(large.pieces());
    }
    CHECK(copy_threads_alive() == 2);
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(task.path() / "status");
      std::string line;
      bool worker = false;
      while (std::getline(status, line)) {
        worker = worker || line == "Name:\tkvpool-work";
        if (worker && line.starts_with("SigBlk:")) {
          const std::uint64_t blocked = std::stoull(line.substr(7), nullptr, 16);
          for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPROF}) {
            CHECK((blocked >> (signal - 1) & 1) == 1);
          }
        }
      }
    }
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    CHECK(sigismember(&mask, SIGINT) == 0);  // the caller's mask is as it was
  }
  CHECK(copy_threads_alive() == 0);
}

TEST_CASE("a forked child copies alone and drops the team without waiting") {
  auto team = std::make_unique<testing::LentTeam>(3);
  Trial before(std::size_t{4} << 20, 1);
  before.add(0, 0, std::size_t{4} << 20);
  team->run(before.pieces());
  const int status = test::run_in_child([&] {
    alarm(30);
    Trial trial(std::size_t{4} << 20, 3);
    trial.add(0, 0, std::size_t{4} << 20);
    team->run(trial.pieces());
    team.reset();
    return trial.is_copied() ? 0 : 1;
  });
  CHECK(status == 0);
  Trial after(std::size_t{4} << 20, 5);
  after.add(0, 0, std::size_t{4} << 20);
  team->run(after.pieces());
  CHECK(after.is_copied());
}

TEST_CASE("a child that is forked in the middle of a copy does not wait for its parent's locks") {
  auto team = std::make_unique<testing::LentTeam>(3);
  Trial busy(std::size_t{2} << 20, 1);  // of tiny pieces, so that the lock is taken often
  for (std::size_t at = 0; at < std::size_t{2} << 20; at += 64) {
    busy.add(at, at, 64);
  }
  std::atomic<bool> stop{false};
  std::thread parent([&] {
    while (!stop.load()) {
      team->run(busy.pieces());
    }
  });
  Trial trial(std::size_t{2} << 20, 3);
  trial.add(0, 0, std::size_t{2} << 20);
  int status = 0;
  for (int i = 0; i < 16 && status == 0; ++i) {
    status = test::run_in_child([&] {
      alarm(20);
      team->run(trial.pieces());
      team.reset();
      return trial.is_copied() ? 0 : 1;
    });
  }
  stop.store(true);
  parent.join();
  CHECK(status == 0);
}

TEST_CASE("a caller copies alone when no thread can be started") {
  if (!test::kChildMayStartThreads) {
    return;
  }
  const int status = test::run_in_child([] {
    Trial trial(std::size_t{4} << 20);
    trial.add(1, 2, (std::size_t{4} << 20) - 2);
    testing::LentTeam team(4);
    if (!test::refuse_calls({{.number = SYS_clone3, .error = EAGAIN}, {.number = SYS_clone, .error = EAGAIN}})) {
      return test::kChildSkipped;
    }
    team.run(trial.pieces());
    return trial.is_copied() && copy_threads_alive() == 0 ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

// Counts its parts, from whichever thread; the counters are what ThreadSanitizer looks at, too.
struct PartCounter {
  explicit PartCounter(std::size_t parts) : seen(parts) {}
  static void call(void* self, std::size_t index) noexcept { ++static_cast<PartCounter*>(self)->seen[index]; }
  bool each_once() const {
    return std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; });
  }
  std::vector<int> seen;
};

TEST_CASE("parts of a job are each done once, beside copies of other callers") {
  for (const int threads : {1, 2, 4}) {
    testing::LentTeam team(threads);
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        for (int i = 0; i < 50; ++i) {
          PartCounter counter(static_cast<std::size_t>(i));
          team.run_parts(counter.seen.size(), PartCounter::call, &counter);
          if (!counter.each_once()) ++wrong;
          if (i % 10 == 0) {
            Trial trial(std::size_t{2} << 20, static_cast<std::uint64_t>(caller));
            trial.add(0, 0, std::size_t{2} << 20);
            team.run(trial.pieces());
            if (!trial.is_copied()) ++wrong;
          }
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    CHECK(wrong.load() == 0);
  }
}

TEST_CASE("a forked child does all parts of a job alone") {
  auto team = std::make_unique<testing::LentTeam>(3);
  PartCounter before(8);
  team->run_parts(8, PartCounter::call, &before);
  const int status = test::run_in_child([&] {
    PartCounter counter(8);
    team->run_parts(8, PartCounter::call, &counter);
    team.reset();
    return counter.each_once() && copy_threads_alive() == 0 ? 0 : 1;
  });
  CHECK(status == 0);
  CHECK(before.each_once());
}

TEST_CASE("both ways to copy give the same bytes") {
  for (const CopyWay way : {CopyWay::kCached, CopyWay::kStreaming}) {
    std::mt19937_64 random(7);
    Trial trial(std::size_t{1} << 20);
    trial.add_all({0, 1, 63, 64, 65, 4095, 4096, 4097, 16384, 100'000, 300'001}, random, 3);
    copy_pieces(trial.pieces(), way);
    CHECK(trial.is_copied());
  }
}

}  // namespace
}  // namespace kvpool
