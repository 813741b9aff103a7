#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "kvpool/disk/crew.h"
#include "kvpool/disk/io_engine.h"

namespace kvpool {
namespace {

// At most as many I/Os wait as there may be threads, so submit() allocates nothing but threads.
struct ThreadQueue {
  std::mutex mutex;
  std::condition_variable wanted;
  std::unique_ptr<DiskIo*[]> places;  // a ring
  std::size_t capacity = 0;
  std::size_t first = 0;
  std::size_t waiting = 0;
  std::size_t idle = 0;
  bool stopping = false;

  DiskIo* take() {
    std::unique_lock lock(mutex);
    ++idle;
    wanted.wait(lock, [this] { return waiting > 0 || stopping; });
    --idle;
    if (waiting == 0) return nullptr;
    DiskIo* const io = places[first];
    first = (first + 1) % capacity;
    --waiting;
    return io;
  }
};

void run_io(DiskFile& file, DiskIo& io, DiskIoSink& sink) noexcept {
  const int error =
      io.write ? write_all(file, io.offset, io.buffer, io.bytes) : read_all(file, io.offset, io.buffer, io.bytes);
  sink.io_done(io, error);
}

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(DiskFile& file, std::uint32_t threads_max, std::weak_ptr<DiskIoSink> sink)
      : file_(file), threads_max_(threads_max), sink_(std::move(sink)) {
    queue_->capacity = threads_max;
    queue_->places = std::make_unique<DiskIo*[]>(threads_max);
  }

  void submit(DiskIo& io) noexcept override {
    bool more = false;
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->places[(queue_->first + queue_->waiting) % queue_->capacity] = &io;
      ++queue_->waiting;
      more = queue_->waiting > queue_->idle;
      queue_->wanted.notify_one();
    }
    if (!more || crew_.size() >= threads_max_ || start() || crew_.size() > 0) return;
    if (DiskIo* const left = queue_->take()) run_io(file_, *left, *sink_.lock());
  }

  const char* name() const noexcept override { return "threads"; }

  bool stop(std::int64_t until_ns) noexcept override {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->stopping = true;
      queue_->wanted.notify_all();
    }
    return crew_.wait_until(until_ns);
  }

 private:
  bool start() noexcept {
    return crew_.start([queue = queue_, &file = file_, sink = sink_.lock()] {
      while (DiskIo* const io = queue->take()) run_io(file, *io, *sink);
    });
  }

  DiskFile& file_;
  const std::size_t threads_max_;
  const std::weak_ptr<DiskIoSink> sink_;
  const std::shared_ptr<ThreadQueue> queue_ = std::make_shared<ThreadQueue>();
  Crew crew_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(DiskFile& file, std::uint32_t threads_max,
                                             std::weak_ptr<DiskIoSink> sink) {
  return std::make_unique<ThreadEngine>(file, threads_max, std::move(sink));
}

}  // namespace kvpool
