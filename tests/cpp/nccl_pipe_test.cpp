// The route nccl by itself: two sides, and a link between them that is a queue.
#include <doctest/doctest.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_nccl.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/nccl/nccl_route.h"
#include "silent_link.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kPipeBlocks = 12;
constexpr std::size_t kPipeBlockBytes = 768;

// Runs work one piece after another, in a thread.
class OneThread {
 public:
  OneThread() : thread_([this] { loop(); }) {}
  ~OneThread() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  void run(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ended_ = false;
  std::thread thread_;
};

// Its messages reach the other side's route receiver, in order.
class QueueLink final : public SilentLink {
 public:
  void send(Message&& message) override {
    const std::lock_guard lock(mutex_);
    if (closed) throw Error(ErrorCode::kPeerLost, "closed");
    const auto kept = std::make_shared<Message>(std::move(message));
    thread_->run([this, kept] { to->on_message(std::move(*kept)); });
  }
  void close(const Error&) noexcept override { closed = true; }
  // Delivers what was sent, and nothing more.
  void finish() {
    std::unique_ptr<OneThread> last;
    {
      const std::lock_guard lock(mutex_);
      closed = true;
      last.swap(thread_);
    }
    last.reset();
  }

  std::shared_ptr<RouteReceiver> to;
  std::atomic<bool> closed{false};

 private:
  std::mutex mutex_;
  std::unique_ptr<OneThread> thread_ = std::make_unique<OneThread>();
};

class Side {
 public:
  Side(const FakeCuda& cuda, int device, std::vector<std::size_t> segments, const cuda::KernelSet* kernels = nullptr,
       const NcclLimits& limits = {})
      : cuda_(cuda),
        arena_(std::make_shared<DeviceArena>(
            DeviceArenaOptions{.blocks = kPipeBlocks, .segment_bytes = std::move(segments), .device = device})),
        link_(std::make_shared<QueueLink>()) {
    NcclMemory memory;
    memory.library = &load_nccl(fake_nccl_path());
    memory.context = arena_->context();
    memory.local[0] = {arena_->blocks(), arena_->segments()};
    memory.keepalive = arena_;
    memory.kernels = kernels;
    memory.limits = limits;
    spans_ = memory.local;
    route_ = make_nccl_route(memory, link_,
                             [this](const void*, std::function<void()> work) { receiver_.run(std::move(work)); });
    route_->route_receiver()->begin(
        [this](std::uint64_t id, std::span<const std::byte> body, std::uint64_t bytes) {
          Placement placement;
          if (admits) placement.pieces = data_placement(read_data_body(body, bytes, spans_), spans_);
          placement.token = id;
          return placement;
        },
        [this](std::uint64_t, bool intact) { ++(intact ? placed : given_up); });
  }
  // The receiver's thread frees what it has taken of the GPU.
  ~Side() { route_.reset(); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  void meet(Side& other) const { link_->to = other.route_->route_receiver(); }

  // Byte `at` of a block's content, written and read by the test.
  void fill(std::uint32_t block, unsigned seed) const {
    std::size_t at = 0;
    for (const Segment& segment : arena_->segments()) {
      std::byte* piece = cuda_.host(segment.base + block * segment.stride, segment.bytes);
      for (std::size_t i = 0; i < segment.bytes; ++i, ++at) piece[i] = value(seed, at);
    }
  }
  bool holds(std::uint32_t block, unsigned seed) const {
    std::size_t at = 0;
    for (const Segment& segment : arena_->segments()) {
      const std::byte* piece = cuda_.host(segment.base + block * segment.stride, segment.bytes);
      for (std::size_t i = 0; i < segment.bytes; ++i, ++at) {
        if (piece[i] != value(seed, at)) return false;
      }
    }
    return true;
  }

  // Blocks 0, 2, 1 to blocks 5, 3, 9.
  WriteOutcome write(double seconds = 30, const std::atomic<bool>* cancelled = nullptr) const {
    const std::size_t bytes = arena_->block_bytes();
    const std::array strips{BlockStrip{0, 0, bytes / 3}, BlockStrip{bytes / 3, bytes / 3, bytes - bytes / 3}};
    const std::array from{hbm(0), hbm(2), hbm(1)};
    const std::array to{hbm(5), hbm(3), hbm(9)};
    WriteRequest request;
    request.transfer = 4;
    request.strips = strips;
    request.from = from;
    request.to = to;
    request.deadline_ns = monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9);
    request.cancelled = cancelled;
    return route_->write(request);
  }
  Route& route() const { return *route_; }
  QueueLink& link() const { return *link_; }

