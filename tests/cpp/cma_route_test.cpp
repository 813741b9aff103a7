#include "kvpool/routes/host/cma_route.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <thread>

#include "child_process.h"
#include "kvpool/base/clock.h"
#include "kvpool/routes/tracers.h"
#include "lent_team.h"
#include "peer_process.h"
#include "route_trial.h"
#include "soon.h"

namespace kvpool {
namespace {

using testing::code_of;
using testing::Dice;
using testing::PeerProcess;
using testing::Trial;

PeerMetadata metadata_of(const MediaSpans& spans) {
  PeerMetadata metadata;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    metadata.media[i].blocks = spans[i].blocks;
    for (const Segment& segment : spans[i].segments) {
      metadata.media[i].segments.push_back(
          {reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
    }
  }
  return metadata;
}

// Whether this machine lets a process write into its child at all.
bool machine_has_cma() {
  PeerProcess peer([](const auto& wait) { return wait() ? 0 : 1; });
  char here = 0;
  const iovec range{&here, 1};
  const bool has = peer.pidfd() >= 0 && process_vm_readv(peer.pid(), &range, 1, &range, 1, 0) == 1;
  if (!has) MESSAGE("this machine refuses process_vm_readv or pidfd_open: not tested");
  return has;
}

std::byte* anonymous(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return static_cast<std::byte*>(memory);
}

// One medium, aggregated, at `base`.
MediaSpans spans_at(std::byte* base, std::uint32_t blocks, std::size_t bytes) {
  MediaSpans spans;
  spans[0] = MediumSpan{blocks, {Segment{base, bytes, bytes}}};
  return spans;
}

// Every block to itself.
struct WholeWrite {
  WholeWrite(std::uint32_t count, std::size_t bytes) : strip{0, 0, bytes} {
    for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(make_address(0, Medium::kHbm, 0, i));
  }
  WriteRequest request() const {
    WriteRequest request;
    request.strips = {&strip, 1};
    request.from = blocks;
    request.to = blocks;
    request.merge = false;
    request.deadline_ns = monotonic_ns() + 60 * testing::kSecondNs;
    return request;
  }
  BlockStrip strip;
  std::vector<Address> blocks;
};

TEST_CASE("cma writes into another process what a naive copy writes") {
  if (!machine_has_cma()) return;
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("cma", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(10); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Trial trial = round % 5 == 0 ? Trial::large(dice) : Trial::small(dice);
      // The child has a separate copy of the target, at the same addresses.
      PeerProcess peer([&](const auto& wait) {
        if (!allow_tracers() || !wait()) return 2;
        return trial.target == trial.expected ? 0 : 1;
      });
      const testing::BlockMemory before(trial.target);
      testing::LentTeam team(2);
      const auto route = make_cma_route(trial.source.spans(), nullptr, metadata_of(trial.target.spans()), peer.pid(),
                                        peer.pidfd(), team);
      const WriteOutcome outcome = testing::write_whole(*route, trial);
      CHECK(
          outcome.pieces ==
          StripPlan(trial.source.spans(), trial.target.spans(), trial.strips, trial.merge).count(trial.from, trial.to));
      CHECK(outcome.calls == (trial.gather ? (outcome.pieces + kPieceBatch - 1) / kPieceBatch : outcome.pieces));
      peer.go();
      CHECK(peer.wait() == 0);
      CHECK(trial.target == before);
    }
  }
}

TEST_CASE("a list of cma that the threads of a team share is one call") {
  if (!machine_has_cma()) return;
  constexpr std::uint32_t kBlocks = 100;
  constexpr std::size_t kBytes = std::size_t{256} << 10;
  std::byte* memory = anonymous(2 * kBlocks * kBytes);
  std::byte* const there = memory + kBlocks * kBytes;
  PeerProcess peer([&](const auto& wait) { return allow_tracers() && wait() ? 0 : 2; });
  CopyTeam team;
  const auto route = make_cma_route(spans_at(memory, kBlocks, kBytes), nullptr,
                                    metadata_of(spans_at(there, kBlocks, kBytes)), peer.pid(), peer.pidfd(), team);
  const WholeWrite write(kBlocks, kBytes);
  const WriteOutcome gathered = route->write(write.request());
  CHECK(gathered.calls == 1);
  CHECK(gathered.pieces == kBlocks);
  WriteRequest request = write.request();
  request.gather = false;
  CHECK(route->write(request).calls == kBlocks);
  peer.go();
  CHECK(peer.wait() == 0);
  munmap(memory, 2 * kBlocks * kBytes);
}

TEST_CASE("the kernel takes pieces in lists by cma, and one by one if they must not be gathered") {
  if (!machine_has_cma()) return;
  constexpr std::uint32_t kBlocks = 1500;
  constexpr std::size_t kBytes = 256;
  std::byte* memory = anonymous(2 * kBlocks * kBytes);
  for (std::size_t i = 0; i < kBlocks * kBytes; ++i) memory[i] = static_cast<std::byte>(i / kBytes % 251);
  std::byte* const there = memory + kBlocks * kBytes;
  PeerProcess peer([&](const auto& wait) {
    if (!allow_tracers() || !wait()) return 2;
    return std::memcmp(memory, there, kBlocks * kBytes) == 0 ? 0 : 1;
  });
  CopyTeam team;
  const auto route = make_cma_route(spans_at(memory, kBlocks, kBytes), nullptr,
                                    metadata_of(spans_at(there, kBlocks, kBytes)), peer.pid(), peer.pidfd(), team);
  const WholeWrite write(kBlocks, kBytes);
  WriteRequest request = write.request();
  request.gather = false;
  CHECK(route->write(request).calls == kBlocks);
  request.gather = true;
  const WriteOutcome gathered = route->write(request);
  CHECK(gathered.calls == 2);  // lists of up to 1,024
  CHECK(gathered.pieces == kBlocks);
  peer.go();
  CHECK(peer.wait() == 0);
  munmap(memory, 2 * kBlocks * kBytes);
}

TEST_CASE("cma refuses what every route refuses") {
  if (!machine_has_cma()) return;
  Dice dice(5);
  const Trial trial(dice, 20, 100, 100);
  REQUIRE(trial.from.size() > 1);
  PeerProcess peer([](const auto& wait) { return wait() ? 0 : 1; });
  CopyTeam team;
  const auto route =
      make_cma_route(trial.source.spans(), nullptr, metadata_of(trial.target.spans()), peer.pid(), peer.pidfd(), team);
  CHECK(std::string(route->name()) == "cma");
  CHECK(route->traits().one_sided);
  CHECK(route->reaches(Medium::kHbm));
  testing::check_refusals(*route, trial);
}

TEST_CASE("cma reports a peer that is killed in the middle of a write as lost") {
  if (!machine_has_cma()) return;
  constexpr std::uint32_t kBlocks = 64;
  constexpr std::size_t kBytes = 256 << 10;
  std::byte* memory = anonymous(kBlocks * kBytes);
  for (const int threads : {1, 2}) {
    PeerProcess peer([&](const auto& wait) { return wait() ? 0 : 1; });
    testing::LentTeam team(threads);
    const MediaSpans spans = spans_at(memory, kBlocks, kBytes);
    const auto route = make_cma_route(spans, nullptr, metadata_of(spans), peer.pid(), peer.pidfd(), team);
    const WholeWrite write(kBlocks, kBytes);
    std::atomic<std::uint64_t> done{0};
    std::thread killer([&] {
      testing::sleep_while([&] { return done.load() < kBytes; });
      peer.kill_and_wait();
    });
    WriteRequest request = write.request();
    request.bytes_done = &done;
    std::optional<ErrorCode> code;
    while (!code) code = code_of([&] { route->write(request); });
    killer.join();
    CHECK(code == ErrorCode::kPeerLost);
    CHECK(code_of([&] { make_cma_route(spans, nullptr, metadata_of(spans), peer.pid(), peer.pidfd(), team); }) ==
          ErrorCode::kPeerLost);
  }
  munmap(memory, kBlocks * kBytes);
}

TEST_CASE("cma writes into a peer that is stopped") {
  if (!machine_has_cma()) return;
  alignas(64) std::byte bytes[4096]{};
  PeerProcess peer([](const auto& wait) { return wait() ? 0 : 1; });
  peer.signal(SIGSTOP);
  const MediaSpans spans = spans_at(bytes, 1, sizeof(bytes));
  CopyTeam team;
  const auto route = make_cma_route(spans, nullptr, metadata_of(spans), peer.pid(), peer.pidfd(), team);
  const WholeWrite write(1, sizeof(bytes));
  CHECK(route->write(write.request()).bytes == sizeof(bytes));
}

TEST_CASE("cma names the cause: no memory there, a hole in it, no pidfd, not allowed") {
  if (!machine_has_cma()) return;
  constexpr std::uint32_t kBlocks = 16;
  constexpr std::size_t kBytes = 8192;
  std::byte* memory = anonymous(kBlocks * kBytes);
  const MediaSpans spans = spans_at(memory, kBlocks, kBytes);
  CopyTeam team;
  PeerProcess peer([&](const auto& wait) {
    munmap(memory + 10 * kBytes, kBytes);
    return wait() && wait() ? 0 : 1;
  });
  const auto make = [&](const PeerMetadata& metadata, int pidfd) {
    return make_cma_route(spans, nullptr, metadata, peer.pid(), pidfd, team);
  };
  CHECK(code_of([&] { make(metadata_of(spans), -1); }) == ErrorCode::kUnsupported);
  const PeerProcess other([](const auto& wait) { return wait() ? 0 : 1; });
  CHECK(code_of([&] { make(metadata_of(spans), other.pidfd()); }) == ErrorCode::kProtocol);
  PeerMetadata wrong = metadata_of(spans);
  wrong.media[Medium::kHbm].segments[0].address = 16;
  CHECK(code_of([&] { make(wrong, peer.pidfd()); }) == ErrorCode::kProtocol);

  const auto route = make(metadata_of(spans), peer.pidfd());
  const WholeWrite write(kBlocks, kBytes);
  std::optional<ErrorCode> code;
  // Its munmap may come a moment later.
  for (int i = 0; i < 1000 && !code; ++i) {
    code = code_of([&] { route->write(write.request()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(code == ErrorCode::kProtocol);
  munmap(memory, kBlocks * kBytes);
}

TEST_CASE("where the kernel forbids cma, the error says how to allow it") {
  if (!machine_has_cma()) return;
  static std::byte bytes[64];
  const pid_t parent = getpid();
  const int status = test::run_in_child([&] {
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
    if (!test::refuse_calls({{.number = SYS_process_vm_readv, .error = EPERM}})) return test::kChildSkipped;
    CopyTeam team;
    const MediaSpans spans = spans_at(bytes, 1, sizeof(bytes));
    try {
      make_cma_route(spans, nullptr, metadata_of(spans), parent, pidfd, team);
    } catch (const Error& error) {
      const bool helps = std::string(error.what()).find("ptrace_scope") != std::string::npos;
      return error.code() == ErrorCode::kUnsupported && helps ? 0 : 1;
    }
    return 2;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

}  // namespace
}  // namespace kvpool
