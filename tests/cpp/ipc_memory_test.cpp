// Memory of cuMemAlloc that other processes open: its handles, and what is open.
#include "kvpool/cuda/ipc_memory.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "child_process.h"
#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "peer_process.h"
#include "thrown.h"
#include "ucx_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

using Range = std::span<const std::byte>;

DeviceArena arena_of(DeviceMemoryKind kind, int device = 0) {
  DeviceArenaOptions options;
  options.blocks = 4;
  options.segment_bytes = {64, 32};
  options.device = device;
  options.kind = kind;
  return DeviceArena(options);
}

std::vector<Range> ranges_of(const Arena& arena) {
  std::vector<Range> ranges;
  for (const Segment& segment : arena.segments()) {
    ranges.emplace_back(segment.base, (arena.blocks() - 1) * segment.stride + segment.bytes);
  }
  return ranges;
}

TEST_CASE("tensors in one allocation have one handle, whatever their order") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const DeviceArena one = arena_of(DeviceMemoryKind::kPlain);
    const DeviceArena two = arena_of(DeviceMemoryKind::kPlain);
    std::vector<Range> ranges = ranges_of(two);
    for (const Range& range : ranges_of(one)) ranges.push_back(range);
    const auto allocations = ipc_allocations(*context, ranges);
    REQUIRE(allocations.size() == 2);
    CHECK(allocations[0].base == one.device_memory()->base());
    CHECK(allocations[1].base == two.device_memory()->base());
    CHECK(allocations[0].bytes == 4 * 96);
    CHECK(cuda.count("cuIpcGetMemHandle") == 2);
    CHECK(ipc_allocations(*context, {}).empty());
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("memory without a handle, or beyond the end of the handle's, is given to nobody") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const DeviceArena plain = arena_of(DeviceMemoryKind::kPlain);
  const DeviceArena virtual_memory = arena_of(DeviceMemoryKind::kVirtual);
  std::vector<Range> ranges = ranges_of(plain);
  ranges.push_back(ranges_of(virtual_memory)[0]);
  CHECK(ipc_allocations(*context, ranges).empty());
  CHECK(ipc_allocations(*context, std::vector<Range>{{plain.segments()[0].base, 4 * 96 + 1}}).empty());
  const std::byte host[8] = {};
  CHECK(ipc_allocations(*context, std::vector<Range>{{host, 8}}).empty());
  cuda.set("ipc", 0);  // as in a container without it
  CHECK(ipc_allocations(*context, ranges_of(plain)).empty());
  cuda.set("ipc", 1);
  for (int n = 1;; ++n) {
    CAPTURE(n);
    cuda.fail_nth(n, 2);
    std::vector<IpcAllocation> allocations;
    const auto error = error_of([&] { allocations = ipc_allocations(*context, ranges_of(plain)); });
    const bool reached = cuda.failed();
    cuda.fail_nth(0, 0);
    if (!reached) break;
    if (error) CHECK(error->code() == ErrorCode::kOutOfMemory);
  }
  cuda.lose(0, 719);
  CHECK(error_of([&] { ipc_allocations(*context, ranges_of(plain)); })->code() == ErrorCode::kDeviceLost);
}

// A message of the other process.
struct Told {
  IpcAllocation allocation;
  std::atomic<bool> there;
};

TEST_CASE("another process's memory stays open while it is used here and a failure leaves nothing open") {
  if (!alone("another process's memory stays open while it is used here and a failure leaves nothing open", {},
             false)) {
    return;
  }
  if (!test::kChildMayStartThreads) return;
  void* const shared = mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* const told = new (shared) Told{};
  PeerProcess peer([&](auto&& wait) {
    const FakeCuda cuda;
    const DeviceArena arena = arena_of(DeviceMemoryKind::kPlain, 1);
    fill_block(cuda, arena, 2, 77);
    told->allocation = ipc_allocations(*arena.context(), ranges_of(arena)).at(0);
    told->there = true;
    wait();
    return block_is(cuda, arena, 2, 77) && cuda.host(arena.segments()[0].base, 64)[0] == std::byte{9} ? 0 : 1;
  });
  while (!told->there) usleep(1000);
  const FakeCuda cuda;
  const IpcAllocation theirs = told->allocation;
  const auto near = CudaContext::retain(0, "a test");
  {
    const OpenedMemory opened(near, {&theirs, 1});
    const OpenedMemory again(near, {&theirs, 1});
    CHECK(cuda.host(opened.at(theirs.base + 2 * 64, 64), 64)[63] == std::byte{77});
    CHECK(again.at(theirs.base, 1) == opened.at(theirs.base, 1));
    CHECK(opened.at(theirs.base + 4 * 96 - 1, 1) != nullptr);
    CHECK(opened.at(theirs.base + 4 * 96 - 1, 2) == nullptr);
    CHECK(opened.at(theirs.base - 1, 1) == nullptr);
    *cuda.host(opened.at(theirs.base, 64), 64) = std::byte{9};
  }
  CHECK(cuda.left() == "contexts=1");
  const auto refused = [&](int device, std::vector<IpcAllocation> allocations) {
    return code_of([&] { OpenedMemory(CudaContext::retain(device, "a test"), allocations); });
  };
  CHECK(refused(2, {theirs}) == ErrorCode::kUnsupported);  // a GPU that does not reach it
  IpcAllocation wrong = theirs;
  ++wrong.bytes;
  CHECK(refused(0, {wrong}) == ErrorCode::kUnsupported);
  wrong = theirs;
  wrong.handle.reserved[8] ^= 1;
  CHECK(refused(0, {wrong}) == ErrorCode::kUnsupported);
  {
    const DeviceArena own = arena_of(DeviceMemoryKind::kPlain);
    const IpcAllocation mine = ipc_allocations(*near, ranges_of(own)).at(0);
    CHECK(refused(0, {theirs, mine}).has_value());  // of two the second fails
  }
  CHECK(cuda.left() == "contexts=1");
  for (int n = 1;; ++n) {
    CAPTURE(n);
    cuda.fail_nth(n, 2);
    const auto code = code_of([&] { OpenedMemory(near, {&theirs, 1}); });
    const bool reached = cuda.failed();
    const std::string left = cuda.left();
    cuda.fail_nth(0, 0);
    if (!reached) break;
    if (code) {
      CHECK(*code == ErrorCode::kOutOfMemory);
      CHECK(left == "contexts=1");
    }
  }
  peer.go();
  CHECK(peer.wait() == 0);
  munmap(shared, sizeof(Told));
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
