// What it costs to get from "these blocks to those" to bytes moved: descriptor work alone, and the same-host routes.
//
// Built by hand, since nothing else needs it:
//   g++ -O3 -std=c++20 -Icpp bench/transfer/descriptors.cpp <core sources> -pthread -ldl
// Times in microseconds, medians. The peer of shm and cma is a child process with separate memory.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/clock.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/strips.h"
#include "kvpool/exec/copy_threads.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/host/cma_route.h"
#include "kvpool/routes/host/memory_route.h"
#include "kvpool/routes/tracers.h"

namespace {

using namespace kvpool;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kDram = medium_index(Medium::kDram);

std::shared_ptr<Arena> arena_of(std::uint32_t blocks, std::vector<std::size_t> segment_bytes) {
  ArenaOptions options;
  options.blocks = blocks;
  options.segment_bytes = std::move(segment_bytes);
  return make_owned_arena(options);
}

MediaSpans spans_of(const Arena& arena) {
  MediaSpans spans;
  spans[kDram] = MediumSpan{arena.blocks(), arena.segments()};
  return spans;
}

PeerMetadata metadata_of(const Arena& arena) {
  PeerMetadata metadata;
  metadata.media[kDram].blocks = arena.blocks();
  metadata.media[kDram].mapped_bytes = arena.mapped_bytes();
  for (const Segment& segment : arena.segments()) {
    metadata.media[kDram].segments.push_back(
        {reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
  }
  return metadata;
}

// Blocks of an arena in random order.
std::vector<Address> scattered(std::uint32_t arena_blocks, std::size_t count, std::uint64_t seed) {
  std::vector<Address> blocks(arena_blocks);
  for (std::uint32_t i = 0; i < arena_blocks; ++i) blocks[i] = make_address(0, Medium::kDram, 1, i);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(seed));
  blocks.resize(count);
  return blocks;
}

template <class Work>
double median_us(int rounds, const Work& work) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const std::int64_t began = monotonic_ns();
    work(i);
    times.push_back(static_cast<double>(monotonic_ns() - began) / 1e3);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

// ---- descriptors

void measure_descriptors(const char* what, const std::vector<std::size_t>& from_pieces,
                         const std::vector<std::size_t>& to_pieces, std::size_t count) {
  // Addresses only: nothing looks at the memory.
  static std::byte nowhere[1];
  const auto spans = [&](const std::vector<std::size_t>& pieces) {
    MediaSpans made;
    made[kDram].blocks = static_cast<std::uint32_t>(count);
    for (const std::size_t bytes : pieces) made[kDram].segments.push_back({nowhere, bytes, bytes});
    return made;
  };
  const MediaSpans from_spans = spans(from_pieces);
  const MediaSpans to_spans = spans(to_pieces);
  const BlockStrip whole{0, 0, std::accumulate(from_pieces.begin(), from_pieces.end(), std::size_t{0})};
  const auto from = scattered(static_cast<std::uint32_t>(count), count, 1);
  const auto to = scattered(static_cast<std::uint32_t>(count), count, 2);
  std::uint64_t pieces = 0;
  std::uint64_t sum = 0;
  const double us = median_us(21, [&](int) {
    StripPlan plan(from_spans, to_spans, {&whole, 1}, true);
    pieces = 0;
    plan.emit(from, to, [&](std::span<const CopyPiece> batch) {
      pieces += batch.size();
      sum += reinterpret_cast<std::uintptr_t>(batch.back().dst);
      return true;
    });
  });
  const std::vector<ContentRange> range{{0, whole.bytes}};
  std::vector<iovec> list;
  const double gather_us = median_us(21, [&](int) {
    list.clear();
    ContentPlan(from_spans, range).emit(from, true, list);
  });
  std::printf(
      "descriptors  %-28s %zu blocks, %lu pieces: %.1f ns a block, %.2f ns a piece; gather list %.1f ns a block\n",
      what, count, pieces, us * 1e3 / static_cast<double>(count), us * 1e3 / static_cast<double>(pieces),
      gather_us * 1e3 / static_cast<double>(count));
  if (sum == 42) std::puts("");
}

// ---- kernels and routes

struct Size {
  std::size_t count;
  std::size_t bytes;
};
constexpr Size kGrid[] = {{1, 4096},     {64, 4096},    {1024, 4096},  {64, 65536},
                          {4096, 16384}, {64, 1 << 20}, {16, 16 << 20}};
constexpr std::size_t kArenaBytes = std::size_t{512} << 20;

// A child that holds the target's memory, and sleeps.
class Peer {
 public:
  Peer() : pid_(fork()) {
    if (pid_ == 0) {
      allow_tracers();
      while (true) pause();
    }
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  }
  ~Peer() {
    kill(pid_, SIGKILL);
    close(pidfd_);
  }
  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_; }

 private:
  pid_t pid_;
  int pidfd_ = -1;
};

void measure_routes(const Size& size, int threads) {
  const auto blocks = static_cast<std::uint32_t>(kArenaBytes / size.bytes);
  const auto source = arena_of(blocks, {size.bytes});
  const auto target = arena_of(blocks, {size.bytes});
  std::memset(source->segments()[0].base, 1, kArenaBytes);
  const Peer peer;
  Executor executor;
  CopyThreads copiers(executor, threads);
  CopyTeam& team = copiers.team();
  const auto shm = make_shm_route(spans_of(*source), source, metadata_of(*target), {-1, target->memfd()}, team);
  const auto cma = make_cma_route(spans_of(*source), source, metadata_of(*target), peer.pid(), peer.pidfd(), team);
  const BlockStrip whole{0, 0, size.bytes};
  const auto from = scattered(blocks, size.count, 1);
  const auto to = scattered(blocks, size.count, 2);
  const std::size_t total = size.count * size.bytes;
  const int rounds = total <= (4 << 20) ? 301 : total <= (64 << 20) ? 21 : 7;
  const auto measure = [&](Route& route) {
    WriteRequest request;
    request.strips = {&whole, 1};
    request.from = from;
    request.to = to;
    request.deadline_ns = monotonic_ns() + 60'000'000'000;
    return median_us(rounds, [&](int) { route.write(request); });
  };
  const auto copy = [&](CopyWay way) {
    std::vector<CopyPiece> pieces;
    for (std::size_t i = 0; i < size.count; ++i) {
      pieces.push_back({target->segments()[0].base + block_of(to[i]) * size.bytes,
                        source->segments()[0].base + block_of(from[i]) * size.bytes, size.bytes});
    }
    return median_us(rounds, [&](int) { copy_pieces(pieces, way); });
  };
  const double cached = copy(CopyWay::kCached);
  const double streaming = copy(CopyWay::kStreaming);
  const double shm_us = measure(*shm);
  const double cma_us = measure(*cma);
  std::printf("%5zu x %8zu  threads %d   plain %9.1f  streaming %9.1f   shm %9.1f   cma %9.1f\n", size.count,
              size.bytes, threads, cached, streaming, shm_us, cma_us);
}

// ---- gathering for sockets

// Sends `count` pieces over a Unix socket to a thread that reads them away; by a list of them, or gathered first.
double send_us(std::size_t count, std::size_t bytes, bool gather) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return -1;
  const std::size_t total = count * bytes;
  std::thread reader([&] {
    std::vector<char> sink(1 << 20);
    while (read(ends[1], sink.data(), sink.size()) > 0) {
    }
  });
  std::vector<char> memory(total * 4);
  std::vector<char> staging(total);
  std::vector<iovec> list(count);
  for (std::size_t i = 0; i < count; ++i) list[i] = {memory.data() + (i * 7919 % count) * 4 * bytes, bytes};
  const double us = median_us(101, [&](int) {
    if (gather) {
      char* next = staging.data();
      for (const iovec& piece : list) {
        std::memcpy(next, piece.iov_base, piece.iov_len);
        next += piece.iov_len;
      }
      for (std::size_t sent = 0; sent < total;)
        sent += static_cast<std::size_t>(write(ends[0], &staging[sent], total - sent));
      return;
    }
    for (std::size_t i = 0; i < count; i += 1024) {
      std::size_t left = std::min<std::size_t>(1024, count - i) * bytes;
      std::vector<iovec> part(list.begin() + static_cast<std::ptrdiff_t>(i),
                              list.begin() + static_cast<std::ptrdiff_t>(std::min(i + 1024, count)));
      std::size_t first = 0;
      while (left > 0) {
        auto sent = static_cast<std::size_t>(writev(ends[0], &part[first], static_cast<int>(part.size() - first)));
        left -= sent;
        while (sent > 0 && sent >= part[first].iov_len) sent -= part[first++].iov_len;
        if (sent > 0) part[first] = {static_cast<char*>(part[first].iov_base) + sent, part[first].iov_len - sent};
      }
    }
  });
  close(ends[0]);
  reader.join();
  close(ends[1]);
  return us;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (only.empty() || only == "descriptors") {
    measure_descriptors("aggregated, 2 MiB", {2 << 20}, {2 << 20}, 112'000);
    measure_descriptors("discrete, 80 pieces", std::vector<std::size_t>(80, 4096), std::vector<std::size_t>(80, 4096),
                        112'000);
    measure_descriptors("discrete to aggregated", std::vector<std::size_t>(80, 4096), {80 * 4096}, 112'000);
    measure_descriptors("one block", {4096}, {4096}, 1);
  }
  if (only.empty() || only == "routes") {
    for (const Size& size : kGrid) {
      for (const int threads : {1, 2}) measure_routes(size, threads);
    }
  }
  if (only.empty() || only == "gather") {
    for (const std::size_t bytes : {64, 128, 256, 512, 1024, 2048, 4096}) {
      std::printf("socket, 1024 x %4zu: list %.1f, gathered %.1f\n", bytes, send_us(1024, bytes, false),
                  send_us(1024, bytes, true));
    }
  }
}
