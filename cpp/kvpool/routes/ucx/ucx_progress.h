// The thread that lets UCX workers answer their peers while no other thread of this process waits on them. It sleeps
// until a worker has work.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace kvpool {

class UcxProgress {
 public:
  // Starts the thread, with all signals blocked. Throws Error kState when the kernel refuses to.
  UcxProgress();
  // REQUIRES: every watch was removed. Joins the thread.
  ~UcxProgress();
  UcxProgress(const UcxProgress&) = delete;
  UcxProgress& operator=(const UcxProgress&) = delete;

  // Calls serve() in the thread: once soon, then whenever `fd` becomes readable after rearm(), and after kick().
  std::uint64_t add(int fd, std::function<void()> serve);
  void rearm(std::uint64_t watch) noexcept;
  void kick(std::uint64_t watch) noexcept;
  // When this returns, serve() is not running and does not run again. Do not call it from within serve().
  void remove(std::uint64_t watch) noexcept;

  // For a forked child, where this thread does not exist.
  void abandon() noexcept;

 private:
  struct Watch {
    int fd;
    std::function<void()> serve;
    bool kicked = true;
  };

  void run() noexcept;
  void serve(std::uint64_t watch) noexcept;
  std::uint64_t next_kicked() noexcept;  // 0: none

  int epoll_ = -1;
  int wake_ = -1;
  std::mutex mutex_;
  std::condition_variable served_;
  std::unordered_map<std::uint64_t, Watch> watches_;
  std::uint64_t last_ = 0;     // the last watch that was given out; 0 is the wake descriptor
  std::uint64_t serving_ = 0;  // watch whose serve() runs; 0: none
  bool stop_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace kvpool
