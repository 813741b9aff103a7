// The fake driver is as strict as a real one: what it refuses, and what it waits for.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "child_process.h"
#include "device_kit.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/lasting.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/wait_word.h"
#include "kvpool/net/reactor.h"
#include "soon.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

using Flags = unsigned;

// A GPU of the fake, current in this thread.
struct Gpu {
  explicit Gpu(int device = 0) : context(CudaContext::retain(device, "a test")), current(*context, "a test") {}
  const CudaDriver& driver() const { return context->driver(); }
  CuStream stream(Flags flags) const {
    CuStream made = nullptr;
    REQUIRE(driver().stream_create(&made, flags) == 0);
    return made;
  }
  CuPointer plain(std::size_t bytes) const {
    CuPointer made = 0;
    REQUIRE(driver().mem_alloc(&made, bytes) == 0);
    return made;
  }
  std::shared_ptr<const CudaContext> context;
  CurrentContext current;
};

// Work of a stream that stands until it is let go.
class HeldStream {
 public:
  HeldStream(const FakeCuda& cuda, CuStream stream) {
    const auto wait = [](void* argument) {
      auto& self = *static_cast<HeldStream*>(argument);
      while (!self.open_) std::this_thread::sleep_for(std::chrono::microseconds(100));
    };
    REQUIRE(cuda.find<int(CuStream, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, wait, this) == 0);
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

// How a child ends that does this: its signal.
template <typename Body>
int death_of(const FakeCuda& cuda, const Body& body) {
  return test::run_in_child([&] {
    cuda.go_on_after_fork();
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    close(STDERR_FILENO);
    signal(SIGABRT, SIG_DFL);  // not the test runner's
    body();
    return 0;
  });
}

TEST_CASE("using a stream or an event that was never made, or is gone, ends the process") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const CuStream gone = gpu.stream(1);
  REQUIRE(driver.stream_destroy(gone) == 0);
  const CuStream alive = gpu.stream(0);  // has its thread: ThreadSanitizer lets no child start one
  CuEvent event = nullptr;
  REQUIRE(driver.event_create(&event, 2) == 0);
  REQUIRE(driver.event_destroy(event) == 0);
  for (const CuStream stream : {gone, reinterpret_cast<CuStream>(std::uintptr_t{4711})}) {
    CHECK(death_of(cuda, [&] { driver.stream_synchronize(stream); }) == -SIGABRT);
    CHECK(death_of(cuda, [&] { driver.stream_destroy(stream); }) == -SIGABRT);
    CHECK(death_of(cuda, [&] { check_stream_of(*gpu.context, stream, "a test"); }) == -SIGABRT);
  }
  CHECK(death_of(cuda, [&] { driver.event_query(event); }) == -SIGABRT);
  CHECK(death_of(cuda, [&] { driver.event_record(event, alive); }) == -SIGABRT);
  CHECK(death_of(cuda, [&] { driver.stream_wait_event(alive, event, 0); }) == -SIGABRT);
  // No handle is given twice, so that a late use of one is always found.
  const CuStream next = gpu.stream(1);
  CHECK(next != gone);
  CHECK(driver.stream_destroy(next) == 0);
  CHECK(driver.stream_destroy(alive) == 0);
}

TEST_CASE("the legacy default stream and the streams that block wait for each other, and no others") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const CuStream blocking = gpu.stream(0);
  const CuStream free = gpu.stream(1);
  CuEvent event = nullptr;
  REQUIRE(driver.event_create(&event, 2) == 0);
  const auto stands = [&](CuStream first, CuStream second) {
    HeldStream held(cuda, first);
    REQUIRE(driver.event_record(event, second) == 0);
    dawdle();
    const bool stood = driver.event_query(event) == kCudaNotReady;
    held.open();
    REQUIRE(driver.stream_synchronize(first) == 0);
    REQUIRE(driver.stream_synchronize(second) == 0);
    CHECK(driver.event_query(event) == 0);
    return stood;
  };
  CHECK(stands(nullptr, blocking));
  CHECK(stands(blocking, nullptr));
  const auto legacy = reinterpret_cast<CuStream>(std::uintptr_t{1});
  const auto per_thread = reinterpret_cast<CuStream>(std::uintptr_t{2});
  CHECK(stands(blocking, legacy));
  CHECK(stands(legacy, per_thread));
  CHECK_FALSE(stands(nullptr, free));
  CHECK_FALSE(stands(free, nullptr));
  CHECK_FALSE(stands(blocking, free));
  // A captured stream that blocks takes the legacy stream away.
  REQUIRE(cuda.find<int(CuStream, int)>("cuStreamBeginCapture_v2")(blocking, 0) == 0);
  CHECK(driver.event_record(event, nullptr) == 906);
  void* graph = nullptr;
  REQUIRE(cuda.find<int(CuStream, void**)>("cuStreamEndCapture")(blocking, &graph) == 0);
  CHECK(driver.event_destroy(event) == 0);
  CHECK(driver.stream_destroy(blocking) == 0);
  CHECK(driver.stream_destroy(free) == 0);
  CuStream wrong = nullptr;
  CHECK(driver.stream_create(&wrong, 2) == 1);
}

