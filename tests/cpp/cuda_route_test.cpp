// Writes by a GPU that are cut into parts: how these follow each other, and that no part of an ended write is
// under way. device_transfer_test.cpp and verbs_test.cpp test whole transfers by these routes.
#include "kvpool/routes/cuda_ipc/cuda_route.h"

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/cuda/kernel_plan.h"
#include "kvpool/net/reactor.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kRouteBlocks = 12;
constexpr std::size_t kRouteBlockBytes = 256;

// Kernels that tell the test of each launch, which may answer with a code.
class TellingKernels {
 public:
  explicit TellingKernels(const FakeCuda& cuda) : kernels_(cuda), set_(kernels_.set()) {
    real() = set_.copy;
    set_.copy = [](const cuda::CopyJob& job, cuda::Stream stream, const cuda::LaunchOptions& options) {
      cuda::check_job(job);  // as every set of kernels does
      const int code = on_launch() ? on_launch()() : 0;
      return code != 0 ? code : real()(job, stream, options);
    };
  }
  ~TellingKernels() { on_launch() = nullptr; }
  TellingKernels(const TellingKernels&) = delete;
  TellingKernels& operator=(const TellingKernels&) = delete;
  const cuda::KernelSet& set() const { return set_; }
  static std::function<int()>& on_launch() {
    static std::function<int()> told;
    return told;
  }

 private:
  using Copy = int (*)(const cuda::CopyJob&, cuda::Stream, const cuda::LaunchOptions&);
  static Copy& real() {
    static Copy copy = nullptr;
    return copy;
  }

  const StreamKernels kernels_;
  cuda::KernelSet set_;
};

// A route between two arenas of a GPU, with parts of one block each.
class RouteInParts {
 public:
  explicit RouteInParts(const FakeCuda& cuda, const cuda::KernelSet* kernels = nullptr)
      : cuda_(cuda), from_(make_arena()), to_(make_arena()) {
    GpuSide local;
    local.context = from_->context();
    local.kernels = kernels;
    local.spans[0] = {from_->blocks(), from_->segments()};
    local.on_gpu[0] = true;
    local.keepalive = from_;
    local.part_bytes = kRouteBlockBytes;
    GpuPeer peer;
    peer.spans[0] = {to_->blocks(), to_->segments()};
    peer.on_gpu[0] = true;
    peer.keepalive = to_;
    route_ = make_cuda_loopback_route(std::move(local), std::move(peer));
    for (std::uint32_t block = 0; block < kRouteBlocks; ++block) {
      fill_block(cuda_, *from_, block, static_cast<std::uint8_t>(10 + block));
    }
    clear();
  }

  void clear() const {
    for (std::uint32_t block = 0; block < kRouteBlocks; ++block) fill_block(cuda_, *to_, block, 1);
  }
  // Every other block, to its own place: no two are neighbours.
  WriteRequest request() const {
    WriteRequest request;
    request.strips = {&whole_, 1};
    request.from = blocks_;
    request.to = blocks_;
    request.deadline_ns = monotonic_ns() + 60'000'000'000;
    request.bytes_done = &done;
    return request;
  }
  WriteOutcome write(const WriteRequest& request) const { return route_->write(request); }
  Route& route() const { return *route_; }
  // How many of the first blocks have arrived; no others have, even in part.
  std::optional<std::size_t> arrived() const {
    std::size_t count = 0;
    while (count < blocks_.size() && is(2 * count, 10 + 2 * count)) ++count;
    for (std::size_t block = 2 * count; block < kRouteBlocks; ++block) {
      if (!is(block, 1)) return std::nullopt;
    }
    return count;
  }
  std::size_t parts() const { return blocks_.size(); }
  // Waits for all work of the GPU.
  void synchronize() const {
    const CurrentContext current(*from_->context(), "a test");
    REQUIRE(from_->context()->driver().ctx_synchronize() == 0);
  }

  mutable std::atomic<std::uint64_t> done{0};

