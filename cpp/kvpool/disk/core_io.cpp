// The core's queues of I/Os, and what happens to an I/O between its queue and its end.
#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/disk/core.h"

namespace kvpool {
namespace {

bool all_ended(const StoreIo& io) noexcept {
  return std::all_of(io.parts.begin(), io.parts.end(), [](const IoPart& part) { return part.op->ended(); });
}

}  // namespace

void StoreCore::queue_ios(Batch& batch) noexcept {
  while (!batch.planned.empty()) {
    StoreIo& io = batch.planned.front();
    io.batch = batch.shared_from_this();
    io.list = &batch.planned;
    io.place = batch.planned.begin();
    io.queued_at = batch.queued.size();
    batch.queued.push_back(&io);  // reserved when it was planned
    for (const IoPart& part : io.parts) io.blocked += part.op->blocked ? 1 : 0;
    move_io(io, !io.write ? reads_ : io.blocked > 0 ? blocked_ : writes_);
  }
  dispatch_wanted_.notify_one();
}

void StoreCore::move_io(StoreIo& io, std::list<StoreIo>& to) noexcept {
  to.splice(to.end(), *io.list, io.place);  // the iterator stays valid
  io.list = &to;
}

void StoreCore::unqueue(StoreIo& io) noexcept {
  std::vector<StoreIo*>& queued = io.batch->queued;
  queued[io.queued_at] = queued.back();
  queued[io.queued_at]->queued_at = io.queued_at;
  queued.pop_back();
}

// Ends the I/Os of operations that have ended before they started.
void StoreCore::drop_queued(Batch& batch) noexcept {
  for (std::size_t i = batch.queued.size(); i-- > 0;) {
    StoreIo& io = *batch.queued[i];
    if (!all_ended(io)) continue;
    unqueue(io);
    retire(io);
  }
}

void StoreCore::retire(StoreIo& io) noexcept {
  const std::shared_ptr<Batch> batch = io.batch;
  if (io.buffer != nullptr) buffers_.give_back(io.write, io.buffer);
  for (const IoPart& part : io.parts) {
    if (--part.op->ios == 0) op_io_ended(*part.op);
  }
  io.list->erase(io.place);
  dispatch_wanted_.notify_one();
}

void StoreCore::op_io_ended(Op& op) noexcept {
  Slot& slot = slots_[op.slot];
  if (op.kind == OpKind::kWrite && !op.ended() && op.outcome == DiskStatus::kOk && works()) {
    puts_.push(op);  // it keeps the slot
    commit_wanted_.notify_one();
    return;
  }
  if (op.blocked && slot.waiter == &op) slot.waiter = nullptr;
  if (op.holds && op.kind == OpKind::kRead) --slot.readers;
  if (op.holds && op.kind == OpKind::kWrite) slot.busy = false;
  op.holds = false;
  if (!op.ended()) end_op(op, op.outcome);
  wake_waiter(slot);
}

void StoreCore::wake_waiter(Slot& slot) noexcept {
  if (!slot.quiet() || slot.waiter == nullptr) return;
  Op& op = *std::exchange(slot.waiter, nullptr);
  slot.busy = true;
  op.holds = true;
  op.blocked = false;
  StoreIo* io = op.first_io;
  for (std::uint32_t i = 0; i < op.ios_planned; ++i, io = io->next_io) {
    if (--io->blocked == 0) move_io(*io, writes_);
  }
  dispatch_wanted_.notify_one();
}

bool StoreCore::can_dispatch() const noexcept {
  return works() && ((!reads_.empty() && buffers_.has(false)) || (!writes_.empty() && buffers_.has(true)));
}

StoreIo* StoreCore::next_io() noexcept {
  if (!can_dispatch()) return nullptr;
  std::list<StoreIo>& from = !reads_.empty() && buffers_.has(false) ? reads_ : writes_;
  StoreIo& io = from.front();
  unqueue(io);
  move_io(io, running_);
  io.buffer = buffers_.take(io.write);
  for (const IoPart& part : io.parts) part.op->started = true;
  return &io;
}

bool StoreCore::dispatch() noexcept {
  Locked lock(*this);
  StoreIo* const io = next_io();
  if (io == nullptr) return false;
  if (io->write) {
    const std::shared_ptr<Batch> batch = io->batch;
    ++batch->copying;
    lock.unlock();
    fill(*io);
    lock.lock();
    --batch->copying;
    end_if_done(*batch);
    if (all_ended(*io)) {
      retire(*io);
      return true;
    }
  }
  io->started_ns = monotonic_ns();
  watch_by(io->started_ns + options_.hang_ns);
  lock.unlock();
  engine_->submit(*io);
  return true;
}

// Gathers the blocks in the buffer, and computes their checksums.
void StoreCore::fill(StoreIo& io) noexcept {
  for (const IoPart& part : io.parts) {
    Op& op = *part.op;
    std::byte* at = io.buffer + part.at;
    for (std::uint32_t piece = part.piece; piece < part.piece + part.pieces; ++piece) {
      const std::size_t bytes = shape_.piece_bytes(piece);
      for (const PieceSpan& span : spans_of(op, piece)) std::memcpy(at + span.offset, span.memory, span.bytes);
      std::memset(at + bytes, 0, shape_.stored_bytes(piece) - bytes);
      op.checksums[piece] = piece_checksum(op.slot, op.generation, piece, at, bytes);
      at += shape_.stored_bytes(piece);
    }
  }
}

// Copies to the caller what has the right checksum.
void StoreCore::deliver(StoreIo& io) noexcept {
  for (IoPart& part : io.parts) {
    if (part.skip) continue;
    const Op& op = *part.op;
    const std::span<const std::uint32_t> checksums = slots_.checksums(op.slot);
    const std::byte* at = io.buffer + part.at;
    for (std::uint32_t piece = part.piece; piece < part.piece + part.pieces; ++piece) {
      const std::uint32_t found = piece_checksum(op.slot, op.generation, piece, at, shape_.piece_bytes(piece));
      if (found != checksums[piece]) {
        part.bad = true;
      } else {
        for (const PieceSpan& span : spans_of(op, piece)) std::memcpy(span.memory, at + span.offset, span.bytes);
      }
      at += shape_.stored_bytes(piece);
    }
  }
}

void StoreCore::io_done(DiskIo& done, int error) noexcept {
  auto& io = static_cast<StoreIo&>(done);
  const std::shared_ptr<Batch> batch = io.batch;
  Locked lock(*this);
  (io.write ? counters_.writes : counters_.reads) += 1;
  if (error == 0) (io.write ? counters_.bytes_written : counters_.bytes_read) += io.bytes;
  if (error == 0 && !io.write && !all_ended(io)) {
    for (IoPart& part : io.parts) part.skip = part.op->ended();
    ++batch->copying;
    lock.unlock();
    deliver(io);
    lock.lock();
    --batch->copying;
  }
  for (const IoPart& part : io.parts) {
    if (part.bad && part.op->outcome == DiskStatus::kOk) {
      part.op->outcome = DiskStatus::kCorrupt;
      ++counters_.corrupt;
    }
    if (error != 0) part.op->outcome = DiskStatus::kIoError;
  }
  const bool write = io.write;
  retire(io);
  end_if_done(*batch);
  if (error == 0) return;
  const std::uint64_t errors = ++(write ? counters_.write_errors : counters_.read_errors);
  if (write) switch_off(DiskFault::kWriteFailed, error);
  if (!write && errors >= options_.read_errors_max) switch_off(DiskFault::kReadFailed, error);
}

}  // namespace kvpool
