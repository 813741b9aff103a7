// The kernels of cuda/, compiled for the CPU and launched in the fake driver's streams: they do what their references
// do, and an address that a GPU could not touch ends the context.
#include <doctest/doctest.h>

#include "host_gpu.h"

#ifdef KVPOOL_FAKE_CUDA

#include "kernel_cases.h"
#include "kvpool/cuda/gpu_launch.h"

namespace kvpool::cuda {
namespace {

using testing::GpuHere;

constexpr int kIllegalAddress = 700;
constexpr int kMisalignedAddress = 716;

// For the work in the stream. The context works again afterwards, so that the test can give back what it has.
int outcome_of(const GpuStream& stream) {
  const int code = GpuHere::here()->driver().stream_synchronize(stream.get());
  GpuHere::here()->fake().lose(0, 0);
  return code;
}

int copied(const std::byte* from, std::byte* to, std::size_t bytes) {
  const std::vector<PlannedStrip> strips{{from, to, bytes, bytes, bytes}};
  const std::vector<BlockPair> pairs{{0, 0}};
  const GpuStream stream;
  CHECK(testing::kernels().copy({strips, pairs}, stream.get(), {}) == 0);
  return outcome_of(stream);
}

TEST_CASE("a driver that stands in for the machine's brings its own kernels") {
  {
    const GpuHere gpu;
    const KernelSet* kernels = kernels_for(*gpu.context());
    REQUIRE(kernels != nullptr);
    CHECK(kernels != gpu_kernels());
    CHECK(kernels->load() == 0);
    CHECK(std::string(kernels->result_name(0)) == "cudaSuccess");
  }
  const testing::FakeCuda cuda;
  CHECK(kernels_for(*CudaContext::retain(0, "a test")) == nullptr);
}

TEST_CASE("a kernel may access the last byte of an allocation, and not the one behind it") {
  for (const auto& [read, written] : {std::pair{0, 0}, {1, 0}, {0, 1}}) {
    CAPTURE(read);
    CAPTURE(written);
    for (const Where where : {Where::kDevice, Where::kPinned}) {
      const GpuHere gpu;
      const std::size_t bytes = 3000;
      const Shared from(bytes - static_cast<std::size_t>(read), where);
      const Shared to(bytes - static_cast<std::size_t>(written), where);
      CHECK(copied(from.data(), to.data(), bytes) == (read + written == 0 ? 0 : kIllegalAddress));
    }
  }
}

TEST_CASE("a kernel must not access host memory that is not registered") {
  const GpuHere gpu;
  const Shared from(256, Where::kDevice);
  std::vector<std::byte> plain(256);
  CHECK(copied(from.data(), plain.data(), plain.size()) == kIllegalAddress);
}

TEST_CASE("a kernel must not access memory that was freed before its turn") {
  const GpuHere gpu;
  const Shared to(256, Where::kDevice);
  gpu.fake().set("delay_us", 20'000);
  gpu.fake().set("unmap_waits", 0);  // as between processes, whose memory goes without a wait
  const GpuStream stream;
  {
    const Shared from(256, Where::kDevice);
    const std::vector<PlannedStrip> strips{{from.data(), to.data(), 256, 256, 256}};
    const std::vector<BlockPair> pairs{{0, 0}};
    CHECK(testing::kernels().copy({strips, pairs}, stream.get(), {}) == 0);
  }
  CHECK(outcome_of(stream) == kIllegalAddress);
}

// Launches one table as it is, past the planner.
int launch_table(const DeviceStrip& strip, std::uint32_t width) {
  InlineTable<kInlineTableBytes> table;
  const DevicePair pair{0, 0};
  table.header.tiles = 1;
  table.header.strips = 1;
  std::memcpy(table.data, &strip, sizeof(strip));
  std::memcpy(table.data + sizeof(strip), &pair, sizeof(pair));
  const GpuStream stream;
  const Launcher* launcher = GpuHere::here()->driver().kernel_launcher();
  CHECK(launcher->launch(
            {width, &table.header, reinterpret_cast<const std::byte*>(table.data), table_bytes(1, 1), nullptr},
            stream.get(), 1) == 0);
  return outcome_of(stream);
}

TEST_CASE("an unaligned access ends the context, on either side") {
  for (const std::uint64_t shift : {0, 1, 2, 4, 8}) {
    for (const bool of_source : {true, false}) {
      CAPTURE(shift);
      const GpuHere gpu;
      const Shared from(512, Where::kDevice);
      const Shared to(512, Where::kPinned);
      DeviceStrip strip{testing::pointer_to(from.data()), testing::pointer_to(to.data()), 256, 256, 16, 0, 0};
      (of_source ? strip.from : strip.to) += shift;
      CHECK(launch_table(strip, 16) == (shift == 0 ? 0 : kMisalignedAddress));
    }
  }
}

TEST_CASE("a kernel must not read a table from where there is no memory") {
  const GpuHere gpu;
  const Shared from(64 * 9000, Where::kDevice);
  const Shared to(64 * 9000, Where::kDevice);
  const std::vector<PlannedStrip> strips{{from.data(), to.data(), 64, 64, 64}};
  std::vector<BlockPair> pairs;
  for (std::uint32_t i = 0; i < 9000; ++i) pairs.push_back({i, i});
  const std::size_t bytes = table_bytes_of(1, pairs.size());
  const Shared host(bytes, Where::kPinned);
  gpu.fake().set("delay_us", 20'000);
  gpu.fake().set("unmap_waits", 0);  // as between processes, whose memory goes without a wait
  const GpuStream stream;
  {
    const Shared device(bytes, Where::kDevice);
    const LaunchOptions options{.thread_blocks_max = 0, .table = {host.data(), device.data(), bytes}};
    CHECK(testing::kernels().copy({strips, pairs}, stream.get(), options) == 0);
  }
  CHECK(outcome_of(stream) == kIllegalAddress);
}

TEST_CASE("a kernel reaches another GPU's memory only where access to it was given") {
  const GpuHere gpu;
  const CudaDriver& driver = gpu.driver();
  for (const bool given : {true, false}) {
    const std::size_t bytes = std::size_t{2} << 20;
    CuMemProp prop{};
    prop.type = kCuAllocationPinned;
    prop.handle_types = kCuHandlePosixFd;
    prop.location = {kCuLocationDevice, 1};
    CuHandle handle = 0;
    CuPointer there = 0;
    REQUIRE(driver.mem_create(&handle, bytes, &prop, 0) == 0);
    REQUIRE(driver.mem_address_reserve(&there, bytes, 0, 0, 0) == 0);
    REQUIRE(driver.mem_map(there, bytes, 0, handle, 0) == 0);
    const CuMemAccess access{{kCuLocationDevice, given ? 0 : 1}, kCuAccessReadWrite};
    REQUIRE(driver.mem_set_access(there, bytes, &access, 1) == 0);
    const Shared from(4096, Where::kDevice);
    CHECK(copied(from.data(), reinterpret_cast<std::byte*>(there),  // NOLINT(performance-no-int-to-ptr)
                 4096) == (given ? 0 : kIllegalAddress));
    CHECK(driver.mem_unmap(there, bytes) == 0);
    CHECK(driver.mem_address_free(there, bytes) == 0);
    CHECK(driver.mem_release(handle) == 0);
  }
}

}  // namespace
}  // namespace kvpool::cuda

#endif  // KVPOOL_FAKE_CUDA
