#include "kvpool/arena/pin.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "child_process.h"
#include "fake_driver.h"
#include "kvpool/arena/arena.h"
#include "kvpool/base/error.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool {
namespace {

using testing::ChosenDriver;
using testing::FakeCuda;

ArenaOptions pinned_options() {
  ArenaOptions options;
  options.blocks = 2;
  options.segment_bytes = {4096};
  options.pin = true;
  options.commit_threads = 1;
  return options;
}

Error error_of_pinning() {
  const auto descriptors = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = descriptors();
  try {
    make_owned_arena(pinned_options());
  } catch (const Error& error) {
    CHECK(descriptors() == before);
    return error;
  }
  FAIL("no error");
  return Error(ErrorCode::kAudit, "");
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("pinning without a CUDA driver is an error that names the library") {
  const ChosenDriver driver("libkvpool_no_such_driver.so.1");
  const Error error = error_of_pinning();
  CHECK(error.code() == ErrorCode::kUnsupported);
  CHECK(has(error.what(), "libkvpool_no_such_driver.so.1"));
}

TEST_CASE("a library that is not a CUDA driver is an error that names what it lacks") {
  const ChosenDriver driver("libm.so.6");
  const Error error = error_of_pinning();
  CHECK(error.code() == ErrorCode::kUnsupported);
  CHECK(has(error.what(), "cuInit"));
}

TEST_CASE("an arena without blocks needs no driver to be pinned") {
  const ChosenDriver driver("libkvpool_no_such_driver.so.1");
  ArenaOptions options = pinned_options();
  options.blocks = 0;
  CHECK_FALSE(make_owned_arena(options)->pinned());
}

TEST_CASE("a pinned arena is registered for all devices and unregistered with the arena") {
  const FakeCuda cuda;
  const std::string pinning =
      "cuInit(0) cuDeviceGet(0) cuDevicePrimaryCtxRetain(0) cuCtxPushCurrent(0) cuMemHostRegister(8192,1) "
      "cuCtxPopCurrent()";
  auto arena = make_owned_arena(pinned_options());
  CHECK(arena->pinned());
  CHECK(cuda.calls() == pinning);
  arena.reset();
  CHECK(cuda.calls() ==
        pinning + " cuCtxPushCurrent(0) cuMemHostUnregister() cuCtxPopCurrent() cuDevicePrimaryCtxRelease(0)");
}

TEST_CASE("pinning uses the device that the process works on") {
  const FakeCuda cuda;
  cuda.set_current(3);
  const auto arena = make_owned_arena(pinned_options());
  CHECK(has(cuda.calls(), "cuDevicePrimaryCtxRetain(3) cuCtxPushCurrent(3)"));
  CHECK_FALSE(has(cuda.calls(), "cuDeviceGet"));
}

TEST_CASE("every failure of the driver is undone and reported with its code") {
  const std::string retained = "cuInit(0) cuDeviceGet(0) cuDevicePrimaryCtxRetain(0)";
  const std::string released = " cuDevicePrimaryCtxRelease(0)";
  const std::pair<const char*, std::string> cases[] = {
      {"cuInit", "cuInit(0)"},
      {"cuDeviceGet", "cuInit(0) cuDeviceGet(0)"},
      {"cuDevicePrimaryCtxRetain", retained},
      {"cuCtxPushCurrent", retained + " cuCtxPushCurrent(0)" + released},
      {"cuMemHostRegister", retained + " cuCtxPushCurrent(0) cuMemHostRegister(8192,1) cuCtxPopCurrent()" + released},
  };
  for (const auto& [call, calls] : cases) {
    for (const auto& [code, name] : {std::pair{304, "CUDA_ERROR_OPERATING_SYSTEM"}, std::pair{9876, "unknown error"}}) {
      CAPTURE(call);
      const FakeCuda cuda;
      cuda.fail(call, code);
      const Error error = error_of_pinning();
      CHECK(error.code() == ErrorCode::kUnsupported);
      CHECK(has(error.what(), call));
      CHECK(has(error.what(), name));
      REQUIRE(error.fields().size() == 1);
      CHECK(std::string(error.fields()[0].first) == "driver_code");
      CHECK(error.fields()[0].second == code);
      CHECK(cuda.calls() == calls);
    }
  }
}

TEST_CASE("a driver that has shut down does not stop an arena from being destroyed") {
  const FakeCuda cuda;
  auto arena = make_owned_arena(pinned_options());
  for (const char* call : {"cuCtxPushCurrent", "cuMemHostUnregister", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease"}) {
    cuda.fail(call, 4);  // CUDA_ERROR_DEINITIALIZED
  }
  arena.reset();
  CHECK_FALSE(has(cuda.calls(), "cuMemHostUnregister"));
}

TEST_CASE("a forked child does not call the driver") {
  const FakeCuda cuda;
  auto arena = make_owned_arena(pinned_options());
  const std::string before = cuda.calls();
  const int status = test::run_in_child([&] {
    arena.reset();
    return cuda.calls() == before ? 0 : 1;
  });
  CHECK(status == 0);
}

}  // namespace
}  // namespace kvpool

#endif  // KVPOOL_FAKE_CUDA
