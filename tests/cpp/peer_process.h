// A forked child that stands for a peer, for tests of what processes do to each other's memory.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

namespace kvpool::testing {

// Runs `body(wait)` in a child; `wait()` there returns true after go() here, false when this process has gone.
class PeerProcess {
 public:
  template <class Body>
  explicit PeerProcess(const Body& body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::terminate();
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[1]);
      int status = 120;
      try {
        status = body([&] {
          char byte;
          return read(ends[0], &byte, 1) == 1;
        });
      } catch (const std::exception&) {
      }
      _exit(status);
    }
    close(ends[0]);
    go_ = ends[1];
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  }
  ~PeerProcess() {
    if (!reaped_) kill_and_wait();
    close(go_);
    if (pidfd_ >= 0) close(pidfd_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_; }
  void go() { static_cast<void>(!write(go_, "g", 1)); }
  // Its exit status, or -signal.
  int wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    reaped_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  void signal(int number) const { kill(pid_, number); }
  // It does nothing more when this returns.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    while (waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
  }
  int kill_and_wait() {
    signal(SIGKILL);
    return wait();
  }

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  int go_ = -1;
  bool reaped_ = false;
};

}  // namespace kvpool::testing
