// Two sides of the route nccl, and a link between them that is a queue.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fake_nccl.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/data_body.h"
#include "kvpool/routes/nccl/nccl_route.h"
#include "silent_link.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing::nccl_pipes {

inline constexpr std::uint32_t kPipeBlocks = 12;
inline constexpr std::size_t kPipeBlockBytes = 768;

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

}  // namespace kvpool::testing::nccl_pipes

#endif  // KVPOOL_FAKE_CUDA
