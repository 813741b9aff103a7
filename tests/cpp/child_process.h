// For tests that need a separate process: one that forks, changes its limits, or has a kernel that knows less.
#pragma once

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <vector>

namespace kvpool::test {

// ThreadSanitizer does not let a child of a process that had threads start new ones.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kChildMayStartThreads = false;
#else
inline constexpr bool kChildMayStartThreads = true;
#endif

inline constexpr int kChildThrew = 120;
inline constexpr int kChildSkipped = 77;  // this machine cannot set up what the test needs

// Runs `body`, which returns the exit status, in a forked child. Returns that status, or -signal.
template <typename Body>
int run_in_child(const Body& body) {
  std::fflush(nullptr);  // or the child would print the buffered output again
  const pid_t child = fork();
  if (child == 0) {
    int status = kChildThrew;
    try {
      status = body();
    } catch (const std::exception&) {
    }
    _exit(status);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

struct RefusedCall {
  int number;         // of the system call
  int argument = -1;  // refused only with `value` in this argument; -1: always
  unsigned value = 0;
  int error = EINVAL;  // what the caller sees
};

// From now on the kernel refuses these calls to this process. False when it does not let us say so.
inline bool refuse_calls(const std::vector<RefusedCall>& refused) {
  std::vector<sock_filter> program;
  for (const RefusedCall& call : refused) {
    const bool any = call.argument < 0;
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
    program.push_back(
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call.number), 0, static_cast<__u8>(any ? 1 : 3)));
    if (!any) {
      const auto offset = static_cast<unsigned>(offsetof(seccomp_data, args) + 8 * static_cast<size_t>(call.argument));
      program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset));  // the low half, on little-endian machines
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.value, 0, 1));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(call.error)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

}  // namespace kvpool::test
