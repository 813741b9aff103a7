// Operations of one call, and the I/Os that they need. The core (core.h) moves them; all fields but those of plan time
// are guarded by its mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/io_engine.h"
#include "kvpool/exec/completion.h"

namespace kvpool {

class Batch;
class StoreCore;
struct StoreIo;

// Bytes of one piece of a block, and where the caller has them.
struct PieceSpan {
  std::uint32_t piece;
  std::uint32_t offset;  // in the piece
  std::uint32_t bytes;
  std::byte* memory;  // of a write: only read
};

enum class OpKind : std::uint8_t { kWrite, kRead, kErase };

struct Op {
  OpKind kind{};
  bool started = false;  // one of its I/Os has
  bool blocked = false;  // a write that waits for its slot
  bool holds = false;    // its slot: a read as a reader, a write or an erase alone
  DiskStatus status = DiskStatus::kPending;
  DiskStatus outcome = DiskStatus::kOk;  // of the I/Os so far
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  std::uint32_t ios = 0;        // that have not ended
  StoreIo* first_io = nullptr;  // of a write: the others follow as `next_io`
  std::uint32_t ios_planned = 0;
  std::vector<PieceSpan> spans;          // by piece
  std::vector<std::byte> meta;           // of a write
  std::vector<std::uint32_t> checksums;  // of a write: by piece
  Batch* batch = nullptr;
  std::shared_ptr<Batch> hold;  // while it is in a queue
  Op* next = nullptr;           // in that queue

  bool ended() const noexcept { return status != DiskStatus::kPending; }
};

// Pieces of an operation in the buffer of an I/O.
struct IoPart {
  Op* op;
  std::uint32_t piece;
  std::uint32_t pieces;
  std::size_t at;     // in the buffer
  bool skip = false;  // the operation had ended when the I/O did
  bool bad = false;   // a checksum is wrong
};

struct StoreIo : DiskIo {
  std::shared_ptr<Batch> batch;
  std::vector<IoPart> parts;
  std::uint32_t blocked = 0;    // operations in it that wait for their slots
  std::int64_t started_ns = 0;  // 0: not given to the engine yet
  StoreIo* next_io = nullptr;   // of the batch
  std::size_t queued_at = 0;    // in Batch::queued
  std::list<StoreIo>* list = nullptr;
  std::list<StoreIo>::iterator place;  // in `list`
};

class Batch final : public DiskBatch, public std::enable_shared_from_this<Batch> {
 public:
  Batch(std::weak_ptr<StoreCore> core, std::size_t size, std::int64_t deadline, DiskEnd end);

  Completion& completion() noexcept override { return completion_; }
  std::size_t size() const noexcept override { return ops.size(); }
  DiskStatus status(std::size_t i) const noexcept override;
  void cancel() noexcept override;
  void abandon() noexcept override;

  // The core's: all operations have ended, and nobody copies. REQUIRES: the core's mutex is not held.
  void end() noexcept;

  std::vector<Op> ops;
  std::vector<StoreIo*> queued;  // not started
  std::list<StoreIo> planned;    // until the core has taken them
  const std::int64_t deadline_ns;
  std::size_t pending;          // operations that have not ended
  std::size_t copying = 0;      // threads that use the caller's spans
  bool listed = false;          // among the core's batches
  std::shared_ptr<Batch> keep;  // itself, from then until it has ended
  Batch* next = nullptr;        // in a list of those to end

 private:
  const std::weak_ptr<StoreCore> core_;
  DiskEnd on_end_;
  std::atomic<bool> ended_{false};
  Completion completion_;
};

}  // namespace kvpool
