#include "copy_count.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstring>

// The linker points every call of memcpy in this program's own objects to __wrap_memcpy, and __real_memcpy to memcpy.
// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" {
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes);
void* __real_memmove(void* to, const void* from, std::size_t bytes);
void* __wrap_memmove(void* to, const void* from, std::size_t bytes);
ssize_t __real_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __real_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags);
ssize_t __real_recv(int fd, void* to, std::size_t bytes, int flags);
ssize_t __wrap_recv(int fd, void* to, std::size_t bytes, int flags);
ssize_t __real_process_vm_writev(pid_t process, const iovec* here, unsigned long here_count, const iovec* there,
                                 unsigned long there_count, unsigned long flags);
ssize_t __wrap_process_vm_writev(pid_t process, const iovec* here, unsigned long here_count, const iovec* there,
                                 unsigned long there_count, unsigned long flags);
}
// NOLINTEND(bugprone-reserved-identifier)

namespace {

constexpr std::size_t kContent = 1024;  // shorter ones are of heads and tables

std::atomic<bool> counting{false};
std::atomic<std::uint64_t> by_cpu{0};
std::atomic<std::uint64_t> by_linux{0};

void count(std::size_t bytes) noexcept {
  if (bytes >= kContent && counting.load(std::memory_order_relaxed)) by_cpu.fetch_add(bytes, std::memory_order_relaxed);
}

ssize_t moved(ssize_t bytes) noexcept {
  if (bytes > 0 && counting.load(std::memory_order_relaxed)) {
    by_linux.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  }
  return bytes;
}

}  // namespace

extern "C" {
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  count(bytes);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  count(bytes);
  return __real_memmove(to, from, bytes);
}
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) { return moved(__real_sendmsg(fd, message, flags)); }
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) { return moved(__real_recvmsg(fd, message, flags)); }
ssize_t __wrap_recv(int fd, void* to, std::size_t bytes, int flags) { return moved(__real_recv(fd, to, bytes, flags)); }
ssize_t __wrap_process_vm_writev(pid_t process, const iovec* here, unsigned long here_count, const iovec* there,
                                 unsigned long there_count, unsigned long flags) {
  return moved(__real_process_vm_writev(process, here, here_count, there, there_count, flags));
}
}

namespace kvpool::testing {

CopyCount::CopyCount() noexcept {
  ::by_cpu = 0;
  ::by_linux = 0;
  counting = true;
}

CopyCount::~CopyCount() { counting = false; }

std::uint64_t CopyCount::by_cpu() const noexcept { return ::by_cpu; }
std::uint64_t CopyCount::by_linux() const noexcept { return ::by_linux; }

}  // namespace kvpool::testing