TEST_CASE("a stream has a bounded queue: a caller waits when it is full, and other streams do not") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const CuStream stream = gpu.stream(1);
  const CuStream other = gpu.stream(1);
  const CuPointer memory = gpu.plain(64);
  HeldStream held(cuda, stream);
  for (int i = 0; i < 1023; ++i) REQUIRE(driver.memset_async(memory, 1, 64, stream) == 0);
  CHECK(cuda.count("callers held up") == 0);
  std::atomic<bool> taken{false};
  std::thread caller([&] {
    const CurrentContext current(*gpu.context, "a test");
    CHECK(driver.memset_async(memory, 2, 64, stream) == 0);
    taken = true;
  });
  sleep_while([&] { return cuda.count("callers held up") == 0; });
  CHECK(driver.memset_async(memory, 3, 64, other) == 0);
  CHECK(driver.stream_synchronize(other) == 0);
  CHECK_FALSE(taken);
  held.open();
  caller.join();
  CHECK(driver.stream_destroy(stream) == 0);
  CHECK(driver.stream_destroy(other) == 0);
  CHECK(driver.mem_free(memory) == 0);
}

TEST_CASE("a destroyed stream finishes its work, and a free of memory waits for it") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const CuPointer from = gpu.plain(64);
  const CuPointer to = gpu.plain(64);
  const CuStream stream = gpu.stream(1);
  HeldStream held(cuda, stream);
  REQUIRE(driver.memset_async(from, 7, 64, stream) == 0);
  REQUIRE(driver.memcpy_async(to, from, 64, stream) == 0);
  REQUIRE(driver.stream_destroy(stream) == 0);  // returns, though the stream stands
  std::thread later([&] {
    dawdle();
    CHECK(cuda.count("copied") == 0);
    held.open();
  });
  CHECK(driver.mem_free(from) == 0);
  CHECK(cuda.count("copied") == 1);
  CHECK(*cuda.host(reinterpret_cast<const std::byte*>(to), 64) == std::byte{7});
  later.join();
  CHECK(driver.mem_free(to) == 0);
  CHECK(driver.ctx_synchronize() == 0);
}

