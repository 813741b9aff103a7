#include "kvpool/net/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>

#include "kvpool/base/fork_guard.h"

namespace kvpool {
namespace {

// One bit for each descriptor that a child has to close. A table and not a list: the child of a process with threads
// may neither allocate nor lock. A descriptor beyond it stays open in children.
constexpr std::size_t kBits = std::size_t{1} << 20;
constexpr std::size_t kWordBits = 64;
std::atomic<std::uint64_t> open_bits[kBits / kWordBits];
std::atomic<std::size_t> words_used{0};

void mark(int fd, bool open) noexcept {
  const auto bit = static_cast<std::size_t>(fd);
  if (bit >= kBits) return;
  const std::uint64_t mask = std::uint64_t{1} << (bit % kWordBits);
  std::atomic<std::uint64_t>& word = open_bits[bit / kWordBits];
  if (!open) {
    word.fetch_and(~mask, std::memory_order_relaxed);
    return;
  }
  word.fetch_or(mask, std::memory_order_relaxed);
  const std::size_t words = bit / kWordBits + 1;
  if (words > words_used.load(std::memory_order_relaxed)) words_used.store(words, std::memory_order_relaxed);
}

void close_all_in_child() noexcept {
  const std::size_t words = words_used.exchange(0, std::memory_order_relaxed);
  for (std::size_t i = 0; i < words; ++i) {
    for (std::uint64_t left = open_bits[i].exchange(0, std::memory_order_relaxed); left != 0; left &= left - 1) {
      close(static_cast<int>(i * kWordBits + static_cast<std::size_t>(__builtin_ctzll(left))));
    }
  }
  Descriptor::fork_lock().unlock();  // this thread locked it, before the fork
}

void before_fork() noexcept { Descriptor::fork_lock().lock(); }
void after_fork() noexcept { Descriptor::fork_lock().unlock(); }

[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, close_all_in_child);

}  // namespace

std::mutex& Descriptor::fork_lock() noexcept {
  static std::mutex mutex;
  return mutex;
}

// REQUIRES: fork_lock() is held.
Descriptor::Descriptor(int fd) noexcept : fd_(fd), born_(fork_generation()) {
  if (fd < 0) return;
  const int error = errno;
  mark(fd, true);
  errno = error;
}

void Descriptor::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || born_ != fork_generation()) return;
  const int error = errno;
  {
    const std::lock_guard lock(fork_lock());
    mark(fd, false);
    close(fd);
  }
  errno = error;
}

}  // namespace kvpool
