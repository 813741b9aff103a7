// UCX's cma transport asks whether a peer is in reach by reading the peer's list of pieces over its own one, wherever
// that lies on the stack. AddressSanitizer's process_vm_readv then looks at the memory that the new list names, which
// is arbitrary, and dies of it. So the tests have one without that look; what kvpool itself reads is compared byte by
// byte.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
extern "C" __attribute__((visibility("default"))) ssize_t process_vm_readv(pid_t process, const iovec* local,
                                                                           unsigned long local_count,
                                                                           const iovec* remote,
                                                                           unsigned long remote_count,
                                                                           unsigned long flags) noexcept {
  return syscall(SYS_process_vm_readv, process, local, local_count, remote, remote_count, flags);
}
#endif