TEST_CASE("the fake reports a wait for a whole GPU while a stream there waits for a word") {
  const FakeCuda cuda;
  const Gpu gpu;
  const EngineStream engine(cuda);
  const auto load = [&] { cuda.find<fake_cuda::LoadModuleFunction>("fake_cuda_load_module")(0); };
  load();
  CHECK(cuda.count("waits behind words") == 0);
  const auto word = WaitWord::take(gpu.context, monotonic_ns() + 60'000'000'000);
  word->hold_up(engine.handle());
  std::thread later([&] {
    sleep_while([&] { return cuda.count("waits behind words") == 0; });
    word->set();
  });
  load();
  later.join();
  engine.wait();
}

TEST_CASE("plain memory is reached by its own GPU, and by those that have enabled access") {
  const FakeCuda cuda;
  const Gpu owner(0);
  const CuPointer memory = owner.plain(64);
  const Gpu peer(1);
  const CudaDriver& driver = peer.driver();
  const CuPointer own = peer.plain(64);
  const CuStream stream = peer.stream(1);
  CHECK(driver.memcpy_async(own, memory, 64, stream) == 1);
  CHECK(driver.memset_async(memory, 1, 64, stream) == 1);
  const auto enable = [&](CuContext context) {
    return cuda.find<int(CuContext, unsigned)>("cuCtxEnablePeerAccess")(context, 0);
  };
  CHECK(enable(owner.context->handle()) == 0);
  CHECK(enable(owner.context->handle()) == 704);
  CHECK(driver.memcpy_async(own, memory, 64, stream) == 0);
  CHECK(driver.stream_synchronize(stream) == 0);
  const auto far = CudaContext::retain(2, "a test");
  CHECK(enable(far->handle()) == 217);
  CHECK(driver.stream_destroy(stream) == 0);
  CHECK(driver.mem_free(own) == 0);
  CHECK(driver.mem_free(memory) == 0);
}

TEST_CASE("only attributes that the driver knows are answered, and only for GPUs that exist") {
  const FakeCuda cuda;
  const Gpu gpu;
  int value = -1;
  CHECK(gpu.driver().device_get_attribute(&value, kCuDeviceL2Bytes, 0) == 0);
  CHECK(value == 4096 * 1024);
  CHECK(death_of(cuda, [&] { gpu.driver().device_get_attribute(&value, 147, 0); }) == -SIGABRT);
  for (const int unknown : {0, 148, 9999}) CHECK(gpu.driver().device_get_attribute(&value, unknown, 0) == 1);
  CuContext context = nullptr;
  for (const int none : {-1, 4, 99}) {
    CHECK(gpu.driver().device_get_attribute(&value, kCuDeviceL2Bytes, none) == 101);
    CHECK(gpu.driver().primary_ctx_retain(&context, none) == 101);
    CHECK(gpu.driver().primary_ctx_release(none) == 101);
    CHECK(gpu.driver().device_can_access_peer(&value, 0, none) == 101);
  }
  CHECK(gpu.context->attribute(9999, "a test") == 0);
}

TEST_CASE("the cause of a driver's refusal says whether it may pass, and no field or text does") {
  const FakeCuda cuda;
  const Gpu gpu;
  const auto refusal = [&](CuResult result) {
    return error_of([&] { gpu.driver().require(result, "cuCall", "a test"); }).value();
  };
  for (const CuResult lasting : {100, 500, 801}) {
    CHECK(refusal(lasting).code() == ErrorCode::kUnsupported);
    CHECK(refusal(lasting).cause() == ErrorCause::kOther);
    CHECK(is_lasting(refusal(lasting)));
  }
  for (const CuResult passing : {1, 46, 304, 999}) {
    CHECK(refusal(passing).code() == ErrorCode::kUnsupported);
    CHECK(refusal(passing).cause() == ErrorCause::kMayPass);
    CHECK_FALSE(is_lasting(refusal(passing)));
  }
  CHECK_FALSE(is_lasting(refusal(2)));
  CHECK_FALSE(is_lasting(refusal(700)));
  CHECK(is_lasting(Error(ErrorCode::kUnsupported, "CUDA_ERROR_UNKNOWN (999)", {{"driver_code", 999}})));
}

TEST_CASE("host memory is registered once, only where it is mapped, and no copy outlives its registration") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  constexpr std::size_t kPage = 4096;
  auto* const host =
      static_cast<std::byte*>(mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(driver.mem_host_register(host + kPage, 2 * kPage, 1) == 0);
  CHECK(driver.mem_host_register(host + kPage, kPage, 1) == 712);
  CHECK(driver.mem_host_register(host, 2 * kPage, 1) == 712);  // its end
  CHECK(driver.mem_host_register(host + 2 * kPage, 2 * kPage, 1) == 712);
  CHECK(driver.mem_host_unregister(host) == 713);
  CHECK(driver.mem_host_register(nullptr, kPage, 1) == 1);  // no memory is there
  const CuPointer memory = gpu.plain(64);
  const CuStream stream = gpu.stream(1);
  cuda.set("unmap_waits", 0);
  HeldStream held(cuda, stream);
  REQUIRE(driver.memcpy_async(reinterpret_cast<CuPointer>(host + kPage), memory, 64, stream) == 0);
  CHECK(driver.mem_host_unregister(host + kPage) == 0);
  CHECK(driver.mem_host_unregister(host + kPage) == 713);
  held.open();
  CHECK(driver.stream_synchronize(stream) == 700);
  munmap(host, 4 * kPage);
  driver.stream_destroy(stream);
}

TEST_CASE("a child that is forked after cuInit has no driver, and one that stands for a new process has one") {
  if (!test::kChildMayStartThreads) return;
  const FakeCuda cuda;
  const Gpu gpu;
  REQUIRE(gpu.driver().stream_synchronize(nullptr) == 0);  // so that there is a default stream with a thread
  const CuStream stream = gpu.stream(1);
  const int forked = test::run_in_child([&] {
    const CudaDriver& driver = gpu.driver();
    int number = 0;
    if (driver.init(0) != 3 || driver.device_get_count(&number) != 3 || driver.ctx_get_device(&number) != 3) return 1;
    if (driver.stream_synchronize(stream) != 3 || driver.stream_synchronize(nullptr) != 3) return 2;
    return code_of([] { CudaContext::retain(0, "a test"); }) == ErrorCode::kFork ? 0 : 3;
  });
  CHECK(forked == 0);
  const int started = test::run_in_child([] {
    alarm(20);
    const FakeCuda own;
    if (own.left() != "contexts=1" && own.left() != "") return 1;  // of its parent
    const Gpu gpu;
    const CuPointer memory = gpu.plain(64);
    std::byte content{7};
    if (gpu.driver().memcpy_async(memory, reinterpret_cast<CuPointer>(&content), 1, nullptr) != 0) return 2;
    return gpu.driver().stream_synchronize(nullptr) == 0 ? 0 : 3;
  });
  CHECK(started == 0);
  CHECK(gpu.driver().stream_destroy(stream) == 0);
}

TEST_CASE("each thread has a separate per-thread default stream") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const auto per_thread = reinterpret_cast<CuStream>(std::uintptr_t{2});
  HeldStream held(cuda, per_thread);
  std::thread other([&] {
    const CurrentContext current(*gpu.context, "a test");
    CHECK(driver.stream_synchronize(per_thread) == 0);  // though the other thread's stands
  });
  other.join();
  CuEvent event = nullptr;
  REQUIRE(driver.event_create(&event, 2) == 0);
  REQUIRE(driver.event_record(event, per_thread) == 0);
  CHECK(driver.event_query(event) == kCudaNotReady);
  held.open();
  CHECK(driver.stream_synchronize(per_thread) == 0);
  CHECK(driver.event_destroy(event) == 0);
}

