#include "kvpool/arena/device_arena.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "child_process.h"
#include "device_kit.h"
#include "kvpool/base/error.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool {
namespace {

using testing::ChosenDriver;
using testing::code_of;
using testing::FakeCuda;

constexpr std::size_t kMiB = std::size_t{1} << 20;

DeviceArenaOptions options_of(std::uint32_t blocks, DeviceMemoryKind kind = DeviceMemoryKind::kAuto) {
  DeviceArenaOptions options;
  options.blocks = blocks;
  options.segment_bytes = {4096, 8192};
  options.kind = kind;
  return options;
}

Error error_of(const DeviceArenaOptions& options) {
  try {
    const DeviceArena arena(options);
  } catch (const Error& error) {
    return error;
  }
  FAIL("no error");
  return Error(ErrorCode::kAudit, "");
}

std::int64_t field(const Error& error, const std::string& name) {
  for (const auto& [key, value] : error.fields()) {
    if (name == key) return value;
  }
  FAIL("no field " << name);
  return 0;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("a device arena is one allocation, and reports its size to the byte") {
  const FakeCuda cuda;
  {
    const DeviceArena arena(options_of(10));
    CHECK(arena.on_device());
    CHECK(arena.owned());
    CHECK(arena.memfd() == -1);
    CHECK(arena.payload_bytes() == 10 * 12288);
    CHECK(arena.mapped_bytes() == 2 * kMiB);
    CHECK(cuda.count("bytes") == 2 * kMiB);
    CHECK(cuda.count("cuMemCreate") == 1);
    CHECK(cuda.count("cuMemAlloc") == 0);
    CHECK(arena.device_memory()->kind() == DeviceMemoryKind::kVirtual);
    REQUIRE(arena.segments().size() == 2);
    CHECK(arena.segments()[1].base == arena.segments()[0].base + 10 * 4096);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("device memory may be accessed by the GPUs that can reach it") {
  const FakeCuda cuda;
  DeviceArenaOptions options = options_of(1);
  CHECK(DeviceArena(options).device_memory()->peers() == std::vector<int>{1});
  options.device = 3;
  CHECK(DeviceArena(options).device_memory()->peers() == std::vector<int>{2});
  CHECK(cuda.left() == "");
}

TEST_CASE("a peer GPU that turns out not to reach device memory is no error") {
  const FakeCuda cuda;
  cuda.fail("cuDeviceCanAccessPeer", 999);
  CHECK(DeviceArena(options_of(1)).device_memory()->peers().empty());
}

TEST_CASE("virtual device memory is exported as a file, plain memory as a handle") {
  const FakeCuda cuda;
  {
    const DeviceArena arena(options_of(1, DeviceMemoryKind::kVirtual));
    const int descriptor = arena.device_memory()->export_descriptor();
    struct stat facts{};
    REQUIRE(fstat(descriptor, &facts) == 0);
    CHECK(facts.st_size == static_cast<off_t>(arena.mapped_bytes()));
    close(descriptor);
    CHECK(code_of([&] { arena.device_memory()->export_handle(); }) == ErrorCode::kUnsupported);
  }
  {
    const DeviceArena arena(options_of(1, DeviceMemoryKind::kPlain));
    CHECK(arena.mapped_bytes() == 12288);
    CHECK(cuda.count("bytes") == 12288);
    const CuIpcMemHandle handle = arena.device_memory()->export_handle();
    CHECK(std::ranges::any_of(handle.reserved, [](char byte) { return byte != 0; }));
    CHECK(code_of([&] { arena.device_memory()->export_descriptor(); }) == ErrorCode::kUnsupported);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a GPU without virtual memory gives plain memory, unless virtual was asked for") {
  const FakeCuda cuda;
  cuda.set("virtual_memory", 0);
  CHECK(DeviceArena(options_of(1)).device_memory()->kind() == DeviceMemoryKind::kPlain);
  CHECK(error_of(options_of(1, DeviceMemoryKind::kVirtual)).code() == ErrorCode::kUnsupported);
  CHECK(cuda.left() == "");
}

TEST_CASE("where the driver refuses virtual memory, plain memory is taken, unless virtual was asked for") {
  for (const int code : {800, 801}) {
    CAPTURE(code);
    const FakeCuda cuda;
    cuda.fail("cuMemCreate", code);
    const DeviceArena arena(options_of(1));
    CHECK(arena.device_memory()->kind() == DeviceMemoryKind::kPlain);
    CHECK(arena.mapped_bytes() == 12288);
    CHECK(error_of(options_of(1, DeviceMemoryKind::kVirtual)).code() == ErrorCode::kUnsupported);
  }
  const FakeCuda cuda;
  cuda.fail("cuMemCreate", 304);  // nothing that says that it is not to be had at all
  CHECK(error_of(options_of(1)).code() == ErrorCode::kUnsupported);
  CHECK(cuda.left() == "");
}

TEST_CASE("a GPU that another process uses exclusively is not lost") {
  const FakeCuda cuda;
  cuda.fail("cuDevicePrimaryCtxRetain", 46);
  const Error error = error_of(options_of(1));
  CHECK(error.code() == ErrorCode::kUnsupported);
  CHECK(std::string(error.what()).find("EXCLUSIVE_PROCESS") != std::string::npos);
  CHECK(cuda.left() == "");
}

TEST_CASE("an arena that does not fit the GPU is refused with the numbers, by a check or by the driver") {
  for (const bool check_memory : {true, false}) {
    for (const DeviceMemoryKind kind : {DeviceMemoryKind::kVirtual, DeviceMemoryKind::kPlain}) {
      const FakeCuda cuda;
      const DeviceArena other(options_of(1));
      DeviceArenaOptions options = options_of(1U << 15, kind);  // 384 MiB
      options.check_memory = check_memory;
      const Error error = error_of(options);
      CHECK(error.code() == ErrorCode::kOutOfMemory);
      CHECK(field(error, "needed_bytes") == 384 * static_cast<std::int64_t>(kMiB));
      CHECK(field(error, "available_bytes") == 254 * static_cast<std::int64_t>(kMiB));
      CHECK(field(error, "total_bytes") == 256 * static_cast<std::int64_t>(kMiB));
      CHECK(field(error, "device") == 0);
      CHECK(cuda.count("cuMemCreate") + cuda.count("cuMemAlloc") == (check_memory ? 1 : 2));
      CHECK(cuda.count("bytes") == 2 * kMiB);
    }
  }
}

TEST_CASE("if any driver call fails, a device arena leaves nothing behind") {
  for (const DeviceMemoryKind kind : {DeviceMemoryKind::kVirtual, DeviceMemoryKind::kPlain}) {
    for (const int code : {2, 304, 700}) {
      int failures = 0;
      for (int n = 1;; ++n) {
        CAPTURE(n);
        const FakeCuda cuda;
        cuda.fail_nth(n, code);
        try {
          const DeviceArena arena(options_of(4, kind));
          cuda.fail_nth(0, 0);  // what is freed now may be
        } catch (const Error& error) {
          ++failures;
          const ErrorCode wanted = code == 2     ? ErrorCode::kOutOfMemory
                                   : code == 304 ? ErrorCode::kUnsupported
                                                 : ErrorCode::kDeviceLost;
          CHECK(error.code() == wanted);
          CHECK(field(error, "driver_code") == code);
        }
        const bool reached = cuda.failed();
        CHECK(cuda.left() == "");
        if (!reached && n > 5) break;
      }
      CHECK(failures >= 6);
    }
  }
}

TEST_CASE("a GPU that does not exist is an error that lists those that do") {
  const FakeCuda cuda;
  DeviceArenaOptions options = options_of(1);
  options.device = 4;
  const Error error = error_of(options);
  CHECK(error.code() == ErrorCode::kUnsupported);
  CHECK(has(error.what(), "there is no GPU 4"));
  CHECK(has(error.what(), "shows 4"));
}

TEST_CASE("without a driver, a device arena is an error that names the library") {
  const ChosenDriver driver("libkvpool_no_such_driver.so.1");
  const Error error = error_of(options_of(1));
  CHECK(error.code() == ErrorCode::kUnsupported);
  CHECK(has(error.what(), "GPU 0 cannot be used: there is no CUDA driver"));
  CHECK(has(error.what(), "libkvpool_no_such_driver.so.1"));
}

TEST_CASE("a device arena without blocks takes no memory, and still finds the GPU") {
  const FakeCuda cuda;
  {
    const DeviceArena arena(options_of(0));
    CHECK(arena.on_device());
    CHECK(arena.mapped_bytes() == 0);
    CHECK(cuda.left() == "contexts=1");
  }
  DeviceArenaOptions options = options_of(0);
  options.device = 9;
  CHECK(error_of(options).code() == ErrorCode::kUnsupported);
}

TEST_CASE("a device arena is checked like any other") {
  const FakeCuda cuda;
  DeviceArenaOptions options = options_of(1);
  options.segment_bytes = {};
  CHECK(error_of(options).code() == ErrorCode::kArgument);
  options.segment_bytes = {0};
  CHECK(error_of(options).code() == ErrorCode::kArgument);
  CHECK(cuda.calls() == "");
}

TEST_CASE("an engine's tensors on a GPU are adopted in place") {
  const FakeCuda cuda;
  {
    const DeviceArena engine(options_of(8));
    auto arena = make_adopted_device_arena(Medium::kHbm, 8, engine.segments(), nullptr, 0);
    CHECK(arena->on_device());
    CHECK_FALSE(arena->owned());
    CHECK(arena->mapped_bytes() == 0);
    CHECK(cuda.count("bytes") == 2 * kMiB);
    CHECK(code_of([&] { make_adopted_device_arena(Medium::kHbm, 8, engine.segments(), nullptr, 1); }) ==
          ErrorCode::kLayoutMismatch);
    std::vector<Segment> beyond = engine.segments();
    beyond[1].base += 2 * kMiB;
    CHECK(code_of([&] { make_adopted_device_arena(Medium::kHbm, 8, beyond, nullptr, 0); }) ==
          ErrorCode::kLayoutMismatch);
    std::vector<std::byte> ordinary(1024);
    const std::vector<Segment> on_host{{ordinary.data(), 128, 128}};
    CHECK(code_of([&] { make_adopted_device_arena(Medium::kHbm, 8, on_host, nullptr, 0); }) ==
          ErrorCode::kLayoutMismatch);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a forked child frees nothing of a device arena") {
  const FakeCuda cuda;
  auto arena = std::make_unique<DeviceArena>(options_of(4));
  const std::string before = cuda.calls();
  const int status = test::run_in_child([&] {
    arena.reset();
    return cuda.calls() == before ? 0 : 1;
  });
  CHECK(status == 0);
}

TEST_CASE("the fake's device memory kills a process whose CPU accesses it") {
  const FakeCuda cuda;
  const DeviceArena arena(options_of(1));
  const int status = test::run_in_child([&] {
    signal(SIGSEGV, SIG_DFL);
    return static_cast<int>(*static_cast<volatile std::byte*>(arena.segments()[0].base));
  });
  CHECK(status == -SIGSEGV);
}

}  // namespace
}  // namespace kvpool

#endif  // KVPOOL_FAKE_CUDA
