#include "kvpool/disk/core.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::chrono::steady_clock::time_point time_of(std::int64_t ns) noexcept {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(ns)};
}

void require_slot(std::uint32_t slot, std::uint32_t slots, std::size_t i) {
  if (slot < slots) return;
  throw Error(ErrorCode::kArgument, "operation " + std::to_string(i) + ": there is no slot " + std::to_string(slot),
              {{"position", static_cast<std::int64_t>(i)}, {"value", slot}, {"maximum", slots - 1}});
}

[[noreturn]] void throw_slot(std::uint32_t slot, const char* why) {
  throw Error(ErrorCode::kState, "slot " + std::to_string(slot) + " of the store on disk " + why, {{"block", slot}});
}

}  // namespace

StoreCore::StoreCore(const DiskOptions& options, std::shared_ptr<DiskDirectory> directory, OpenedStore opened,
                     const LogState& found)
    : shape_(options.block_bytes),
      options_(options),
      directory_(std::move(directory)),
      blocks_(std::move(opened.blocks)),
      journal_(std::move(opened.journal)),
      slots_(options.slots, shape_.pieces()),
      buffers_(options.read_depth, options.write_depth, options.io_bytes_max) {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (!found.holds(slot)) continue;
    const Record record = found.record(slot);
    const std::span<std::uint32_t> checksums = slots_.checksums(slot);
    if (record.checksums.size() != checksums.size_bytes()) {
      throw Error(ErrorCode::kState, "the store on disk is damaged: a record has another number of checksums")
          .because(ErrorCause::kDamaged);
    }
    std::memcpy(checksums.data(), record.checksums.data(), checksums.size_bytes());
    slots_[slot].live = true;
    slots_[slot].generation = record.generation;
    ++counters_.entries;
  }
}

// ---- telling what has ended

void StoreCore::Locked::unlock() noexcept {
  Batch* batch = std::exchange(core_.ending_, nullptr);
  lock_.unlock();
  while (batch != nullptr) {
    Batch* const next = std::exchange(batch->next, nullptr);
    const std::shared_ptr<Batch> keep = std::move(batch->keep);
    batch->end();
    batch = next;
  }
}

void StoreCore::end_if_done(Batch& batch) noexcept {
  if (batch.pending > 0 || batch.copying > 0 || !batch.listed) return;
  batch.listed = false;
  batches_.erase({batch.deadline_ns, &batch});
  batch.next = std::exchange(ending_, &batch);
}

void StoreCore::end_op(Op& op, DiskStatus status) noexcept {
  op.status = status;
  if (op.kind == OpKind::kWrite) slots_[op.slot].claimed = false;
  if (status == DiskStatus::kOk) {
    ++(op.kind == OpKind::kRead    ? counters_.blocks_read
       : op.kind == OpKind::kWrite ? counters_.blocks_written
                                   : counters_.blocks_erased);
  }
  counters_.deadlines += status == DiskStatus::kDeadline ? 1 : 0;
  counters_.cancelled += status == DiskStatus::kCancelled ? 1 : 0;
  --op.batch->pending;
  end_if_done(*op.batch);
}

void StoreCore::end_all(Batch& batch, DiskStatus status) noexcept {
  for (Op& op : batch.ops) {
    if (!op.ended()) end_op(op, status);
  }
  drop_queued(batch);
  end_if_done(batch);
}

void StoreCore::cancel(Batch& batch, bool started_too) noexcept {
  Locked lock(*this);
  if (!batch.listed) return;
  for (Op& op : batch.ops) {
    if (!op.ended() && (started_too || !op.started)) end_op(op, DiskStatus::kCancelled);
  }
  drop_queued(batch);
}

// ---- what callers give

void StoreCore::list(Batch& batch) {
  batches_.emplace(batch.deadline_ns, &batch);
  batch.keep = batch.shared_from_this();
  batch.listed = true;
  watch_by(batch.deadline_ns);
}

void StoreCore::watch_by(std::int64_t at_ns) noexcept {
  if (at_ns >= watch_next_ns_) return;
  watch_next_ns_ = at_ns;
  watch_wanted_.notify_one();
}

