// Copies of many blocks: one launch with a table, several without one, and which copy owns the table meanwhile.
#include "kvpool/cuda/copy_table.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "copy_table_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/cuda_ipc/cuda_route.h"
#include "soon.h"
#include "table_kernels.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
using namespace copy_tables;  // NOLINT(google-build-using-namespace)
namespace {

struct Tiers {
  explicit Tiers(const cuda::KernelSet* kernels, std::uint32_t blocks = kMany)
      : device(on_gpu(blocks)), host(on_host(blocks)), mover(std::make_unique<DeviceMover>(*device, *host, kernels)) {}
  void move(TierWay way, const Addresses& from, const Addresses& to, const CopyOrder& after = CopyOrder::met()) const {
    mover->move(way, from.data(), to.data(), from.size(), after);
  }
  std::shared_ptr<Arena> device;
  std::shared_ptr<Arena> host;
  std::unique_ptr<DeviceMover> mover;
};

TEST_CASE("20,000 blocks are copied to the host and back in one launch each way, without memory of the driver") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const TableKernels kernels(cuda);
  {
    const Tiers tiers(&kernels.set());
    CHECK(tiers.mover->device_bytes() == cuda.count("bytes") - tiers.device->mapped_bytes());
    CHECK(tiers.mover->device_bytes() >= 2 * cuda::table_bytes_of(2, kMany));
    const std::size_t memory = memory_calls(cuda);
    for (const std::uint32_t round : {0u, 1u, 2u}) {
      fill(cuda, *tiers.device, 10 + round);
      fill(cuda, *tiers.host, 5);
      const Addresses from = shuffled(hbm, 0, kMany, 2 * round + 1);
      const Addresses to = shuffled(dram, 0, kMany, 2 * round + 2);
      TableKernels::launches() = 0;
      tiers.move(TierWay::kOut, from, to);
      CHECK(TableKernels::launches() == 1);
      CHECK(wrong(cuda, *tiers.host, to, 10 + round, from) == 0);
      fill(cuda, *tiers.device, 6);
      tiers.move(TierWay::kIn, to, from);
      CHECK(TableKernels::launches() == 2);
      CHECK(wrong(cuda, *tiers.device, from, 10 + round, from) == 0);
    }
    CHECK(TableKernels::by_table() == 6);
    CHECK(memory_calls(cuda) == memory);
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("copies that need no table take none") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  const auto table_of = [](const cuda::KernelSet* with, std::uint32_t blocks) {
    return Tiers(with, blocks).mover->device_bytes();
  };
  CHECK(table_of(nullptr, kMany) == 0);
  CHECK(table_of(&kernels.set(), 3000) == 0);
  CHECK(table_of(&kernels.set(), 5000) > 0);
  {
    constexpr std::size_t kLong = 2 * kKernelPieceBytesGuess;
    const DeviceArena few(DeviceArenaOptions{.blocks = 4, .segment_bytes = {kLong}});
    CHECK(DeviceMover(few, *make_absent_arena(Medium::kDram, 0, kLong), &kernels.set()).device_bytes() == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("where memory for a table is short, a copy takes several launches and is still correct") {
  for (const char* call : {"cuMemAlloc", "cuMemHostRegister"}) {
    CAPTURE(call);
    const FakeCuda cuda;
    cuda.set("delay_us", 0);
    const TableKernels kernels(cuda);
    {
      const auto device = on_gpu(kMany);
      const auto host = on_host(kMany);
      cuda.fail(call, 2);
      DeviceMover mover(*device, *host, &kernels.set());
      CHECK(mover.device_bytes() == 0);
      fill(cuda, *device, 7);
      const Addresses from = shuffled(hbm, 0, kMany, 1);
      const Addresses to = shuffled(dram, 0, kMany, 2);
      mover.move(TierWay::kOut, from.data(), to.data(), kMany, CopyOrder::met());
      CHECK(wrong(cuda, *host, to, 7, from) == 0);
      CHECK(TableKernels::launches() == 6);
      CHECK(TableKernels::by_table() == 0);
      cuda.fail(call, 0);
    }
    CHECK(cuda.left() == "");
  }
}

TEST_CASE("if any driver call fails when tables are taken, a mover leaves nothing behind") {
  int failures = 0;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    const TableKernels kernels(cuda);
    const auto device = on_gpu(5000);
    const auto host = on_host(5000);
    const std::size_t before = cuda.count("bytes");
    cuda.fail_nth(n, 700);
    const auto code = code_of([&] {
      const DeviceMover mover(*device, *host, &kernels.set());
      cuda.fail_nth(0, 0);
    });
    if (code) CHECK(*code == ErrorCode::kDeviceLost);
    failures += code ? 1 : 0;
    CHECK(cuda.count("bytes") == before);
    if (!cuda.failed()) break;
  }
  CHECK(failures >= 10);
}

TEST_CASE("copies in one stream share its table in parts, until it is full") {
  const FakeCuda cuda;
  cuda.set("delay_us", 2'000);
  const TableKernels kernels(cuda);
  {
    constexpr std::uint32_t kEach = 5000;
    const auto from = on_gpu(kMany);
    const auto to = on_gpu(kMany, {32});
    DeviceCopier copier(from->context(), &kernels.set(), {}, "a test");
    copier.add_tables(1, 3, 2, 3 * kEach);
    CHECK(copier.table_bytes() >= cuda::table_bytes_of(3 * 2, 3 * kEach));
    const BlockStrip whole{0, 0, kBlockBytes};
    std::vector<PlannedStrip> plan;
    plan_strips({kMany, from->segments()}, {kMany, to->segments()}, {&whole, 1}, true, plan);
    const std::size_t memory = memory_calls(cuda);
    for (const std::uint32_t round : {1u, 2u}) {
      fill(cuda, *from, 20 + round);
      fill(cuda, *to, 1);
      TableKernels::launches() = 0;
      TableKernels::by_table() = 0;
      DeviceCopier::Run run(copier);
      run.begin();
      std::vector<std::pair<Addresses, Addresses>> groups;
      for (std::uint32_t g = 0; g < 4; ++g) {
        groups.emplace_back(shuffled(hbm, g * kEach, kEach, 10 * round + g),
                            shuffled(hbm, g * kEach, kEach, 10 * round + g + 5));
        run.copy(GpuWay::kWithin, plan, groups[g].first, groups[g].second, true);
      }
      CHECK(TableKernels::by_table() == 3);
      CHECK(TableKernels::launches() == 3 + 2);  // the fourth as without a table
      run.wait_for_all();
      for (const auto& [source, target] : groups) CHECK(wrong(cuda, *to, target, 20 + round, source) == 0);
    }
    // Another part meanwhile: no table is taken in a thread that copies.
    DeviceCopier::Run run(copier);
    const Addresses all = shuffled(hbm, 0, kEach, 1);
    const Addresses others = shuffled(hbm, kEach, kEach, 1);
    TableKernels::by_table() = 0;
    run.begin();
    run.copy(GpuWay::kWithin, plan, all, all, true);
    run.begin();
    run.copy(GpuWay::kWithin, plan, others, others, true);
    CHECK(TableKernels::by_table() == 1);
    run.wait_for_all();
    CHECK(wrong(cuda, *to, all, 22, all) == 0);
    CHECK(wrong(cuda, *to, others, 22, others) == 0);
    CHECK(memory_calls(cuda) == memory);
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a stream with a table is kept, however many calls are under way") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  {
    const auto arena = on_gpu(64, {32});
    DeviceCopier copier(arena->context(), &kernels.set(), {}, "a test");
    copier.add_tables(2, 1, 1, 5000);
    const std::size_t memory = memory_calls(cuda);
    const PlannedStrip strip{arena->segments()[0].base, arena->segments()[0].base, 32, 32, 32};
    for (int round = 0; round < 2; ++round) {
      DeviceCopier::Run run(copier);
      for (std::uint32_t i = 0; i < 20; ++i) {
        const Addresses from{hbm(i)};
        const Addresses to{hbm(32 + i)};
        run.begin();
        run.copy(GpuWay::kWithin, {&strip, 1}, from, to, true);
      }
      run.wait_for_all();
    }
    CHECK(memory_calls(cuda) == memory);
    CHECK(cuda.count("bytes") == arena->mapped_bytes() + copier.table_bytes());
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a table is not reused while it is unknown whether its copy is under way") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  const Tiers tiers(&kernels.set());
  const EngineStream engine(cuda);
  fill(cuda, *tiers.device, 8);
  constexpr std::uint32_t kHalf = kMany / 2;
  const Addresses first = shuffled(hbm, 0, kHalf, 1);
  const Addresses first_to = shuffled(dram, 0, kHalf, 2);
  const Addresses second = shuffled(hbm, kHalf, kHalf, 3);
  const Addresses second_to = shuffled(dram, kHalf, kHalf, 4);
  Gate gate(engine);
  cuda.fail("cuStreamSynchronize", 999);
  CHECK(code_of([&] { tiers.move(TierWay::kOut, first, first_to, engine.handle()); }) == ErrorCode::kDeviceLost);
  cuda.fail("cuStreamSynchronize", 0);
  TableKernels::launches() = 0;
  std::thread other([&] { tiers.move(TierWay::kOut, second, second_to); });
  sleep_while([&] { return TableKernels::launches() == 0; });
  gate.open();
  other.join();
  CHECK(wrong(cuda, *tiers.host, first_to, 8, first) == 0);
  CHECK(wrong(cuda, *tiers.host, second_to, 8, second) == 0);
}

TEST_CASE("a failed launch keeps its table to itself, and the next copy has a whole one") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  const Tiers tiers(&kernels.set());
  fill(cuda, *tiers.device, 8);
  const Addresses from = shuffled(hbm, 0, kMany, 1);
  const Addresses to = shuffled(dram, 0, kMany, 2);
  TableKernels::fail_launch() = 2;
  CHECK(code_of([&] { tiers.move(TierWay::kOut, from, to); }) == ErrorCode::kOutOfMemory);
  TableKernels::fail_launch() = 0;
  TableKernels::launches() = 0;
  tiers.move(TierWay::kOut, from, to);
  CHECK(TableKernels::launches() == 1);
  CHECK(wrong(cuda, *tiers.host, to, 8, from) == 0);
  TableKernels::fail_launch() = 209;  // the copy engines do it, behind the table's copy
  tiers.move(TierWay::kIn, to, from);
  CHECK(wrong(cuda, *tiers.device, from, 8, from) == 0);
  TableKernels::fail_launch() = 0;
}

TEST_CASE("a copy by table in a stream that was pulled into a capture fails, and the next one is right") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  const Tiers tiers(&kernels.set());
  const EngineStream engine(cuda);
  fill(cuda, *tiers.device, 8);
  const Addresses from = shuffled(hbm, 0, kMany, 1);
  const Addresses to = shuffled(dram, 0, kMany, 2);
  engine.begin_capture();
  CHECK(code_of([&] { tiers.move(TierWay::kOut, from, to, engine.handle()); }) == ErrorCode::kState);
  engine.end_capture();
  TableKernels::launches() = 0;
  tiers.move(TierWay::kOut, from, to, engine.handle());
  CHECK(TableKernels::launches() == 1);
  CHECK(wrong(cuda, *tiers.host, to, 8, from) == 0);
}

TEST_CASE("the tables of a lost GPU are lost with it") {
  const FakeCuda cuda;
  const TableKernels kernels(cuda);
  {
    const Tiers tiers(&kernels.set());
    const Addresses from = shuffled(hbm, 0, kMany, 1);
    const Addresses to = shuffled(dram, 0, kMany, 2);
    DeviceCopier copier(tiers.device->context(), &kernels.set(), {}, "a test");
    copier.add_tables(2, 1, 1, kMany);
    cuda.lose(0, 719);
    CHECK(code_of([&] { tiers.move(TierWay::kOut, from, to); }) == ErrorCode::kDeviceLost);
  }
  CHECK(cuda.left() == "");
}

// A route from a pool's two media to another's.
struct ManyRoute {
  explicit ManyRoute(const cuda::KernelSet* kernels) {
    GpuSide local;
    local.context = from->context();
    local.kernels = kernels;
    local.spans = {MediumSpan{kMany, from->segments()}, MediumSpan{kMany, from_host->segments()}};
    local.on_gpu = {true, false};
    local.keepalive = from;
    GpuPeer peer;
    peer.spans = {MediumSpan{kMany, to->segments()}, MediumSpan{kMany, to_host->segments()}};
    peer.on_gpu = {true, false};
    peer.keepalive = to;
    route = make_cuda_loopback_route(std::move(local), std::move(peer));
  }
  void write(const Addresses& source, const Addresses& target) const {
    const BlockStrip whole{0, 0, kBlockBytes};
    WriteRequest request;
    request.strips = {&whole, 1};
    request.from = source;
    request.to = target;
    request.deadline_ns = monotonic_ns() + 60'000'000'000;
    CHECK(route->write(request).bytes == source.size() * kBlockBytes);
  }

  std::shared_ptr<Arena> from = on_gpu(kMany);
  std::shared_ptr<Arena> from_host = on_host(kMany);
  std::shared_ptr<Arena> to = on_gpu(kMany, {32});
  std::shared_ptr<Arena> to_host = on_host(kMany);
  std::unique_ptr<Route> route;
};

TEST_CASE("a write to a peer is one launch for each pair of media, without memory of the driver") {
  const FakeCuda cuda;
  cuda.set("delay_us", 100);
  const TableKernels kernels(cuda);
  {
    const ManyRoute route(&kernels.set());
    fill(cuda, *route.from, 30);
    fill(cuda, *route.from_host, 31);
    const std::size_t memory = memory_calls(cuda);
    constexpr std::uint32_t kHalf = kMany / 2;
    Addresses source = shuffled(hbm, 0, kHalf, 1);
    Addresses target = shuffled(hbm, kHalf, kHalf, 2);
    const Addresses others = shuffled(hbm, kHalf, kHalf, 3);
    const Addresses others_to = shuffled(dram, 0, kHalf, 4);
    const Addresses hosts = shuffled(dram, 0, kHalf, 5);
    const Addresses hosts_to = shuffled(hbm, 0, kHalf, 6);
    const Addresses first = source;
    const Addresses first_to = target;
    for (const auto& [more, more_to] : {std::pair(others, others_to), std::pair(hosts, hosts_to)}) {
      source.insert(source.end(), more.begin(), more.end());
      target.insert(target.end(), more_to.begin(), more_to.end());
    }
    route.write(source, target);
    CHECK(TableKernels::launches() == 3);
    CHECK(TableKernels::by_table() == 3);
    CHECK(wrong(cuda, *route.to, first_to, 30, first) == 0);
    CHECK(wrong(cuda, *route.to_host, others_to, 30, others) == 0);
    CHECK(wrong(cuda, *route.to, hosts_to, 31, hosts) == 0);
    CHECK(memory_calls(cuda) == memory);
    route.route->close();
    CHECK(memory_calls(cuda) == memory);
    CHECK(route.route->let_go() != nullptr);  // which may wait for the GPU, and gives the tables back
    CHECK(memory_calls(cuda) > memory);
    CHECK(cuda.count("pageable") == 0);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("each part of a write has a separate table, which is reused when the part has ended") {
  const FakeCuda cuda;
  cuda.set("delay_us", 2'000);
  const TableKernels kernels(cuda);
  {
    constexpr std::size_t kBytes = 2048;
    const auto from = on_gpu(kMany, {kBytes});
    const auto to = on_gpu(kMany, {kBytes});
    GpuSide local;
    local.context = from->context();
    local.kernels = &kernels.set();
    local.spans[0] = {kMany, from->segments()};
    local.on_gpu[0] = true;
    local.part_bytes = kMany / 4 * kBytes;
    GpuPeer peer;
    peer.spans[0] = {kMany, to->segments()};
    peer.on_gpu[0] = true;
    const auto route = make_cuda_loopback_route(std::move(local), std::move(peer));
    CHECK(cuda.count("cuMemAlloc") == 2);  // two parts are under way
    fill(cuda, *from, 40);
    const Addresses source = shuffled(hbm, 0, kMany, 1);
    const Addresses target = shuffled(hbm, 0, kMany, 2);
    const BlockStrip whole{0, 0, kBytes};
    WriteRequest request;
    request.strips = {&whole, 1};
    request.from = source;
    request.to = target;
    request.deadline_ns = monotonic_ns() + 60'000'000'000;
    route->write(request);
    CHECK(TableKernels::launches() == 4);
    CHECK(TableKernels::by_table() == 4);
    CHECK(wrong(cuda, *to, target, 40, source) == 0);
    CHECK(cuda.count("cuMemAlloc") == 2);
  }
  CHECK(cuda.left() == "");
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
