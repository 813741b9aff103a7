// For tests that load UCX. It leaves threads, hooks and descriptors in a process, and must not be there before a fork:
// each such test runs alone in a separate process.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "block_memory.h"
#include "doctest/doctest.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_route.h"
#include "kvpool/routes/ucx/ucx_worker.h"
#include "new_process.h"
#include "thrown.h"

namespace kvpool::testing {

// What KVPOOL_UCX says; else where Python finds the wheel; else the system's.
inline const std::string& ucx_place() {
  static const std::string place = [] {
    const char* chosen = std::getenv("KVPOOL_UCX");
    if (chosen != nullptr && std::string_view(chosen) != "wheel") return std::string(chosen);
    std::string found;
    // NOLINTNEXTLINE(bugprone-command-processor): a fixed command
    FILE* python = popen("python3 -c 'import libucx; print(libucx.__path__[0])' 2>/dev/null", "r");
    if (python != nullptr) {
      std::array<char, 4096> line{};
      if (std::fgets(line.data(), line.size(), python) != nullptr)
        found.assign(line.data(), std::strcspn(line.data(), "\n"));
      pclose(python);
    }
    return found.empty() ? std::string("system") : found + "/lib";
  }();
  return place;
}

// Runs this test case again, alone, in a new process with these variables set; true there, false here. Skips with a
// message where there is no UCX. `load` false: the test loads it itself.
inline bool alone(const char* test, const std::vector<std::string>& variables = {}, bool load = true) {
  std::vector<std::string> set{"KVPOOL_UCX=" + ucx_place()};
  set.insert(set.end(), variables.begin(), variables.end());
#if defined(__SANITIZE_THREAD__)
  set.emplace_back(
      "UCX_MEM_EVENTS=n");  // or UCX would patch the code of mmap, and ThreadSanitizer has done that already
#endif
  // The rest of UCX's settings are the test's to make.
  if (!in_new_process(test, set, {"UCX_", "KVPOOL_UCX="})) return false;
  if (!load) return true;
  try {
    describe_ucx(ucx_place());
  } catch (const Error& error) {
    REQUIRE(error.code() == ErrorCode::kUnsupported);
    const std::string why = error.what();
    MESSAGE("skipped: ", why);
    return false;
  }
  return true;
}

// A pool's memory as the transport sees it, in a file that processes share or in plain memory.
class UcxSide {
 public:
  UcxSide(const SpanShape& hbm, const SpanShape& dram, bool shared) : bytes_(hbm.memory_bytes + dram.memory_bytes) {
    const int file = shared ? memfd_create("ucx_test", MFD_CLOEXEC) : -1;
    if (shared) REQUIRE(ftruncate(file, static_cast<off_t>(bytes_)) == 0);
    void* base =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file, 0);
    REQUIRE(base != MAP_FAILED);
    if (shared) ::close(file);
    memory_ = {static_cast<std::byte*>(base), [bytes = bytes_](std::byte* at) { munmap(at, bytes); }};
    spans_[Medium::kHbm] = hbm.span(memory_.get());
    spans_[Medium::kDram] = dram.span(memory_.get() + hbm.memory_bytes);
  }

  const MediaSpans& spans() const { return spans_; }
  std::byte* memory() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  std::shared_ptr<void> keepalive() const { return memory_; }

  void start() { worker_ = UcxContext::make(ucx_place(), {.spans = spans_, .gpu = nullptr}, memory_)->make_worker(); }
  UcxWorker& worker() { return *worker_; }
  void stop() { worker_.reset(); }
  PeerMetadata metadata() const { return metadata(worker_->blob()); }
  // With the blob of another process, whose memory lies where this one's does.
  PeerMetadata metadata(const Bytes& blob) const {
    PeerMetadata metadata;
    metadata.name = "peer";
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      metadata.media[i].blocks = spans_[i].blocks;
      for (const Segment& segment : spans_[i].segments) {
        metadata.media[i].segments.push_back(
            {reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
      }
    }
    metadata.ucx = blob;
    return metadata;
  }

 private:
  std::size_t bytes_;
  std::shared_ptr<std::byte> memory_;
  MediaSpans spans_;
  std::shared_ptr<UcxWorker> worker_;
};

inline std::int64_t in_ms(std::int64_t ms) { return monotonic_ns() + ms * 1'000'000; }

inline std::vector<Address> blocks_of(Medium medium, std::uint32_t first, std::uint32_t count) {
  std::vector<Address> addresses;
  addresses.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) addresses.push_back(make_address(0, medium, 1, first + i));
  return addresses;
}

// Throws what write() throws.
inline WriteOutcome write_blocks(Route& route, const std::vector<BlockStrip>& strips, const std::vector<Address>& from,
                                 const std::vector<Address>& to, std::int64_t deadline_ns = in_ms(20'000),
                                 const std::atomic<bool>* cancelled = nullptr) {
  WriteRequest request;
  request.strips = strips;
  request.from = from;
  request.to = to;
  request.deadline_ns = deadline_ns;
  request.cancelled = cancelled;
  return route.write(request);
}

inline std::size_t entries(const char* folder) {
  std::size_t count = 0;
  DIR* opened = opendir(folder);
  while (opened != nullptr && readdir(opened) != nullptr) ++count;
  if (opened != nullptr) closedir(opened);
  return count;
}

}  // namespace kvpool::testing