DiskTicket StoreCore::write(const std::vector<DiskWrite>& writes, std::int64_t deadline_ns, DiskEnd on_end) {
  auto batch = std::make_shared<Batch>(weak_from_this(), writes.size(), deadline_ns, std::move(on_end));
  for (std::size_t i = 0; i < writes.size(); ++i) {
    require_slot(writes[i].slot, slots_.size(), i);
    plan_write(batch->ops[i], shape_, writes[i], i);
  }
  plan_ios(*batch, shape_, options_.io_bytes_max, true);
  Locked lock(*this);
  if (works()) {
    claim_all(*batch);
    for (Op& op : batch->ops) {
      Slot& slot = slots_[op.slot];
      op.holds = slot.quiet();
      op.blocked = !op.holds;
      if (op.holds) slot.busy = true;
      if (op.blocked) slot.waiter = &op;
    }
    queue_ios(*batch);
    end_if_done(*batch);
  } else {
    list(*batch);
    end_all(*batch, DiskStatus::kOff);
  }
  return batch;
}

// Claims the slots and lists the batch, or throws and has changed nothing.
void StoreCore::claim_all(Batch& batch) {
  std::size_t claimed = 0;
  try {
    for (const Op& op : batch.ops) {
      Slot& slot = slots_[op.slot];
      if (slot.live) throw_slot(op.slot, "holds an entry: erase it first");
      if (slot.claimed) throw_slot(op.slot, "is being written");
      slot.claimed = true;
      ++claimed;
    }
    list(batch);
  } catch (...) {
    for (std::size_t i = 0; i < claimed; ++i) slots_[batch.ops[i].slot].claimed = false;
    throw;
  }
}

DiskTicket StoreCore::read(const std::vector<DiskRead>& reads, std::int64_t deadline_ns, DiskEnd on_end) {
  auto batch = std::make_shared<Batch>(weak_from_this(), reads.size(), deadline_ns, std::move(on_end));
  for (std::size_t i = 0; i < reads.size(); ++i) {
    require_slot(reads[i].slot, slots_.size(), i);
    plan_read(batch->ops[i], shape_, reads[i], i);
  }
  plan_ios(*batch, shape_, options_.io_bytes_max, false);
  Locked lock(*this);
  list(*batch);
  if (!works()) {
    end_all(*batch, DiskStatus::kOff);
    return batch;
  }
  for (Op& op : batch->ops) {
    Slot& slot = slots_[op.slot];
    op.holds = slot.live && slot.generation == op.generation;
    if (op.holds) ++slot.readers;
  }
  queue_ios(*batch);
  for (Op& op : batch->ops) {
    if (!op.holds) end_op(op, DiskStatus::kStale);
  }
  drop_queued(*batch);
  end_if_done(*batch);
  return batch;
}

DiskTicket StoreCore::erase(const std::vector<DiskErase>& erases, std::int64_t deadline_ns, DiskEnd on_end) {
  auto batch = std::make_shared<Batch>(weak_from_this(), erases.size(), deadline_ns, std::move(on_end));
  for (std::size_t i = 0; i < erases.size(); ++i) {
    require_slot(erases[i].slot, slots_.size(), i);
    batch->ops[i].kind = OpKind::kErase;
    batch->ops[i].slot = erases[i].slot;
    batch->ops[i].generation = erases[i].generation;
  }
  Locked lock(*this);
  if (!works()) {
    list(*batch);
    end_all(*batch, DiskStatus::kOff);
    return batch;
  }
  std::size_t erased = 0;
  try {
    for (const Op& op : batch->ops) {
      Slot& slot = slots_[op.slot];
      if (!slot.live || slot.generation != op.generation) throw_slot(op.slot, "holds no entry of this generation");
      slot.live = false;
      ++erased;
    }
    list(*batch);
  } catch (...) {
    for (std::size_t i = 0; i < erased; ++i) slots_[batch->ops[i].slot].live = true;
    throw;
  }
  counters_.entries -= erased;
  for (Op& op : batch->ops) {
    slots_[op.slot].busy = true;
    op.started = true;
    op.holds = true;
    erases_.push(op);
  }
  commit_wanted_.notify_one();
  end_if_done(*batch);
  return batch;
}

