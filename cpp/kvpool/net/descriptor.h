// Owned file descriptors that are closed in a forked child. If the child kept them open, a connection would survive the
// death of its process, and the peer would never notice.
//
// A child of fork() closes them all before fork() returns in it (pthread_atfork). A Descriptor that was made before the
// fork owns nothing in the child, where its number may be reused. All are close-on-exec.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace kvpool {

class Descriptor {
 public:
  Descriptor() noexcept = default;
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), born_(other.born_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      born_ = other.born_;
    }
    return *this;
  }

  // Owns the descriptor that make() returns; nothing if it is negative (errno is kept). No fork can happen in between.
  // REQUIRES: make() does not wait, and makes the descriptor close-on-exec.
  template <class Make>
  static Descriptor open(Make&& make) {
    const std::lock_guard lock(fork_lock());
    return Descriptor(make());
  }
  // For a system call that makes several. REQUIRES: fork_lock() is held since before it.
  static Descriptor adopt(int fd) noexcept { return Descriptor(fd); }
  static std::mutex& fork_lock() noexcept;  // a fork waits for it: hold it for one system call

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  explicit Descriptor(int fd) noexcept;
  int fd_ = -1;
  std::uint32_t born_ = 0;  // fork_generation() of the process that made it
};

}  // namespace kvpool
