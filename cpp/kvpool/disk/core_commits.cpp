// The steps of the core that make changes durable.
#include <algorithm>
#include <cerrno>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/disk/core.h"

namespace kvpool {
namespace {

constexpr std::size_t kGroupMax = 4096;  // changes in one commit

}  // namespace

// What one commit makes durable.
struct StoreCore::Group {
  OpQueue puts;
  OpQueue erases;
  std::size_t count = 0;
};

void StoreCore::OpQueue::push(Op& op) noexcept {
  if (op.hold == nullptr) op.hold = op.batch->shared_from_this();
  op.next = nullptr;
  (last != nullptr ? last->next : first) = &op;
  last = &op;
}

Op* StoreCore::OpQueue::pop() noexcept {
  Op* const op = first;
  if (op == nullptr) return nullptr;
  first = op->next;
  if (first == nullptr) last = nullptr;
  return op;
}

void StoreCore::OpQueue::clear() noexcept {
  while (Op* const op = pop()) {
    const std::shared_ptr<Batch> hold = std::move(op->hold);
  }
}

// A write whose caller has given up meanwhile gets no record, and gives back its slot.
StoreCore::Group StoreCore::take_group() noexcept {
  Group group;
  while (group.count < kGroupMax) {
    Op* const op = erases_.pop();
    if (op == nullptr) break;
    group.erases.push(*op);
    ++group.count;
  }
  while (group.count < kGroupMax) {
    Op* const op = puts_.pop();
    if (op == nullptr) break;
    if (op->ended()) {
      const std::shared_ptr<Batch> hold = std::move(op->hold);
      op_io_ended(*op);
      continue;
    }
    group.puts.push(*op);
    ++group.count;
  }
  return group;
}

bool StoreCore::commit() noexcept {
  Locked lock(*this);
  if (!works()) return false;
  Group group = take_group();
  if (group.count == 0) return false;
  commit_started_ns_ = monotonic_ns();
  watch_by(commit_started_ns_ + options_.hang_ns);
  lock.unlock();
  DiskFault fault = DiskFault::kNone;
  const int error = make_durable(group, fault);
  lock.lock();
  commit_started_ns_ = 0;
  if (error != 0) switch_off(fault, error);
  if (works()) {
    ++counters_.commits;
    apply(group);
  }
  group.erases.clear();
  group.puts.clear();
  fold_wanted_.notify_one();
  return true;
}

// The order is the whole point: data, flush, records, flush.
int StoreCore::make_durable(const Group& group, DiskFault& fault) noexcept {
  try {
    std::vector<Record> records;
    records.reserve(group.count);
    for (const Op* op = group.erases.first; op != nullptr; op = op->next) {
      records.push_back({Change::kErase, op->slot, op->generation, {}, {}});
    }
    for (const Op* op = group.puts.first; op != nullptr; op = op->next) {
      records.push_back({Change::kPut, op->slot, op->generation, std::as_bytes(std::span(op->checksums)), op->meta});
    }
    fault = DiskFault::kFlushFailed;
    const int error = group.puts.first != nullptr ? blocks_->flush() : 0;
    if (error != 0) return error;
    fault = DiskFault::kJournalFailed;
    const int turned = journal_->wants_rotation() ? journal_->rotate() : 0;
    return turned != 0 ? turned : journal_->append(records);
  } catch (const std::bad_alloc&) {
    fault = DiskFault::kJournalFailed;
    return ENOMEM;
  }
}

void StoreCore::apply(Group& group) noexcept {
  while (Op* const op = group.erases.pop()) {
    const std::shared_ptr<Batch> hold = std::move(op->hold);
    Slot& slot = slots_[op->slot];
    slot.busy = false;
    op->holds = false;
    if (!op->ended()) end_op(*op, DiskStatus::kOk);
    wake_waiter(slot);
  }
  while (Op* const op = group.puts.pop()) {
    const std::shared_ptr<Batch> hold = std::move(op->hold);
    if (op->ended()) {  // its caller was told that there is no entry
      erases_.push(*op);
      commit_wanted_.notify_one();
      continue;
    }
    Slot& slot = slots_[op->slot];
    std::copy(op->checksums.begin(), op->checksums.end(), slots_.checksums(op->slot).begin());
    slot.generation = op->generation;
    slot.live = true;
    slot.busy = false;
    op->holds = false;
    ++counters_.entries;
    end_op(*op, DiskStatus::kOk);
  }
}

bool StoreCore::fold() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!works() || !journal_->wants_fold()) return false;
  }
  const int error = journal_->fold();
  Locked lock(*this);
  if (error == 0) ++counters_.compactions;
  if (error != 0 && error != ENOSPC) switch_off(DiskFault::kJournalFailed, error);
  return true;
}

}  // namespace kvpool
