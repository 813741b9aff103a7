#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "kvpool/disk/crew.h"
#include "kvpool/disk/io_engine.h"
#include "kvpool/disk/uring_abi.h"

namespace kvpool {
namespace {

class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (at_ != nullptr) munmap(at_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  bool map(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    void* const at =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (at == MAP_FAILED) return false;
    at_ = at;
    bytes_ = bytes;
    return true;
  }
  template <class T>
  T* at(std::uint32_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(at_) + offset);
  }

 private:
  void* at_ = nullptr;
  std::size_t bytes_ = 0;
};

// Both rings. The kernel moves the head of the first and the tail of the second.
class Ring {
 public:
  Ring() = default;
  ~Ring() {
    if (fd_ >= 0) close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool open(std::uint32_t entries) noexcept {
    uring::Params params{};
    fd_ = static_cast<int>(syscall(uring::kSetupCall, entries, &params));
    if (fd_ < 0 || (params.features & uring::kSingleMmap) == 0) return false;
    const std::size_t submissions = params.sq.array + params.sq_entries * sizeof(std::uint32_t);
    const std::size_t completions = params.cq.cqes + params.cq_entries * sizeof(uring::Completed);
    if (!rings_.map(fd_, uring::kSubmissionRing, std::max(submissions, completions))) return false;
    if (!entries_.map(fd_, uring::kEntries, params.sq_entries * sizeof(uring::Submission))) return false;
    submit_tail_ = rings_.at<std::atomic<std::uint32_t>>(params.sq.tail);
    submit_mask_ = *rings_.at<std::uint32_t>(params.sq.ring_mask);
    submit_array_ = rings_.at<std::uint32_t>(params.sq.array);
    done_head_ = rings_.at<std::atomic<std::uint32_t>>(params.cq.head);
    done_tail_ = rings_.at<std::atomic<std::uint32_t>>(params.cq.tail);
    done_mask_ = *rings_.at<std::uint32_t>(params.cq.ring_mask);
    done_ = rings_.at<uring::Completed>(params.cq.cqes);
    return true;
  }

  // Returns 0 or an errno. One thread at a time.
  int submit(const uring::Submission& submission) noexcept {
    const std::uint32_t tail = submit_tail_->load(std::memory_order_relaxed);
    *entries_.at<uring::Submission>((tail & submit_mask_) * sizeof(submission)) = submission;
    submit_array_[tail & submit_mask_] = tail & submit_mask_;
    submit_tail_->store(tail + 1, std::memory_order_release);
    for (;;) {
      if (syscall(uring::kEnterCall, fd_, 1, 0, 0, nullptr, 0) == 1) return 0;
      if (errno == EINTR || errno == EAGAIN || errno == EBUSY) continue;
      const int error = errno;
      submit_tail_->store(tail, std::memory_order_release);  // the kernel has not taken it
      return error;
    }
  }

  // Waits for the next completion. One thread.
  uring::Completed next() noexcept {
    const std::uint32_t head = done_head_->load(std::memory_order_relaxed);
    while (done_tail_->load(std::memory_order_acquire) == head) {
      syscall(uring::kEnterCall, fd_, 0, 1, uring::kGetEvents, nullptr, 0);
    }
    const uring::Completed completed = done_[head & done_mask_];
    done_head_->store(head + 1, std::memory_order_release);
    return completed;
  }

 private:
  int fd_ = -1;
  Mapping rings_;
  Mapping entries_;
  std::atomic<std::uint32_t>* submit_tail_ = nullptr;
  std::uint32_t submit_mask_ = 0;
  std::uint32_t* submit_array_ = nullptr;
  std::atomic<std::uint32_t>* done_head_ = nullptr;
  std::atomic<std::uint32_t>* done_tail_ = nullptr;
  std::uint32_t done_mask_ = 0;
  uring::Completed* done_ = nullptr;
};

struct UringState {
  Ring ring;
  int fd = -1;
  std::mutex submitting;  // also: what a thread did before submit() is seen by the one that gets the completion
  std::size_t running = 0;
  bool stopping = false;

  int push(DiskIo& io) noexcept {
    io.rest = {io.buffer + io.done, io.bytes - io.done};
    uring::Submission submission{};
    submission.operation = io.write ? uring::Operation::kWritev : uring::Operation::kReadv;
    submission.fd = fd;
    submission.offset = io.offset + io.done;
    submission.address = reinterpret_cast<std::uint64_t>(&io.rest);
    submission.length = 1;
    submission.user_data = reinterpret_cast<std::uint64_t>(&io);
    return ring.submit(submission);
  }

  // After a completion with this result: the I/O's errno, 0 if it is whole, or -1 if the rest was submitted.
  int advance(DiskIo& io, std::int32_t result) noexcept {
    const bool again = result == -EINTR || result == -EAGAIN;
    if (result < 0 && !again) return -result;
    if (result == 0) return EIO;  // the file ends here
    if (!again) io.done += static_cast<std::size_t>(result);
    if (io.done == io.bytes) return 0;
    const int error = push(io);
    return error == 0 ? -1 : error;
  }

  void serve(DiskIoSink& sink) noexcept {
    for (;;) {
      const uring::Completed completed = ring.next();
      auto* const io = reinterpret_cast<DiskIo*>(completed.user_data);
      int error = 0;
      bool last = false;
      {
        const std::lock_guard lock(submitting);
        if (io != nullptr) {
          error = advance(*io, completed.result);
          if (error < 0) continue;
          --running;
        }
        last = stopping && running == 0;
      }
      if (io != nullptr) sink.io_done(*io, error);
      if (last) return;
    }
  }
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(std::shared_ptr<UringState> state, std::weak_ptr<DiskIoSink> sink)
      : state_(std::move(state)), sink_(std::move(sink)) {}

  bool start() noexcept {
    return crew_.start([state = state_, sink = sink_.lock()] { state->serve(*sink); });
  }

  void submit(DiskIo& io) noexcept override {
    io.done = 0;
    int error = 0;
    {
      const std::lock_guard lock(state_->submitting);
      error = state_->push(io);
      if (error == 0) ++state_->running;
    }
    if (error != 0) {
      if (const auto sink = sink_.lock()) sink->io_done(io, error);
    }
  }

  const char* name() const noexcept override { return "io_uring"; }

  bool stop(std::int64_t until_ns) noexcept override {
    {
      const std::lock_guard lock(state_->submitting);
      if (!state_->stopping) {
        state_->stopping = true;
        static_cast<void>(state_->ring.submit(uring::Submission{}));  // does nothing, and wakes the thread
      }
    }
    return crew_.wait_until(until_ns);
  }

 private:
  const std::shared_ptr<UringState> state_;
  const std::weak_ptr<DiskIoSink> sink_;
  Crew crew_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(DiskFile& file, std::uint32_t depth, std::weak_ptr<DiskIoSink> sink) {
  if (file.descriptor() < 0) return nullptr;
  auto state = std::make_shared<UringState>();
  state->fd = file.descriptor();
  if (!state->ring.open(depth + 1)) return nullptr;
  auto engine = std::make_unique<UringEngine>(std::move(state), std::move(sink));
  return engine->start() ? std::move(engine) : nullptr;
}

}  // namespace kvpool