TEST_CASE("a host function of a stream may not call the driver") {
  const FakeCuda cuda;
  const Gpu gpu;
  static const CudaDriver* driver = nullptr;
  driver = &gpu.driver();
  std::atomic<int> answered{-1};
  const auto call = [](void* result) {
    CuEvent event = nullptr;
    *static_cast<std::atomic<int>*>(result) = driver->event_create(&event, 2);
  };
  const CuStream stream = gpu.stream(1);
  REQUIRE(cuda.find<int(CuStream, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, call, &answered) == 0);
  CHECK(driver->stream_synchronize(stream) == 0);
  CHECK(answered == 800);
  CHECK(driver->stream_destroy(stream) == 0);
}

TEST_CASE("a wait for an event covers the work recorded then, even if the event is recorded again") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  const CuStream first = gpu.stream(1);
  const CuStream second = gpu.stream(1);
  CuEvent event = nullptr;
  REQUIRE(driver.event_create(&event, 2) == 0);
  CHECK(driver.event_query(event) == 0);  // never recorded
  HeldStream held(cuda, first);
  REQUIRE(driver.event_record(event, first) == 0);
  REQUIRE(driver.stream_wait_event(second, event, 0) == 0);
  REQUIRE(driver.event_record(event, second) == 0);
  REQUIRE(driver.event_destroy(event) == 0);
  CuEvent end = nullptr;
  REQUIRE(driver.event_create(&end, 2) == 0);
  REQUIRE(driver.event_record(end, second) == 0);
  dawdle();
  CHECK(driver.event_query(end) == kCudaNotReady);
  held.open();
  CHECK(driver.stream_synchronize(second) == 0);
  CHECK(driver.event_query(end) == 0);
  const Gpu other(1);
  const CuStream theirs = other.stream(1);
  CHECK(driver.event_record(end, theirs) == 400);
  for (const CuStream stream : {first, second, theirs}) CHECK(driver.stream_destroy(stream) == 0);
  CHECK(driver.event_destroy(end) == 0);
  CHECK(cuda.left().find("streams") == std::string::npos);
}

TEST_CASE("an event of a whole context completes even if a stream was destroyed just before") {
  const FakeCuda cuda;
  const Gpu gpu;
  const CudaDriver& driver = gpu.driver();
  CuEvent event = nullptr;
  REQUIRE(driver.event_create(&event, 2) == 0);
  for (int round = 0; round < 500; ++round) {
    REQUIRE(driver.stream_destroy(gpu.stream(1)) == 0);
    REQUIRE(driver.ctx_record_event(gpu.context->handle(), event) == 0);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (driver.event_query(event) == kCudaNotReady) REQUIRE(std::chrono::steady_clock::now() < until);
  }
  CHECK(driver.event_destroy(event) == 0);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
