// Fetches that read: into blocks of an engine, which no file contains.
#include "kvpool/peers/read_fetch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "sequence_kit.h"
#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing::services {
namespace {

constexpr std::uint32_t kBlocks = 16;
constexpr std::size_t kPieceBytes = kPage * kDim * sizeof(float);

ServiceOptions named(const char* name, const std::vector<std::string>& routes) {
  ServiceOptions options;
  options.name = name;
  options.secret = "s3cret";
  options.routes = routes;
  return options;
}

// An engine with two tensors, whose blocks are adopted, and a pool with blocks in DRAM.
struct Made {
  explicit Made(const std::vector<std::string>& routes) : memory(2 * kBlocks * 2 * kPieceBytes) {
    PoolOptions options = attendable(0, 2);
    options.audit = true;
    options.layout.aggregated = false;
    AdoptedMemory adopted;
    adopted.blocks = kBlocks;
    for (std::size_t layer = 0; layer < 2; ++layer) {
      for (std::size_t piece = 0; piece < 2; ++piece) {
        std::byte* const first = memory.data() + (layer * kBlocks * 2 + piece) * kPieceBytes;
        adopted.segments.push_back({first, 2 * kPieceBytes, kPieceBytes});
      }
    }
    options.adopted_hbm = adopted;
    options.engine_allocates = true;
    engine.emplace(start_node(options, named("engine", routes)));
    PoolOptions owning = attendable(0, kBlocks);
    owning.audit = true;
    owning.layout.aggregated = false;
    owner.emplace(start_node(owning, named("owner", routes)));
    engine->service.connect(owner->service.listen(unix_address()), in_seconds(60));
  }

  Addresses adopt(std::uint32_t first, std::uint32_t count) const {
    std::vector<std::uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), first);
    Addresses addresses(count);
    engine->pool->adopt(ids.data(), count, addresses.data());
    return addresses;
  }
  bool holds(std::uint32_t block, int value) const {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const std::byte* const at = memory.data() + (layer * kBlocks + block) * 2 * kPieceBytes;
      for (std::size_t i = 0; i < 2 * kPieceBytes; ++i) {
        if (at[i] != static_cast<std::byte>(value)) return false;
      }
    }
    return true;
  }
  void fill(Address address, int value) const {
    for (const Segment& segment : owner->pool->arena(Medium::kDram)->segments()) {
      std::memset(segment.base + block_of(address) * segment.stride, value, segment.bytes);
    }
  }
  std::shared_ptr<Transfer> fetch(const Addresses& from, const Addresses& to, double seconds = 10) const {
    FetchRequest request;
    request.peer = "owner";
    request.from = from;
    request.to = to;
    request.deadline_ns = in_seconds(seconds);
    return engine->service.fetch(std::move(request));
  }

  std::vector<std::byte> memory;
  std::optional<Node> engine;
  std::optional<Node> owner;
};

const std::vector<std::vector<std::string>> kWays = {{"loopback"}, {"shm"}};

TEST_CASE("a fetch into an engine's blocks reads the owner's, and gives them back") {
  for (const auto& routes : kWays) {
    CAPTURE(routes[0]);
    const Made made(routes);
    const Addresses from = alloc(*made.owner->pool, 3, Medium::kDram);
    for (int i = 0; i < 3; ++i) made.fill(from[static_cast<std::size_t>(i)], 40 + i);
    const Addresses to = made.adopt(4, 3);
    const auto fetch = made.fetch(from, to);
    REQUIRE(dynamic_cast<ReadFetch*>(fetch.get()) != nullptr);
    finish(fetch);
    CHECK(fetch->settled());
    for (std::uint32_t i = 0; i < 3; ++i) CHECK(made.holds(4 + i, 40 + static_cast<int>(i)));
    CHECK(made.holds(3, 0));
    CHECK(made.holds(7, 0));
    CHECK(fetch->stats().bytes == 3 * made.engine->pool->layout().block_bytes());
    CHECK(blocks_in(*made.engine->pool, BlockState::kActive) == 3);
    made.engine->pool->free(to.data(), to.size());
    made.owner->pool->free(from.data(), from.size());  // refused while it is held
  }
}

