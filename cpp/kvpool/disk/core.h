// A store without threads: what there is to do, step by step. DiskStore's threads call the steps; tests of power loss
// call them one after another, so that a seed says all.
//
//   write() read() erase()   plan, and put I/Os into queues
//   dispatch()               gives the next I/O to the engine: reads first; of a write it copies the caller's bytes
//   io_done()                the engine's answer: checksums, copies of reads; a written operation waits for its record
//   commit()                 flush of the data, records, flush of the journal, for all that wait
//   fold()                   compacts the journal
//   watch()                  deadlines and hung I/O
//
// Every operation has one status, set once (end_op). A batch ends when all of its operations have, and no thread uses
// its caller's spans.
//
// mutex_ is never held when the engine, a file or a caller's code is called.
//
// Thread-safety: all of it; dispatch(), commit(), fold() and watch() each in one thread at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/disk/batch.h"
#include "kvpool/disk/buffers.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/io_engine.h"
#include "kvpool/disk/open_store.h"
#include "kvpool/disk/plan.h"
#include "kvpool/disk/slots.h"

namespace kvpool {

class StoreCore final : public DiskIoSink, public std::enable_shared_from_this<StoreCore> {
 public:
  // Throws kState (cause kDamaged), std::bad_alloc.
  StoreCore(const DiskOptions& options, std::shared_ptr<DiskDirectory> directory, OpenedStore opened,
            const LogState& found);

  DiskFile& file() noexcept { return *blocks_; }
  // Before anything else.
  void use(std::unique_ptr<IoEngine> engine) noexcept { engine_ = std::move(engine); }
  IoEngine& engine() noexcept { return *engine_; }

  DiskTicket write(const std::vector<DiskWrite>& writes, std::int64_t deadline_ns, DiskEnd on_end);
  DiskTicket read(const std::vector<DiskRead>& reads, std::int64_t deadline_ns, DiskEnd on_end);
  DiskTicket erase(const std::vector<DiskErase>& erases, std::int64_t deadline_ns, DiskEnd on_end);
  // What has not started, or all of it, ends with kCancelled.
  void cancel(Batch& batch, bool started_too) noexcept;

  // Each returns whether there was something to do.
  bool dispatch() noexcept;
  bool commit() noexcept;
  bool fold() noexcept;
  // Returns when to call it again, at the latest.
  std::int64_t watch(std::int64_t now_ns) noexcept;
  void io_done(DiskIo& io, int error) noexcept override;

  // Wait until the step has something to do; false: the store is being closed.
  bool wait_dispatch();
  bool wait_commit();
  bool wait_fold();
  bool wait_watch(std::int64_t until_ns);

  // All that is pending ends with kOff.
  void close() noexcept;

  DiskHealth health() const;
  bool hung() const noexcept;  // I/O that hung switched it off
  DiskCounters counters() const noexcept;
  const BlockShape& shape() const noexcept { return shape_; }

 private:
  // Holds the mutex. What ended meanwhile is told when it is released.
  class Locked {
   public:
    explicit Locked(StoreCore& core) : core_(core), lock_(core.mutex_) {}
    ~Locked() {
      if (lock_.owns_lock()) unlock();
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    void lock() { lock_.lock(); }
    void unlock() noexcept;

   private:
    StoreCore& core_;
    std::unique_lock<std::mutex> lock_;
  };
  // Operations that wait for their record, in order.
  struct OpQueue {
    Op* first = nullptr;
    Op* last = nullptr;

    void push(Op& op) noexcept;  // the operation keeps its batch alive
    Op* pop() noexcept;
    void clear() noexcept;
  };
  struct Group;

  // All of these REQUIRE the mutex.
  bool works() const noexcept { return health_.on && !closing_; }
  void list(Batch& batch);
  void watch_by(std::int64_t at_ns) noexcept;
  void claim_all(Batch& batch);
  void queue_ios(Batch& batch) noexcept;
  void move_io(StoreIo& io, std::list<StoreIo>& to) noexcept;
  void unqueue(StoreIo& io) noexcept;
  void end_op(Op& op, DiskStatus status) noexcept;
  void end_all(Batch& batch, DiskStatus status) noexcept;
  void end_if_done(Batch& batch) noexcept;
  void drop_queued(Batch& batch) noexcept;
  void op_io_ended(Op& op) noexcept;
  void wake_waiter(Slot& slot) noexcept;
  void retire(StoreIo& io) noexcept;
  StoreIo* next_io() noexcept;
  bool can_dispatch() const noexcept;
  void switch_off(DiskFault fault, int error) noexcept;
  void end_everything() noexcept;
  Group take_group() noexcept;
  void apply(Group& group) noexcept;

  // These without it.
  void fill(StoreIo& io) noexcept;
  void deliver(StoreIo& io) noexcept;
  int make_durable(const Group& group, DiskFault& fault) noexcept;

  const BlockShape shape_;
  const DiskOptions options_;
  const std::shared_ptr<DiskDirectory> directory_;  // and with it the lock
  const std::unique_ptr<DiskFile> blocks_;
  const std::unique_ptr<Journal> journal_;
  std::unique_ptr<IoEngine> engine_;

  mutable std::mutex mutex_;
  std::condition_variable dispatch_wanted_;
  std::condition_variable commit_wanted_;
  std::condition_variable fold_wanted_;
  std::condition_variable watch_wanted_;
  SlotTable slots_;
  IoBuffers buffers_;
  std::list<StoreIo> reads_;
  std::list<StoreIo> writes_;
  std::list<StoreIo> blocked_;
  std::list<StoreIo> running_;
  OpQueue puts_;  // written, but not recorded
  OpQueue erases_;
  std::set<std::pair<std::int64_t, Batch*>> batches_;  // by deadline
  Batch* ending_ = nullptr;
  std::int64_t commit_started_ns_ = 0;  // 0: none runs
  std::int64_t watch_next_ns_ = 0;
  bool closing_ = false;
  DiskHealth health_;
  DiskCounters counters_;
};

}  // namespace kvpool
