// Blocks on disk that survive a restart: one preallocated file of slots, and a journal that says which slot holds which
// entry. docs/internals/disk.md has the format on disk, the order of writes, and why recovery is right.
//
// The store knows slots, generations and bytes. Which entry goes where, what is written at all, and what an entry means
// (`meta`) is the caller's. A slot is free, or holds one entry.
//
//   write    data -> flush of the data -> journal record -> flush of the journal -> kOk     (many blocks a flush)
//   erase    the entry is gone for readers at once; the slot is free when the record is durable
//   read     the pieces that contain the ranges -> checksums -> copied to the caller
//
// A slot is rewritten only after the record that frees it is durable and its last reader is gone. The store sees to
// that: a write to a slot that is being erased waits.
//
// Memory: all I/O goes through aligned buffers of the store. Spans of the caller need no alignment, are not touched
// after the batch has ended (not even if the drive hangs), and get no byte whose checksum was not right.
//
// Checksums: CRC-32C over pieces of kPieceBytes of the block (the last piece is shorter), each together with the slot,
// the generation and the number of the piece. So a read of a range costs the pieces that contain it.
//
// Health: an error of the drive, a full disk, or I/O that takes longer than `hang_ns` switches the store off. Then
// every pending and later operation ends with kOff at once; nothing is written any more, and nothing is lost that was
// durable.
//
// Not there: encryption at rest, another number of slots at a reopen, block devices.
//
// Thread-safety: all of it, but for open() and destruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool {

class DiskBatch;
class DiskDirectory;
class Completion;
struct DiskRuntime;

inline constexpr std::uint64_t kDiskPieceBytes = 64 << 10;  // what one checksum covers
inline constexpr std::uint64_t kDiskAlignment = 4096;       // slots and I/O
inline constexpr std::size_t kDiskMetaBytesMax = 16 << 10;  // of an entry
inline constexpr std::uint32_t kDiskSlotsMax = 0xFFFF'FFFE;

enum class DiskEngine : std::uint8_t {
  kAuto,     // io_uring where the kernel allows it, else threads
  kUring,    // open() throws kUnsupported where the kernel forbids it
  kThreads,  // pread and pwrite
};

struct DiskOptions {
  std::string path;               // a directory, made with mode 0700 if absent (its parent exists); files have 0600
  std::uint32_t slots = 0;        // 1 to kDiskSlotsMax
  std::uint64_t block_bytes = 0;  // of an entry; a slot is that, rounded up to kDiskAlignment
  // What entries depend on, as (name, value): layout, dtype, block tokens, model, ... A store made with other values is
  // refused, and the error names those that differ. Values are bytes; printable ones make better messages.
  std::vector<std::pair<std::string, std::string>> format = {};
  DiskEngine engine = DiskEngine::kAuto;
  std::uint32_t read_depth = 32;          // I/Os at a time
  std::uint32_t write_depth = 8;          // a read never waits for more writes than these
  std::uint64_t io_bytes_max = 1 << 20;   // of one I/O: adjacent slots of a batch go together up to here; a multiple
                                          // of kDiskPieceBytes
  std::int64_t hang_ns = 10'000'000'000;  // I/O that takes longer switches the store off
  std::uint32_t read_errors_max = 8;      // so many reads that the drive fails switch the store off
  std::uint64_t journal_bytes_min = 4 << 20;  // the journal is compacted when it is larger than this and the snapshot
};

// An entry found by open().
struct DiskEntry {
  std::uint32_t slot;
  std::uint64_t generation;
  std::span<const std::byte> meta;  // valid until forget_recovered()
};

enum class DiskStatus : std::uint8_t {
  kPending,  // only before the batch has ended
  kOk,
  kStale,      // read: the slot does not hold an entry of this generation (any more)
  kCorrupt,    // read: a checksum is wrong; nothing was copied from the piece. The caller should erase the entry
  kIoError,    // the drive failed; DiskHealth has the errno
  kDeadline,   // not done by the batch's deadline
  kCancelled,  // by the caller, before it started
  kOff,        // the store is switched off, or was destroyed
};
const char* disk_status_name(DiskStatus status) noexcept;

struct DiskRange {
  std::uint64_t offset;  // in the block
  std::uint64_t bytes;   // more than 0; the range ends within the block
};

// The spans, one after another, are the block: their bytes add up to block_bytes.
struct DiskWrite {
  std::uint32_t slot;
  std::uint64_t generation;
  std::span<const std::byte> meta;  // at most kDiskMetaBytesMax; copied by write()
  std::vector<std::span<const std::byte>> spans;
};

// The ranges, one after another, fill the spans: their bytes add up to the same.
struct DiskRead {
  std::uint32_t slot;
  std::uint64_t generation;
  std::vector<DiskRange> ranges;  // empty: the block
  std::vector<std::span<std::byte>> spans;
};

struct DiskErase {
  std::uint32_t slot;
  std::uint64_t generation;
};

// Why the store is off.
enum class DiskFault : std::uint8_t {
  kNone,           // it is on
  kReadFailed,     // errno
  kWriteFailed,    // of data; errno (ENOSPC: full)
  kFlushFailed,    // of data; errno
  kJournalFailed,  // errno
  kHung,           // I/O took longer than hang_ns
};
const char* disk_fault_name(DiskFault fault) noexcept;