  std::atomic<bool> admits{true};
  std::atomic<int> placed{0};
  std::atomic<int> given_up{0};

 private:
  static std::byte value(unsigned seed, std::size_t at) {
    return static_cast<std::byte>(seed * 37 + at * 11 + (at >> 8));
  }
  static Address hbm(std::uint32_t block) { return make_address(1, Medium::kHbm, 0, block); }

  const FakeCuda& cuda_;
  std::shared_ptr<DeviceArena> arena_;
  MediaSpans spans_;
  std::shared_ptr<QueueLink> link_;
  std::shared_ptr<Route> route_;
  OneThread receiver_;  // ends first: what it runs needs all of the above
};

struct Sides {
  FakeCuda cuda;
  FakeNccl nccl;
  Side a;
  Side b;

  explicit Sides(const cuda::KernelSet* kernels = nullptr, const NcclLimits& of_a = {}, const NcclLimits& of_b = {})
      : a(cuda, 0, {kPipeBlockBytes}, kernels, of_a), b(cuda, 1, {100, 156, 512}, kernels, of_b) {
    a.meet(b);
    b.meet(a);
    for (std::uint32_t block = 0; block < 3; ++block) {
      a.fill(block, 10 + block);
      b.fill(block, 20 + block);
    }
  }
  ~Sides() {
    nccl.set("stall", 0);
    a.link().finish();
    b.link().finish();
  }

