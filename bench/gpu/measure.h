// Timing on the GPU, memory to time it with, and figures as lines of JSON.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvpool::bench {

inline void must(int result, const char* what) {
  if (result == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(result)));
  std::exit(1);
}

class Memory {
 public:
  Memory(std::size_t bytes, bool pinned) : bytes_(bytes), pinned_(pinned) {
    void* memory = nullptr;
    must(pinned ? cudaHostAlloc(&memory, bytes, cudaHostAllocMapped) : cudaMalloc(&memory, bytes), "no memory");
    memory_ = static_cast<std::byte*>(memory);
    must(cudaMemset(memory_, 0x5A, bytes), "memset");
  }
  ~Memory() { static_cast<void>(pinned_ ? cudaFreeHost(memory_) : cudaFree(memory_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return memory_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  bool pinned_;
  std::byte* memory_ = nullptr;
};

// Two streams, and events around what is timed on them.
class Clock {
 public:
  Clock() {
    for (cudaStream_t& stream : streams_) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (cudaEvent_t& event : events_) must(cudaEventCreate(&event), "event");
  }
  cudaStream_t stream(int which = 0) const { return streams_[which]; }

  // Microseconds from the first byte to the last of what `work` puts into either stream.
  double time_us(const std::function<void()>& work) {
    must(cudaDeviceSynchronize(), "what was measured before");
    must(cudaEventRecord(events_[0], streams_[0]), "record");
    must(cudaStreamWaitEvent(streams_[1], events_[0], 0), "wait");
    work();
    must(cudaEventRecord(events_[1], streams_[1]), "record");
    must(cudaStreamWaitEvent(streams_[0], events_[1], 0), "wait");
    must(cudaEventRecord(events_[2], streams_[0]), "record");
    must(cudaEventSynchronize(events_[2]), "what was measured");
    float milliseconds = 0;
    must(cudaEventElapsedTime(&milliseconds, events_[0], events_[2]), "elapsed");
    return 1000.0 * static_cast<double>(milliseconds);
  }

 private:
  cudaStream_t streams_[2] = {};
  cudaEvent_t events_[3] = {};
};

// Microseconds of the calling thread in each call; what the calls put into the stream is waited for outside.
inline std::vector<double> call_times_us(int calls, cudaStream_t stream, const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    if (i % 16 == 0) must(cudaStreamSynchronize(stream), "call");  // no queue that is full
    const auto started = std::chrono::steady_clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - started).count());
  }
  must(cudaStreamSynchronize(stream), "calls");
  return times;
}

// One way of doing what a case does.
struct Way {
  std::string name;
  std::function<void()> work;
};

inline void print_figures(const std::string& what, std::size_t piece, const std::string& way, const char* unit,
                          const std::vector<double>& values) {
  std::printf("{\"case\": \"%s\", \"piece\": %zu, \"way\": \"%s\", \"unit\": \"%s\", \"values\": [", what.c_str(),
              piece, way.c_str(), unit);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%.6g", i == 0 ? "" : ", ", values[i]);
  std::printf("]}\n");
  std::fflush(stdout);
}

// Lets the ways take turns, and prints the rate of each in GB/s. `bytes`: what counts, of one run.
inline void compare_rates(Clock& clock, int rounds, const std::string& what, std::size_t piece, std::size_t bytes,
                          const std::vector<Way>& ways) {
  std::vector<std::vector<double>> rates(ways.size());
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    for (std::size_t i = 0; i < ways.size(); ++i) {
      const double us = clock.time_us(ways[i].work);
      if (round >= 0) rates[i].push_back(static_cast<double>(bytes) / us / 1000.0);
    }
  }
  for (std::size_t i = 0; i < ways.size(); ++i) print_figures(what, piece, ways[i].name, "GB/s", rates[i]);
}

// `count` of 2 * count slots, the even ones, in a random order: no two are neighbours.
inline std::vector<std::uint32_t> scattered(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> slots(count);
  for (std::size_t i = 0; i < count; ++i) slots[i] = static_cast<std::uint32_t>(2 * i);
  std::mt19937_64 random(seed);
  for (std::size_t i = count; i > 1; --i) std::swap(slots[i - 1], slots[random() % i]);
  return slots;
}

}  // namespace kvpool::bench