struct DiskHealth {
  bool on = true;
  DiskFault fault = DiskFault::kNone;
  int error = 0;       // errno, if the kernel named one
  std::string reason;  // one line for people; empty while it is on
};

// Since open(). Bytes are those of I/O on the data file, with padding and whole pieces.
struct DiskCounters {
  std::uint64_t blocks_read = 0;  // that ended with kOk
  std::uint64_t blocks_written = 0;
  std::uint64_t blocks_erased = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t reads = 0;   // I/Os
  std::uint64_t writes = 0;  // I/Os
  std::uint64_t corrupt = 0;
  std::uint64_t read_errors = 0;
  std::uint64_t write_errors = 0;
  std::uint64_t deadlines = 0;  // operations that ended with kDeadline
  std::uint64_t cancelled = 0;
  std::uint64_t commits = 0;        // group commits
  std::uint64_t journal_bytes = 0;  // of journals and snapshot now
  std::uint64_t compactions = 0;
  std::uint64_t entries = 0;  // now
};

// Called once, when the batch has ended and before its completion is done, in a thread of the store or in that of
// cancel(), write(), read() or erase(); no lock is held. It must be short, must not throw, and must not destroy the
// store.
using DiskEnd = std::function<void(DiskBatch&)>;

// Operations that were given together. Ends when each of them has ended, by its deadline at the latest.
// Thread-safety: all of it. It may outlive the store.
class DiskBatch {
 public:
  virtual ~DiskBatch() = default;

  // Done when the batch has ended; its error is always empty: see status().
  virtual Completion& completion() noexcept = 0;
  virtual std::size_t size() const noexcept = 0;
  // Of operation i, in the order that they were given. Final once the batch has ended.
  virtual DiskStatus status(std::size_t i) const noexcept = 0;
  // Operations that have not started end with kCancelled; the others go on. An erase has started when it is given.
  virtual void cancel() noexcept = 0;
  // cancel(), and what has started ends with kCancelled as well. For a caller that needs its spans back now.
  virtual void abandon() noexcept = 0;
};
using DiskTicket = std::shared_ptr<DiskBatch>;

class DiskStore {
 public:
  // Opens the store in the directory, or makes one there if the directory is absent or empty. The space for all slots
  // is reserved before this returns. At most one store is open on a directory, over all processes.
  // Throws, and has changed nothing that was there:
  //   kArgument        options out of range (value, minimum, maximum)
  //   kOutOfMemory     the disk has no room (needed_bytes, available_bytes), or memory ran out
  //   kLayoutMismatch  made for another format, block size or number of slots; the text says which
  //   kUnsupported     made by another version; or kUring here
  //   kState           open elsewhere (cause kInUse); not a store of kvpool (cause kForeign); damaged (cause kDamaged)
  //   kStoreFailed     the file system failed (errno)
  static std::unique_ptr<DiskStore> open(const DiskOptions& options);
  // Over a directory of tests.
  static std::unique_ptr<DiskStore> open(const DiskOptions& options, std::shared_ptr<DiskDirectory> directory);

  // Ends what is pending with kOff, and waits for I/O in flight, for hang_ns at most; no second time if the fault is
  // kHung. After that the threads of hung I/O, its memory and the lock of the directory stay until the kernel gives
  // them back. In a forked child it does nothing.
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  // What was there, in the order of slots. Empty after forget_recovered().
  std::span<const DiskEntry> recovered() const noexcept;
  // Gives back the memory of recovered(). REQUIRES: nobody uses recovered() meanwhile or its entries afterwards.
  void forget_recovered() noexcept;

  // Deadlines are times of CLOCK_MONOTONIC. All three throw kArgument for bad slots, sizes or ranges (position),
  // kFork, kOutOfMemory; then nothing has started. Spans stay valid until the batch has ended.

  // Each slot is free, being erased, or had a write that failed; else kState (block: the slot), as for a slot twice.
  // After any status but kOk the slot is free for a new write. (An entry whose caller was told kDeadline, kCancelled or
  // kOff while its record was on the way may be there after a crash; without one it is erased.)
  DiskTicket write(std::vector<DiskWrite> writes, std::int64_t deadline_ns, DiskEnd on_end = {});
  // Reads go before writes that have not started.
  DiskTicket read(std::vector<DiskRead> reads, std::int64_t deadline_ns, DiskEnd on_end = {});
  // Each slot holds an entry of this generation; else kState (block), and nothing is erased. kOk: it will not be there
  // after a crash.
  DiskTicket erase(std::vector<DiskErase> erases, std::int64_t deadline_ns, DiskEnd on_end = {});

  DiskHealth state() const;                  // throws kFork
  DiskCounters counters() const noexcept;    // all 0 in a forked child
  const char* engine_name() const noexcept;  // "io_uring" or "threads"
  bool direct() const noexcept;              // O_DIRECT; false: the file system refused it
  std::uint64_t slot_bytes() const noexcept;

 private:
  DiskStore(std::shared_ptr<DiskRuntime> runtime, std::int64_t hang_ns) noexcept;

  std::shared_ptr<DiskRuntime> runtime_;
  std::int64_t hang_ns_;
  std::uint32_t fork_generation_;
};

}  // namespace kvpool