 private:
  static std::shared_ptr<DeviceArena> make_arena() {
    return std::make_shared<DeviceArena>(
        DeviceArenaOptions{.blocks = kRouteBlocks, .segment_bytes = {kRouteBlockBytes}});
  }
  bool is(std::size_t block, std::size_t value) const {
    return block_is(cuda_, *to_, static_cast<std::uint32_t>(block), static_cast<std::uint8_t>(value));
  }
  static Address hbm(std::uint32_t block) { return make_address(1, Medium::kHbm, 0, block); }

  const FakeCuda& cuda_;
  const std::shared_ptr<DeviceArena> from_;
  const std::shared_ptr<DeviceArena> to_;
  const BlockStrip whole_{0, 0, kRouteBlockBytes};
  const std::vector<Address> blocks_{hbm(0), hbm(2), hbm(4), hbm(6), hbm(8)};
  std::unique_ptr<Route> route_;
};

// The calls that copy and wait, in their order: "CCWCW" ...
std::string rhythm(const std::string& calls) {
  std::string found;
  std::istringstream words(calls);
  for (std::string word; words >> word;) {
    if (word.starts_with("cuMemcpyAsync(")) found += 'C';
    if (word.starts_with("cuStreamSynchronize(")) found += 'W';
  }
  return found;
}