TEST_CASE("a fetch of what is not there, or into blocks in use, changes nothing") {
  const Made made({"shm"});
  const Addresses from = alloc(*made.owner->pool, 1, Medium::kDram);
  made.owner->pool->free(from.data(), 1);
  const Addresses to = made.adopt(1, 1);
  const auto stale = made.fetch(from, to);
  CHECK(stale->wait(in_seconds(60)));
  CHECK(code_of([&] { stale->rethrow_if_failed(); }) == ErrorCode::kStaleAddress);
  CHECK(stale->settled());
  made.engine->pool->free(to.data(), 1);
  const Addresses there = alloc(*made.owner->pool, 1, Medium::kDram);
  CHECK(code_of([&] { static_cast<void>(made.fetch(there, to)); }) == ErrorCode::kStaleAddress);
  CHECK(blocks_in(*made.engine->pool, BlockState::kActive) == 0);
}

TEST_CASE("fetches that are cancelled, or whose pools are closed, end once, and nothing is written after that") {
  for (const auto& routes : kWays) {
    CAPTURE(routes[0]);
    Made made(routes);
    const Addresses from = alloc(*made.owner->pool, 4, Medium::kDram);
    for (const Address address : from) made.fill(address, 9);
    std::vector<std::thread> threads;
    std::atomic<int> ended{0};
    std::atomic<int> begun{0};
    for (std::uint32_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        const Addresses to = made.adopt(4 * thread, 4);
        for (int round = 0; round < 30; ++round) {
          std::shared_ptr<Transfer> fetch;
          try {
            fetch = made.fetch(from, to, round % 5 == 4 ? 0.0005 : 10);
          } catch (const Error&) {
            break;  // the pool is closed
          }
          ++begun;
          if (round % 3 == 2) static_cast<void>(fetch->cancel());
          if (fetch->wait(in_seconds(60)) && fetch->settled()) ++ended;
        }
      });
    }
    if (routes[0] == "shm") {
      CHECK(soon([&] { return begun > 20; }));
      made.owner->node->close();
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(ended == begun);
    CHECK(blocks_in(*made.engine->pool, BlockState::kActive) == kBlocks);
    std::ranges::fill(made.memory, std::byte{1});
    made.engine->node->close();
    CHECK(std::ranges::all_of(made.memory, [](std::byte byte) { return byte == std::byte{1}; }));
  }
}

TEST_CASE("an engine's blocks that are lent are written by the borrower, and come back active") {
  for (const auto& routes : {std::vector<std::string>{"loopback"}, {"sock"}}) {
    CAPTURE(routes[0]);
    const Made made(routes);
    const Addresses lent = made.adopt(2, 2);
    made.engine->service.lend("owner", lent, in_seconds(10));
    CHECK(blocks_in(*made.engine->pool, BlockState::kLent) == 2);
    CHECK(code_of([&] { made.engine->pool->free(lent.data(), 2); }) == ErrorCode::kState);
    CHECK(code_of([&] { made.engine->service.lend("owner", lent, in_seconds(10)); }) == ErrorCode::kState);
    const Addresses from = alloc(*made.owner->pool, 2, Medium::kDram);
    for (const Address address : from) made.fill(address, 5);
    TransferRequest request = request_to(*made.engine, from);
    request.to = lent;
    for (Address& address : request.to) address |= Address{made.engine->pool->instance()} << kInstanceShift;
    const Addresses named_there = request.to;
    finish(made.owner->service.transfer(std::move(request)));
    CHECK(made.holds(2, 5));
    CHECK(made.holds(3, 5));
    made.owner->service.free(named_there.data(), 1, in_seconds(10));
    CHECK(blocks_in(*made.engine->pool, BlockState::kActive) == 1);
    const RecallResult result = made.engine->service.recall("owner", {lent[1]}, in_seconds(0.05));
    CHECK(result.returned + result.freed + result.quarantined == 1);
    CHECK(soon([&] { return blocks_in(*made.engine->pool, BlockState::kActive) == 2; }));
  }
}

}  // namespace
}  // namespace kvpool::testing::services
