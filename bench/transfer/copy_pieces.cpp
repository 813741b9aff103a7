// memcpy of N pieces, by one thread or two: what no transfer through ordinary memory can beat. Built by ceiling.py.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

void copy_some(const std::uint64_t* from, const std::uint64_t* to, std::uint64_t count, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), bytes);
  }
}

}  // namespace

extern "C" {

void copy_pieces(const std::uint64_t* from, const std::uint64_t* to, std::uint64_t count, std::uint64_t bytes,
                 std::uint64_t threads) {
  if (threads < 2 || count < 2) {
    copy_some(from, to, count, bytes);
    return;
  }
  const std::uint64_t half = count / 2;
  std::thread other(copy_some, from + half, to + half, count - half, bytes);
  copy_some(from, to, half, bytes);
  other.join();
}

// Maps another process's memory shared, from a huge page's boundary on and with its pages in place. Null when refused.
// It stays mapped until the process ends or `unmap_shared`.
std::uint64_t map_shared(const char* path, std::uint64_t bytes) {
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return 0;
  }
  void* space = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* mapped = MAP_FAILED;
  if (space != MAP_FAILED) {
    const auto start = (reinterpret_cast<std::uint64_t>(space) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    mapped = mmap(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  }
  close(file);
  if (mapped == MAP_FAILED) {
    return 0;
  }
  madvise(mapped, bytes, MADV_POPULATE_WRITE);
  madvise(mapped, bytes, MADV_COLLAPSE);  // where the file has huge pages, map them as such
  return reinterpret_cast<std::uint64_t>(mapped);
}

void unmap_shared(std::uint64_t base, std::uint64_t bytes) { munmap(reinterpret_cast<void*>(base), bytes); }

}  // extern "C"
