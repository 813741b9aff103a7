// For tests of memory on the fake GPUs: streams of an application, and kernels that run in them.
#pragma once

#include "fake_driver.h"

#ifdef KVPOOL_FAKE_CUDA

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/cuda/context.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::testing {

// A stream as an engine has one, and work for it.
class EngineStream {
 public:
  EngineStream(const FakeCuda& cuda, int device = 0)
      : cuda_(cuda), context_(CudaContext::retain(device, "a test's stream")) {
    const CurrentContext current(*context_, "a test's stream");
    REQUIRE(context_->driver().stream_create(&stream_, 1) == 0);
  }
  ~EngineStream() {
    const CurrentContext current(*context_);
    context_->driver().stream_destroy(stream_);
  }
  EngineStream(const EngineStream&) = delete;
  EngineStream& operator=(const EngineStream&) = delete;

  CuStream handle() const { return stream_; }
  void run(std::function<void()> work) const {
    const CurrentContext current(*context_, "a test's stream");
    using Launch = int(CuStream, void (*)(void*), void*);
    const auto call = [](void* argument) {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(argument));
      (*owned)();
    };
    REQUIRE(cuda_.find<Launch>("cuLaunchHostFunc")(stream_, call, new std::function<void()>(std::move(work))) == 0);
  }
  void begin_capture() const {
    const CurrentContext current(*context_, "a test's stream");
    REQUIRE(cuda_.find<int(CuStream, int)>("cuStreamBeginCapture_v2")(stream_, 0) == 0);
  }
  void end_capture() const {
    const CurrentContext current(*context_, "a test's stream");
    void* graph = nullptr;
    REQUIRE(cuda_.find<int(CuStream, void**)>("cuStreamEndCapture")(stream_, &graph) == 0);
  }
  void wait() const {
    const CurrentContext current(*context_, "a test's stream");
    REQUIRE(context_->driver().stream_synchronize(stream_) == 0);
  }

 private:
  const FakeCuda& cuda_;
  std::shared_ptr<const CudaContext> context_;
  CuStream stream_ = nullptr;
};

// Work of a GPU that ends when the test says so, or goes.
class Gate {
 public:
  explicit Gate(const EngineStream& engine) : engine_(engine) {
    engine_.run([open = open_] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
      while (!*open && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
  }
  ~Gate() {
    open();
    engine_.wait();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { *open_ = true; }

 private:
  const EngineStream& engine_;
  const std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

// Longer than any copy that is not held up: work that is not ordered after it comes before.
inline void dawdle() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

// Every piece of the block filled with the value, in ordinary memory or a GPU's.
inline void fill_block(const FakeCuda& cuda, const Arena& arena, std::uint32_t block, std::uint8_t value) {
  for (const Segment& segment : arena.segments()) {
    std::memset(cuda.host(segment.base + block * segment.stride, segment.bytes), value, segment.bytes);
  }
}

inline bool block_is(const FakeCuda& cuda, const Arena& arena, std::uint32_t block, std::uint8_t value) {
  for (const Segment& segment : arena.segments()) {
    const std::byte* piece = cuda.host(segment.base + block * segment.stride, segment.bytes);
    for (std::size_t i = 0; i < segment.bytes; ++i) {
      if (piece[i] != std::byte{value}) return false;
    }
  }
  return true;
}

// Copies as the GPU's kernels do: in the stream, when its turn comes.
class StreamKernels {
 public:
  explicit StreamKernels(const FakeCuda& cuda) { fake() = &cuda; }
  ~StreamKernels() {
    fake() = nullptr;
    answer() = 0;
    load_answer() = 0;
    loaded_on() = -1;
  }
  StreamKernels(const StreamKernels&) = delete;
  StreamKernels& operator=(const StreamKernels&) = delete;

  const cuda::KernelSet& set() const { return set_; }
  // The result of every launch from now on; 0: it copies.
  static std::atomic<int>& answer() {
    static std::atomic<int> code{0};
    return code;
  }
  // The result of loading from now on; the device whose context was current at the last.
  static std::atomic<int>& load_answer() {
    static std::atomic<int> code{0};
    return code;
  }
  static std::atomic<int>& loaded_on() {
    static std::atomic<int> device{-1};
    return device;
  }
  static std::atomic<int>& launches() {
    static std::atomic<int> count{0};
    return count;
  }

 private:
  struct Piece {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  static const FakeCuda*& fake() {
    static const FakeCuda* cuda = nullptr;
    return cuda;
  }
  static int load() {
    int device = -1;
    CHECK(fake()->find<int(int*)>("cuCtxGetDevice")(&device) == 0);
    loaded_on() = device;
    return load_answer();
  }
  static int copy(const cuda::CopyJob& job, cuda::Stream stream, const cuda::LaunchOptions&) {
    ++launches();
    if (answer() != 0) return answer();
    auto pieces = std::make_unique<std::vector<Piece>>();
    for (const PlannedStrip& strip : job.strips) {
      for (const cuda::BlockPair& pair : job.pairs) {
        pieces->push_back({fake()->host(strip.to + pair.to * strip.to_stride, strip.bytes),
                           fake()->host(strip.from + pair.from * strip.from_stride, strip.bytes), strip.bytes});
      }
    }
    const auto call = [](void* argument) {
      const std::unique_ptr<std::vector<Piece>> owned(static_cast<std::vector<Piece>*>(argument));
      for (const Piece& piece : *owned) std::memcpy(piece.to, piece.from, piece.bytes);
    };
    using Launch = int(CuStream, void (*)(void*), void*);
    const int code = fake()->find<Launch>("cuLaunchHostFunc")(stream, call, pieces.get());
    if (code == 0) static_cast<void>(pieces.release());
    return code;
  }

  cuda::KernelSet set_{"stream", &copy, nullptr, &load};
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
