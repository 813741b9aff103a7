// Reads and writes of one file, many at a time. Two ways: io_uring, and threads that call pread and pwrite.
//
// Thread-safety: all of it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/disk/files.h"

namespace kvpool {

struct DiskIo {
  bool write = false;
  std::uint64_t offset = 0;
  std::byte* buffer = nullptr;
  std::size_t bytes = 0;
  std::size_t done = 0;  // the engine's
  iovec rest{};          // the engine's
};

class DiskIoSink {
 public:
  virtual ~DiskIoSink() = default;
  // All bytes, or an errno. Called once for each I/O, in a thread of the engine or in that of submit().
  virtual void io_done(DiskIo& io, int error) noexcept = 0;
};

class IoEngine {
 public:
  IoEngine() = default;
  virtual ~IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Goes on after short reads and writes. The I/O, its buffer and the file stay until it is done.
  virtual void submit(DiskIo& io) noexcept = 0;
  virtual const char* name() const noexcept = 0;
  // Ends the threads; I/O that runs goes on to its end. False: some still runs at this time, and its thread keeps the
  // sink until it ends. REQUIRES: no submit() follows. Idempotent.
  virtual bool stop(std::int64_t until_ns) noexcept = 0;
};

// `file` belongs to the sink, or lives longer.
std::unique_ptr<IoEngine> make_thread_engine(DiskFile& file, std::uint32_t threads_max, std::weak_ptr<DiskIoSink> sink);
// At most `depth` I/Os are submitted at a time. Null: the kernel forbids io_uring, or is too old.
std::unique_ptr<IoEngine> make_uring_engine(DiskFile& file, std::uint32_t depth, std::weak_ptr<DiskIoSink> sink);

}  // namespace kvpool