// ---- health

void StoreCore::switch_off(DiskFault fault, int error) noexcept {
  if (!health_.on) return;
  health_.on = false;
  health_.fault = fault;
  health_.error = error;
  end_everything();
}

void StoreCore::end_everything() noexcept {
  for (auto entry = batches_.begin(); entry != batches_.end();) {
    Batch& batch = *entry->second;
    ++entry;  // ending the batch erases its own entry alone
    end_all(batch, DiskStatus::kOff);
  }
  puts_.clear();
  erases_.clear();
  watch_wanted_.notify_all();
}

void StoreCore::close() noexcept {
  Locked lock(*this);
  closing_ = true;
  end_everything();
  dispatch_wanted_.notify_all();
  commit_wanted_.notify_all();
  fold_wanted_.notify_all();
}

std::int64_t StoreCore::watch(std::int64_t now_ns) noexcept {
  Locked lock(*this);
  for (auto entry = batches_.begin(); entry != batches_.end() && entry->first <= now_ns;) {
    Batch& batch = *entry->second;
    ++entry;  // ending the batch erases its own entry alone
    end_all(batch, DiskStatus::kDeadline);
  }
  std::int64_t oldest = commit_started_ns_ != 0 ? commit_started_ns_ : std::numeric_limits<std::int64_t>::max();
  for (const StoreIo& io : running_) {
    if (io.started_ns != 0) oldest = std::min(oldest, io.started_ns);
  }
  const bool runs = oldest != std::numeric_limits<std::int64_t>::max();
  if (runs && works() && now_ns - oldest > options_.hang_ns) switch_off(DiskFault::kHung, 0);
  watch_next_ns_ = now_ns + 1'000'000'000;
  if (runs) watch_next_ns_ = std::min(watch_next_ns_, std::max(oldest + options_.hang_ns, now_ns + 1'000'000));
  if (!batches_.empty()) {
    watch_next_ns_ = std::min(watch_next_ns_, std::max(batches_.begin()->first, now_ns + 1'000'000));
  }
  return watch_next_ns_;
}

DiskHealth StoreCore::health() const {
  const std::lock_guard lock(mutex_);
  DiskHealth health = health_;
  if (health.on) return health;
  health.reason = std::string("the store on disk in ") + options_.path + " is off: " + disk_fault_name(health.fault);
  if (health.error != 0) health.reason += " (" + errno_text(health.error) + ")";
  return health;
}

bool StoreCore::hung() const noexcept {
  const std::lock_guard lock(mutex_);
  return health_.fault == DiskFault::kHung;
}

DiskCounters StoreCore::counters() const noexcept {
  const std::lock_guard lock(mutex_);
  DiskCounters counters = counters_;
  counters.journal_bytes = journal_->bytes();
  return counters;
}

// ---- waiting for work

bool StoreCore::wait_dispatch() {
  std::unique_lock lock(mutex_);
  dispatch_wanted_.wait(lock, [this] { return closing_ || can_dispatch(); });
  return !closing_;
}

bool StoreCore::wait_commit() {
  std::unique_lock lock(mutex_);
  commit_wanted_.wait(lock, [this] { return closing_ || puts_.first != nullptr || erases_.first != nullptr; });
  return !closing_;
}

bool StoreCore::wait_fold() {
  std::unique_lock lock(mutex_);
  fold_wanted_.wait(lock, [this] { return closing_ || (works() && journal_->wants_fold()); });
  return !closing_;
}

bool StoreCore::wait_watch(std::int64_t until_ns) {
  std::unique_lock lock(mutex_);
  if (!closing_ && watch_next_ns_ >= until_ns) watch_wanted_.wait_until(lock, time_of(until_ns));
  return !closing_;
}

}  // namespace kvpool