  void clear(const Side& side) const {
    for (const std::uint32_t block : {5U, 3U, 9U}) side.fill(block, 99);
  }
  static bool arrived(const Side& side, unsigned seed) {
    return side.holds(5, seed) && side.holds(3, seed + 2) && side.holds(9, seed + 1);
  }
  void exchange() const {
    clear(b);
    CHECK(a.write().bytes == 3 * kPipeBlockBytes);
    CHECK(arrived(b, 10));
  }
};

template <class Holds>
bool in_time(const Holds& holds) {
  for (const std::int64_t until = monotonic_ns() + 60'000'000'000; !holds();) {
    if (monotonic_ns() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST_CASE("nccl pipes: scattered strips of scattered blocks arrive, both ways at once and repeatedly") {
  Sides sides;
  std::thread back([&] {
    for (int i = 0; i < 20; ++i) sides.b.write();
  });
  for (int i = 0; i < 20; ++i) sides.a.write();
  back.join();
  CHECK(Sides::arrived(sides.b, 10));
  CHECK(Sides::arrived(sides.a, 20));
  CHECK(sides.nccl.count("ncclCommInitRankConfig") == 4);
  CHECK(sides.nccl.count("mismatches") == 0);
  CHECK(sides.a.placed + sides.b.placed == 40);
}

TEST_CASE("nccl pipes: threads that write at once take turns") {
  Sides sides;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { sides.a.write(); });
  for (auto& thread : threads) thread.join();
  CHECK(Sides::arrived(sides.b, 10));
  CHECK(sides.b.placed == 4);
}

TEST_CASE("nccl pipes: a kernel gathers and scatters where there is one") {
  FakeCuda cuda;
  const StreamKernels kernels(cuda);
  Sides sides(&kernels.set());
  const int launches = StreamKernels::launches();
  sides.exchange();
  CHECK(StreamKernels::launches() == launches + 2);
}

TEST_CASE("nccl pipes: a communicator that is never complete ends at the deadline, and the next write makes another") {
  Sides sides;
  sides.nccl.set("join", 0);
  CHECK(code_of([&] { sides.a.write(0.2); }) == ErrorCode::kDeadline);
  sides.nccl.set("join", 1);
  sides.exchange();
}

TEST_CASE("nccl pipes: a communicator that is not complete in time has failed, long before the caller's deadline") {
  Sides sides(nullptr, {.init_ns = 200'000'000});
  sides.nccl.set("join", 0);
  std::string text;
  CHECK(code_of([&] { sides.a.write(60); }, &text) == ErrorCode::kRouteFailed);
  CHECK_MESSAGE(text.find("200 ms") != std::string::npos, text);
  sides.nccl.set("join", 1);
  sides.exchange();
}

TEST_CASE("nccl pipes: a receiver that waits in vain for a communicator tells its sender") {
  Sides sides(nullptr, {}, {.init_ns = 200'000'000});
  sides.nccl.set("join", 0);
  std::string text;
  CHECK(code_of([&] { sides.a.write(60); }, &text) == ErrorCode::kRouteFailed);
  CHECK_MESSAGE(text.find("the peer cannot receive by NCCL") != std::string::npos, text);
}

TEST_CASE("nccl pipes: memory for passes is taken when a pipe is opened, as much as the sender asks for") {
  const NcclLimits small{.pass_bytes = std::uint64_t{2} << 20};
  const NcclLimits large{.pass_bytes = std::uint64_t{8} << 20};
  Sides sides(nullptr, small, large);
  const std::size_t before = sides.cuda.count("bytes");
  sides.exchange();
  CHECK(sides.cuda.count("bytes") - before == 2 * small.pass_bytes);
  const std::size_t allocations = sides.cuda.count("cuMemAlloc");
  const std::size_t frees = sides.cuda.count("cuMemFree");
  for (int i = 0; i < 3; ++i) sides.exchange();
  CHECK(sides.cuda.count("cuMemAlloc") == allocations);
  CHECK(sides.cuda.count("cuMemFree") == frees);
  CHECK(sides.b.write().bytes > 0);
  CHECK(sides.cuda.count("bytes") - before == 2 * small.pass_bytes + 2 * large.pass_bytes);
}

TEST_CASE("nccl pipes: a GPU without room for passes cannot use a pipe, and nothing is left of the trial") {
  Sides sides;
  const std::size_t before = sides.cuda.count("bytes");
  sides.cuda.fail("cuMemAlloc", 2);
  std::string text;
  CHECK(code_of([&] { sides.a.write(); }, &text) == ErrorCode::kUnsupported);
  CHECK_MESSAGE(text.find("nccl_pass_bytes") != std::string::npos, text);
  CHECK(in_time([&] { return sides.nccl.count("communicators") == 0; }));
  CHECK(sides.cuda.count("bytes") == before);
  CHECK(sides.b.placed == 0);
  sides.cuda.fail("cuMemAlloc", 0);
  sides.exchange();
}

TEST_CASE("nccl pipes: a write that is cancelled has ended on both sides when it throws") {
  Sides sides;
  sides.exchange();
  sides.nccl.set("stall", 1);
  std::atomic<bool> cancelled{false};
  const std::size_t received = sides.nccl.count("ncclRecv");
  std::thread canceller([&] {
    CHECK(in_time([&] { return sides.nccl.count("ncclRecv") > received; }));
    cancelled = true;
  });
  CHECK(code_of([&] { sides.a.write(60, &cancelled); }) == ErrorCode::kCancelled);
  canceller.join();
  CHECK(sides.b.given_up == 1);  // nothing is written into these blocks any more
  CHECK(sides.nccl.count("communicators") == 0);
  sides.nccl.set("stall", 0);
  sides.exchange();
}

TEST_CASE("nccl pipes: one direction goes on while the other waits") {
  Sides sides;
  sides.exchange();
  CHECK(sides.b.write().bytes > 0);
  sides.nccl.set("break_in", 1);  // the next message breaks its communicator, and no other
  CHECK(code_of([&] { sides.a.write(); }) == ErrorCode::kRouteFailed);
  const std::size_t made = sides.nccl.count("ncclCommInitRankConfig");
  CHECK(sides.b.write().bytes > 0);
  CHECK(sides.nccl.count("ncclCommInitRankConfig") == made);
  sides.exchange();
}

TEST_CASE("nccl pipes: blocks that do not belong to the sender are refused, and it goes on") {
  Sides sides;
  sides.b.admits = false;
  CHECK(code_of([&] { sides.a.write(); }) == ErrorCode::kNotOwner);
  CHECK(sides.b.placed == 0);
  sides.b.admits = true;
  sides.exchange();
}

TEST_CASE("nccl pipes: a route that is closed, or whose link has ended, ends its writes") {
  Sides sides;
  sides.exchange();
  sides.nccl.set("stall", 1);
  const std::size_t sent = sides.nccl.count("ncclSend");
  std::thread closer([&] {
    CHECK(in_time([&] { return sides.nccl.count("ncclSend") > sent; }));
    sides.a.route().close();
  });
  CHECK(code_of([&] { sides.a.write(60); }) == ErrorCode::kPeerLost);
  closer.join();
  std::atomic<bool> closed{false};
  sides.b.route().route_receiver()->close([&] { closed = true; });
  CHECK(in_time([&] { return closed.load(); }));
  CHECK(sides.b.given_up == 1);
  CHECK(sides.nccl.count("communicators") == 0);
}

TEST_CASE("nccl pipes: if any NCCL call fails, the write fails or has arrived, and the next one works") {
  for (int n = 1;; ++n) {
    Sides sides;
    sides.clear(sides.b);
    sides.nccl.fail_nth(n, 2);
    const auto error = error_of([&] { sides.a.write(); });
    const bool reached = sides.nccl.failed();
    sides.nccl.fail_nth(0, 0);
    if (error) {
      CHECK_MESSAGE(error->code() == ErrorCode::kRouteFailed, std::string(error->what()));
    } else {
      CHECK(Sides::arrived(sides.b, 10));
    }
    sides.exchange();
    if (!reached || n == 40) break;
  }
}

TEST_CASE("nccl pipes: if any driver call fails, the write fails or has arrived, and the next one works") {
  Sides sides;
  sides.exchange();
  for (int n = 1; n <= 30; ++n) {
    sides.clear(sides.b);
    sides.cuda.fail_nth(n, 801);
    const auto error = error_of([&] { sides.a.write(); });
    sides.cuda.fail_nth(0, 0);
    if (error) {
      const bool own = error->code() == ErrorCode::kUnsupported || error->code() == ErrorCode::kRouteFailed;
      CHECK_MESSAGE(own, std::string(error->what()));
    } else {
      CHECK(Sides::arrived(sides.b, 10));
    }
    sides.exchange();
  }
}

TEST_CASE("nccl pipes: a block that does not exist is refused before anything is announced") {
  Sides sides;
  WriteRequest request;
  const BlockStrip strip{0, 0, 8};
  const Address missing = make_address(1, Medium::kHbm, 0, kPipeBlocks);
  const Address dram = make_address(1, Medium::kDram, 0, 0);
  request.strips = {&strip, 1};
  request.deadline_ns = monotonic_ns() + 1'000'000'000;
  for (const Address& from : {missing, dram}) {
    request.from = {&from, 1};
    request.to = {&from, 1};
    CHECK(code_of([&] { sides.a.route().write(request); }) == ErrorCode::kArgument);
  }
  CHECK(sides.nccl.count("ncclGetUniqueId") == 0);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
