#include "kvpool/routes/host/memory_route.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "child_process.h"
#include "kvpool/arena/arena.h"
#include "kvpool/base/clock.h"
#include "lent_team.h"
#include "peer_process.h"
#include "route_trial.h"
#include "soon.h"

namespace kvpool {
namespace {

using testing::BlockMemory;
using testing::code_of;
using testing::Dice;
using testing::Trial;

std::shared_ptr<Arena> arena_of(std::uint32_t blocks, std::vector<std::size_t> segment_bytes) {
  ArenaOptions options;
  options.medium = Medium::kDram;
  options.blocks = blocks;
  options.segment_bytes = std::move(segment_bytes);
  options.label = "memory_route_test";
  return make_owned_arena(options);
}

constexpr std::size_t kDramIndex = medium_index(Medium::kDram);

MediaSpans spans_of(const Arena& arena) {
  MediaSpans spans;
  spans[kDramIndex] = MediumSpan{arena.blocks(), arena.segments()};
  return spans;
}

PeerMetadata metadata_of(const Arena& arena) {
  PeerMetadata metadata;
  MetadataMedium& medium = metadata.media[kDramIndex];
  medium.blocks = arena.blocks();
  medium.mapped_bytes = arena.mapped_bytes();
  for (const Segment& segment : arena.segments()) {
    medium.segments.push_back({reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
  }
  return metadata;
}

MediaFiles files_of(int dram) {
  MediaFiles files = kvpool::kNoFiles;
  files[kDramIndex] = dram;
  return files;
}

std::vector<Address> dram_blocks(std::uint32_t count, std::uint32_t step = 1) {
  std::vector<Address> blocks;
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(make_address(0, Medium::kDram, 1, i * step % count));
  return blocks;
}

TEST_CASE("loopback writes what a naive copy writes, alone and with a team") {
  testing::LentTeam team(3);
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("loopback", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(30); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Trial trial = round % 10 == 0 ? Trial::large(dice) : Trial::small(dice);
      const auto route = make_loopback_route(trial.source.spans(), trial.target.spans(), nullptr, team);
      const WriteOutcome outcome = testing::write_whole(*route, trial);
      CHECK(trial.target == trial.expected);
      CHECK(
          outcome.calls ==
          StripPlan(trial.source.spans(), trial.target.spans(), trial.strips, trial.merge).count(trial.from, trial.to));
    }
  }
}

TEST_CASE("a write that is refused has written nothing") {
  Dice dice(5);
  CopyTeam team;
  const Trial trial(dice, 20, 100, 100);
  REQUIRE(trial.from.size() > 1);
  const BlockMemory before(trial.target);
  const auto route = make_loopback_route(trial.source.spans(), trial.target.spans(), nullptr, team);
  testing::check_refusals(*route, trial);
  CHECK(trial.target == before);
}

TEST_CASE("a cancelled write ends early, and nothing of it is written afterwards") {
  constexpr std::uint32_t kBlocks = 96;
  constexpr std::size_t kBytes = 1 << 20;
  const auto source = arena_of(kBlocks, {kBytes});
  const auto target = arena_of(kBlocks, {kBytes});
  testing::LentTeam team(2);
  const auto route = make_loopback_route(spans_of(*source), spans_of(*target), nullptr, team);
  const BlockStrip whole{0, 0, kBytes};
  const auto blocks = dram_blocks(kBlocks);
  std::atomic<bool> cancelled{false};
  std::atomic<std::uint64_t> done{0};
  WriteRequest request;
  request.strips = {&whole, 1};
  request.from = blocks;
  request.to = blocks;
  request.deadline_ns = monotonic_ns() + 60 * testing::kSecondNs;
  request.cancelled = &cancelled;
  request.bytes_done = &done;
  std::thread canceller([&] {
    testing::sleep_while([&] { return done.load() == 0; });
    cancelled.store(true);
  });
  const auto code = code_of([&] { route->write(request); });
  canceller.join();
  const bool whole_write = !code;  // too fast for the canceller
  CHECK((whole_write || code == ErrorCode::kCancelled));
  CHECK((done.load() < kBlocks * kBytes || whole_write));
}

TEST_CASE("a route keeps its resources alive, and reports which media it reaches") {
  Dice dice(1);
  CopyTeam team;
  const auto arena = arena_of(4, {64});
  auto keepalive = std::make_shared<int>(0);
  auto route = make_loopback_route(spans_of(*arena), spans_of(*arena), keepalive, team);
  CHECK(keepalive.use_count() > 1);
  CHECK(std::string(route->name()) == "loopback");
  CHECK(route->traits().one_sided);
  CHECK(route->reaches(Medium::kDram));
  CHECK_FALSE(route->reaches(Medium::kHbm));
  const MediaSet dram = media_set_of(Medium::kDram);
  CHECK(route->estimate_us(dram, dram, {1, 4096}, 0) < route->estimate_us(dram, dram, {1000, 4'096'000}, 0));
  std::shared_ptr<const MediaSpans> readable = route->readable();
  REQUIRE(readable != nullptr);
  CHECK((*readable)[Medium::kDram].blocks == 4);
  route.reset();
  CHECK(keepalive.use_count() > 1);  // by who reads
  readable.reset();
  CHECK(keepalive.use_count() == 1);
}

TEST_CASE("a write whose pieces must not share a call teaches a route without calls what all writes cost") {
  CopyTeam team;
  const auto arena = arena_of(4, {64});
  const auto route = make_loopback_route(spans_of(*arena), spans_of(*arena), nullptr, team);
  const MediaSet dram = media_set_of(Medium::kDram);
  const auto us = [&](bool gather) { return route->estimate_us(dram, dram, {1, 64, gather}, monotonic_ns()); };
  const double before = us(true);
  CHECK(us(false) == before);
  const BlockStrip whole{0, 0, 64};
  const Address from = make_address(0, Medium::kDram, 0, 1);
  const Address to = make_address(0, Medium::kDram, 0, 2);
  WriteRequest request;
  request.strips = {&whole, 1};
  request.from = {&from, 1};
  request.to = {&to, 1};
  request.merge = request.gather = false;
  request.deadline_ns = monotonic_ns() + 60 * testing::kSecondNs;
  route->write(request);
  CHECK(us(true) != before);
}

// The peer is another process: it sees what a message announces.
TEST_CASE("shm writes into a peer process, which sees the bytes when it is told of them") {
  constexpr std::uint32_t kBlocks = 64;
  const std::vector<std::size_t> discrete{3000, 5000, 4384, 4000};
  constexpr std::size_t kBytes = 16384;
  const auto source = arena_of(kBlocks, {kBytes});
  for (const bool large : {false, true}) {
    const auto target = arena_of(kBlocks, discrete);
    Dice dice(9);
    const auto payload = source->segments()[0];
    testing::fill_random(dice, payload.base, kBlocks * kBytes);
    const std::uint32_t count = large ? kBlocks : 16;
    auto to = dram_blocks(kBlocks, 5);
    to.resize(count);
    auto from = dram_blocks(kBlocks, 3);
    from.resize(count);
    testing::PeerProcess peer([&](const auto& wait) {
      if (!wait()) return 2;
      for (std::uint32_t i = 0; i < count; ++i) {
        for (std::size_t k = 0; k < kBytes; ++k) {
          if (testing::content_byte(spans_of(*target)[kDramIndex], block_of(to[i]), k) !=
              payload.base[block_of(from[i]) * kBytes + k]) {
            return 1;
          }
        }
      }
      return 0;
    });
    testing::LentTeam team(2);
    const auto route = make_shm_route(spans_of(*source), source, metadata_of(*target), files_of(target->memfd()), team);
    CHECK(std::string(route->name()) == "shm");
    CHECK(route->reaches(Medium::kDram));
    CHECK_FALSE(route->reaches(Medium::kHbm));
    const BlockStrip whole{0, 0, kBytes};
    WriteRequest request;
    request.strips = {&whole, 1};
    request.from = from;
    request.to = to;
    request.deadline_ns = monotonic_ns() + 30 * testing::kSecondNs;
    const WriteOutcome outcome = route->write(request);
    CHECK(outcome.calls == 4 * count);
    CHECK(outcome.bytes == count * kBytes);
    peer.go();
    CHECK(peer.wait() == 0);
  }
}

TEST_CASE("killing a peer in the middle of a write leaves this process intact") {
  constexpr std::uint32_t kBlocks = 32;
  constexpr std::size_t kBytes = 1 << 20;
  const auto source = arena_of(kBlocks, {kBytes});
  testing::LentTeam team(2);
  std::unique_ptr<Route> route;
  {
    const auto target = arena_of(kBlocks, {kBytes});
    route = make_shm_route(spans_of(*source), source, metadata_of(*target), files_of(target->memfd()), team);
    testing::PeerProcess peer([&](const auto& wait) { return wait() ? 0 : 1; });
    peer.signal(SIGKILL);
    CHECK(peer.wait() == -SIGKILL);
  }  // the owner's mapping and descriptor are gone: ours stays
  const BlockStrip whole{0, 0, kBytes};
  const auto blocks = dram_blocks(kBlocks);
  WriteRequest request;
  request.strips = {&whole, 1};
  request.from = blocks;
  request.to = blocks;
  request.deadline_ns = monotonic_ns() + 60 * testing::kSecondNs;
  CHECK(route->write(request).bytes == kBlocks * kBytes);
  std::thread closer([&] { route->close(); });
  std::optional<ErrorCode> code;
  while (!code) code = code_of([&] { route->write(request); });
  closer.join();
  CHECK(code == ErrorCode::kPeerLost);
}

TEST_CASE("memory that differs from the metadata is not mapped") {
  const auto arena = arena_of(8, {4096});
  CopyTeam team;
  const auto refused = [&](const PeerMetadata& metadata, int fd) {
    return code_of([&] { make_shm_route(spans_of(*arena), arena, metadata, files_of(fd), team); });
  };
  const PeerMetadata metadata = metadata_of(*arena);
  CHECK_FALSE(refused(metadata, arena->memfd()));  // nothing is wrong with it
  CHECK(refused(metadata, -1) == ErrorCode::kUnsupported);

  PeerMetadata longer = metadata;
  longer.media[kDramIndex].mapped_bytes += 4096;
  CHECK(refused(longer, arena->memfd()) == ErrorCode::kProtocol);
  PeerMetadata more_blocks = metadata;
  more_blocks.media[kDramIndex].blocks += 1;
  CHECK(refused(more_blocks, arena->memfd()) == ErrorCode::kProtocol);

  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(unsealed, 8 * 4096) == 0);
  CHECK(refused(metadata, unsealed) == ErrorCode::kProtocol);
  close(unsealed);
  const int no_memory = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  CHECK(refused(metadata, no_memory) == ErrorCode::kProtocol);
  close(no_memory);
  const int read_only = open(("/proc/self/fd/" + std::to_string(arena->memfd())).c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(read_only >= 0);
  CHECK(refused(metadata, read_only) == ErrorCode::kUnsupported);
  close(read_only);
}

int mappings_of(const std::string& label) {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find(label) != std::string::npos ? 1 : 0;
  return found;
}

TEST_CASE("a child does not inherit a route's mapping, which is removed with the route") {
  const auto arena = arena_of(512, {4096});
  CopyTeam team;
  const int before = mappings_of("memory_route_test");
  auto route = make_shm_route({}, nullptr, metadata_of(*arena), files_of(arena->memfd()), team);
  CHECK(mappings_of("memory_route_test") == before + 1);
  const int status = test::run_in_child([&] {
    const int inherited = mappings_of("memory_route_test");
    route.reset();
    return inherited == before ? 0 : 1;
  });
  CHECK(status == 0);
  route.reset();
  CHECK(mappings_of("memory_route_test") == before);
}

}  // namespace
}  // namespace kvpool