TEST_CASE("a write by the GPU has at most two parts under way") {
  const FakeCuda cuda;
  {
    const RouteInParts route(cuda);
    const std::size_t before = rhythm(cuda.calls()).size();
    const WriteOutcome outcome = route.write(route.request());
    CHECK(rhythm(cuda.calls()).substr(before) == "CCWCWCWCWW");
    CHECK(route.arrived() == route.parts());
    CHECK(outcome.bytes == route.parts() * kRouteBlockBytes);
    CHECK(outcome.calls == route.parts());
    CHECK(route.done == outcome.bytes);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("one launch writes several blocks to a model of a space, whose blocks are numbered by units") {
  constexpr std::size_t kUnit = kRouteBlockBytes / 4;
  const FakeCuda cuda;
  const TellingKernels kernels(cuda);
  int launches = 0;
  TellingKernels::on_launch() = [&] {
    ++launches;
    return 0;
  };
  {
    const DeviceArenaOptions options{.blocks = kRouteBlocks, .segment_bytes = {kRouteBlockBytes}};
    const auto from = std::make_shared<DeviceArena>(options);
    const auto to = std::make_shared<DeviceArena>(options);
    for (std::uint32_t block = 0; block < kRouteBlocks; ++block) {
      fill_block(cuda, *from, block, static_cast<std::uint8_t>(10 + block));
      fill_block(cuda, *to, block, 1);
    }
    GpuSide local;
    local.context = from->context();
    local.kernels = &kernels.set();
    local.spans[0] = {from->blocks(), from->segments()};
    local.on_gpu[0] = true;
    local.keepalive = from;
    GpuPeer peer;
    peer.spans[0] = {4 * kRouteBlocks - 3, {Segment{to->segments().front().base, kUnit, kRouteBlockBytes}}};
    peer.on_gpu[0] = true;
    peer.keepalive = to;
    const std::unique_ptr<Route> route = make_cuda_loopback_route(std::move(local), std::move(peer));
    const auto hbm = [](std::uint32_t block) { return make_address(1, Medium::kHbm, 0, block); };
    const std::vector<Address> sources{hbm(7), hbm(2), hbm(4)};
    const std::vector<Address> targets{hbm(24), hbm(0), hbm(4)};  // units; the last two are neighbours
    const BlockStrip whole{0, 0, kRouteBlockBytes};
    std::atomic<std::uint64_t> done{0};
    WriteRequest request;
    request.strips = {&whole, 1};
    request.from = sources;
    request.to = targets;
    request.deadline_ns = monotonic_ns() + 60'000'000'000;
    request.bytes_done = &done;
    CHECK(route->write(request).bytes == 3 * kRouteBlockBytes);
    CHECK(launches == 1);
    for (std::uint32_t block = 0; block < kRouteBlocks; ++block) {
      const int wanted = block == 6 ? 17 : block == 0 ? 12 : block == 1 ? 14 : 1;
      CHECK(block_is(cuda, *to, block, static_cast<std::uint8_t>(wanted)));
    }
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("a write by the GPU that is stopped between two parts has written only the parts that it had begun") {
  const FakeCuda cuda;
  cuda.set("delay_us", 20'000);  // a copy that is not waited for comes too late for the checks
  const TellingKernels kernels(cuda);
  for (const ErrorCode wanted : {ErrorCode::kCancelled, ErrorCode::kDeadline, ErrorCode::kPeerLost}) {
    CAPTURE(static_cast<int>(wanted));
    for (const std::size_t last : {std::size_t{1}, std::size_t{2}, std::size_t{4}}) {
      CAPTURE(last);
      const RouteInParts route(cuda, &kernels.set());
      WriteRequest request = route.request();
      std::atomic<bool> cancelled{false};
      request.cancelled = &cancelled;
      const std::size_t waits = cuda.count("cuStreamSynchronize");
      std::size_t launched = 0;
      TellingKernels::on_launch() = [&] {
        if (++launched < last) return 0;
        if (wanted == ErrorCode::kCancelled) cancelled = true;
        if (wanted == ErrorCode::kDeadline) request.deadline_ns = 0;
        if (wanted == ErrorCode::kPeerLost) route.route().close();
        return 0;
      };
      CHECK(code_of([&] { route.write(request); }) == wanted);
      CHECK(launched == last);
      CHECK(cuda.count("cuStreamSynchronize") - waits == last);  // destroying a stream waits here, not on a GPU
      CHECK(route.arrived() == last);
      CHECK(route.done <= last * kRouteBlockBytes);
    }
  }
}

TEST_CASE("a run of blocks that is copied in parts is one piece by the plan") {
  const FakeCuda cuda;
  {
    const RouteInParts route(cuda);
    std::vector<Address> run;
    for (std::uint32_t block = 0; block < kRouteBlocks; ++block) {
      run.push_back(make_address(1, Medium::kHbm, 0, block));
    }
    WriteRequest request = route.request();
    request.from = run;
    request.to = run;
    const WriteOutcome merged = route.write(request);
    CHECK(merged.calls == 1);
    CHECK(merged.pieces == 1);
    CHECK(merged.bytes == kRouteBlocks * kRouteBlockBytes);
    request.merge = false;
    CHECK(route.write(request).calls == kRouteBlocks);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("when a part cannot be begun, the one before it is waited for") {
  const FakeCuda cuda;
  cuda.set("delay_us", 20'000);
  const TellingKernels kernels(cuda);
  const RouteInParts route(cuda, &kernels.set());
  std::size_t launched = 0;
  TellingKernels::on_launch() = [&] {
    return ++launched == 3 ? 2 : 0;
  };  // no memory: a kernel that cannot run is done without
  CHECK(code_of([&] { route.write(route.request()); }) == ErrorCode::kOutOfMemory);
  CHECK(route.arrived() == 2);
  CHECK(cuda.count("cuStreamSynchronize") == 3);  // also for the parts that the third had begun
  TellingKernels::on_launch() = nullptr;
  route.clear();
  CHECK(route.write(route.request()).calls == route.parts());
  CHECK(route.arrived() == route.parts());
}

TEST_CASE("if any driver call fails in a write by the GPU, the write is over when the error is thrown") {
  std::size_t failures = 0;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;
    cuda.set("delay_us", 2'000);
    {
      const RouteInParts route(cuda);
      cuda.fail_nth(n, 304);
      const auto code = code_of([&] { route.write(route.request()); });
      const bool reached = cuda.failed();
      cuda.fail_nth(0, 0);
      const auto arrived = route.arrived();
      CHECK(arrived);
      if (code) {
        ++failures;
        CHECK(*code == ErrorCode::kUnsupported);
        route.synchronize();
        CHECK(route.arrived() == arrived);
      } else {
        CHECK(arrived == route.parts());
      }
      if (!reached) break;
    }
  }
  CHECK(failures >= 10);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
