// Drives that fail: the store on disk switches itself off, says why, and no caller waits longer than its deadline.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disk_kit.h"
#include "kvpool/base/clock.h"
#include "power_disk.h"
#include "soon.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kBlock = 9000;
using Call = PowerDisk::Call;

// A disk that does what a test says for calls to one file. Other threads ask while the test changes its mind.
class FaultyDisk {
 public:
  FaultyDisk() {
    disk->fault = [this](Call call, const std::string& name) { return answer(call, name); };
  }
  ~FaultyDisk() { heal(); }
  void fail(Call call, const std::string& prefix, int error) {
    const std::lock_guard lock(mutex_);
    call_ = call;
    prefix_ = prefix;
    error_ = error;
  }
  void hang(Call call, const std::string& prefix) { fail(call, prefix, kHang); }
  void heal() {
    const std::lock_guard lock(mutex_);
    error_ = 0;
    changed_.notify_all();
  }
  bool is_hanging() {
    const std::lock_guard lock(mutex_);
    return hanging_ > 0;
  }

  const std::shared_ptr<PowerDisk> disk = std::make_shared<PowerDisk>();

 private:
  static constexpr int kHang = -2;

  int answer(Call call, const std::string& name) {
    std::unique_lock lock(mutex_);
    if (error_ == 0 || call != call_ || name.rfind(prefix_, 0) != 0) return 0;
    if (error_ != kHang) return error_;
    ++hanging_;
    changed_.wait(lock, [this] { return error_ == 0; });
    --hanging_;
    return 0;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Call call_{};
  std::string prefix_;
  int error_ = 0;
  int hanging_ = 0;
};

struct Hang {
  Call call;
  const char* file;
};
constexpr Hang kReadHangs{Call::kRead, "kvpool.blocks"};
constexpr Hang kJournalHangs{Call::kFlush, "kvpool.journal"};

struct Rig {
  Rig() : options(disk_options("memory", 8, kBlock)) {}
  void open() { store = DiskStore::open(options, faulty.disk); }
  void open_again() {
    store.reset();
    open();
  }
  DiskStatus put(std::uint32_t slot, std::uint32_t generation) {
    const EntryWrite entry(slot, generation, kBlock);
    return status_of(store->write({entry.write}, in_a_minute_ns()));
  }
  DiskStatus get(std::uint32_t slot, std::uint32_t generation) {
    Bytes content(kBlock);
    const DiskStatus status = status_of(store->read({{slot, generation, {}, {std::span(content)}}}, in_a_minute_ns()));
    if (status == DiskStatus::kOk) CHECK(content == content_of(slot, generation, kBlock));
    return status;
  }
  // The operation that meets this: a read of slot 1, or the write.
  DiskTicket give(const Hang& hang, Bytes& content, const EntryWrite& entry, std::int64_t deadline_ns) {
    if (hang.call != Call::kRead) return store->write({entry.write}, deadline_ns);
    std::vector<DiskRead> reads;
    reads.push_back({1, 1, {}, {std::span(content)}});
    return store->read(reads, deadline_ns);
  }

  FaultyDisk faulty;
  DiskOptions options;
  std::unique_ptr<DiskStore> store;
};

TEST_CASE("an error of the drive switches the store on disk off, and what was durable is there afterwards") {
  struct Fault {
    Call call;
    const char* file;
    int error;
    DiskFault fault;
  };
  for (const Fault& fault : {Fault{Call::kWrite, "kvpool.blocks", EIO, DiskFault::kWriteFailed},
                             Fault{Call::kWrite, "kvpool.blocks", ENOSPC, DiskFault::kWriteFailed},
                             Fault{Call::kFlush, "kvpool.blocks", EIO, DiskFault::kFlushFailed},
                             Fault{Call::kWrite, "kvpool.journal", ENOSPC, DiskFault::kJournalFailed},
                             Fault{Call::kFlush, "kvpool.journal", EIO, DiskFault::kJournalFailed}}) {
    CAPTURE(std::string(disk_fault_name(fault.fault)));
    Rig rig;
    rig.open();
    CHECK(rig.put(1, 1) == DiskStatus::kOk);
    rig.faulty.fail(fault.call, fault.file, fault.error);
    CHECK(rig.put(2, 1) != DiskStatus::kOk);
    const DiskHealth health = rig.store->state();
    CHECK_FALSE(health.on);
    CHECK(health.fault == fault.fault);
    CHECK(health.error == fault.error);
    CHECK(health.reason.find(errno_text(fault.error)) != std::string::npos);
    CHECK(rig.get(1, 1) == DiskStatus::kOff);
    CHECK(rig.put(3, 1) == DiskStatus::kOff);
    CHECK(status_of(rig.store->erase({{1, 1}}, in_a_minute_ns())) == DiskStatus::kOff);
    rig.faulty.heal();
    rig.open_again();
    CHECK(rig.get(1, 1) == DiskStatus::kOk);
  }
}

TEST_CASE("a sector that cannot be read is an error, and so many switch the store on disk off") {
  Rig rig;
  rig.options.read_errors_max = 2;
  rig.open();
  CHECK(rig.put(1, 1) == DiskStatus::kOk);
  rig.faulty.fail(Call::kRead, "kvpool.blocks", EIO);
  CHECK(rig.get(1, 1) == DiskStatus::kIoError);
  CHECK(rig.store->state().on);
  CHECK(rig.get(1, 1) == DiskStatus::kIoError);
  CHECK(rig.store->state().fault == DiskFault::kReadFailed);
  CHECK(rig.store->counters().read_errors == 2);
}

TEST_CASE("short reads and writes of the drive are gone on with") {
  Rig rig;
  rig.open();
  rig.faulty.fail(Call::kWrite, "kvpool", PowerDisk::kShort);
  CHECK(rig.put(1, 1) == DiskStatus::kOk);
  rig.faulty.fail(Call::kRead, "kvpool", PowerDisk::kShort);
  CHECK(rig.get(1, 1) == DiskStatus::kOk);
  rig.open_again();
  CHECK(rig.get(1, 1) == DiskStatus::kOk);
}

TEST_CASE("a caller has its answer by its deadline, whatever hangs") {
  for (const Hang& hang :
       {kReadHangs, Hang{Call::kWrite, "kvpool.blocks"}, Hang{Call::kFlush, "kvpool.blocks"}, kJournalHangs}) {
    CAPTURE(std::string(hang.file));
    Rig rig;
    rig.open();
    CHECK(rig.put(1, 1) == DiskStatus::kOk);
    rig.faulty.hang(hang.call, hang.file);
    Bytes content(kBlock, std::byte{7});
    const EntryWrite entry(2, 1, kBlock);
    // On a slow machine an operation may be late before it has begun.
    CHECK(soon([&] {
      const std::int64_t deadline = monotonic_ns() + 30'000'000;
      const DiskTicket ticket = rig.give(hang, content, entry, deadline);
      CHECK(status_of(ticket) == DiskStatus::kDeadline);
      return rig.faulty.is_hanging();
    }));
    CHECK(rig.store->state().on);
    rig.faulty.heal();
    CHECK(rig.put(2, 2) == DiskStatus::kOk);  // waits for what hung, and for the entry's end if it became one
    CHECK(rig.get(2, 2) == DiskStatus::kOk);
    CHECK(rig.store->counters().entries == 2);
    CHECK(content == Bytes(kBlock, std::byte{7}));
  }
}

TEST_CASE("a drive that hangs switches the store on disk off, and keeps nobody from closing it") {
  for (const Hang& hang : {kReadHangs, kJournalHangs}) {
    CAPTURE(std::string(hang.file));
    Rig rig;
    rig.open();
    CHECK(rig.put(1, 1) == DiskStatus::kOk);
    rig.options.hang_ns = 20'000'000;
    rig.faulty.hang(hang.call, hang.file);
    Bytes content(kBlock, std::byte{7});
    const EntryWrite entry(2, 1, kBlock);
    // On a slow machine other I/O may take as long, and the store is off before.
    CHECK(soon([&] {
      rig.faulty.heal();
      rig.open_again();
      rig.faulty.hang(hang.call, hang.file);
      const DiskTicket ticket = rig.give(hang, content, entry, in_a_minute_ns());
      CHECK(status_of(ticket) == DiskStatus::kOff);
      CHECK(rig.store->state().fault == DiskFault::kHung);
      return rig.faulty.is_hanging();
    }));
    rig.store.reset();
    CHECK(rig.faulty.is_hanging());
    rig.faulty.heal();
    CHECK(soon([&] { return rig.faulty.disk.use_count() == 1; }));  // the thread has ended, and let go of all
    CHECK(content == Bytes(kBlock, std::byte{7}));
  }
}

TEST_CASE("a store on disk that is destroyed ends what is pending") {
  Rig rig;
  rig.open();
  CHECK(rig.put(1, 1) == DiskStatus::kOk);
  rig.faulty.hang(Call::kWrite, "kvpool.blocks");
  const EntryWrite entry(2, 1, kBlock);
  std::atomic<int> ends{0};
  const DiskTicket ticket = rig.store->write({entry.write}, in_a_minute_ns(), [&](DiskBatch&) { ++ends; });
  CHECK(soon([&] { return rig.faulty.is_hanging(); }));
  rig.options.hang_ns = kDiskMinuteNs;
  std::thread healer([&] {
    sleep_while([&] { return !ticket->completion().done(); });
    rig.faulty.heal();
  });
  rig.store.reset();
  healer.join();
  CHECK(ticket->status(0) == DiskStatus::kOff);
  CHECK(ends == 1);
  rig.open();
  CHECK(rig.get(1, 1) == DiskStatus::kOk);
}

}  // namespace
}  // namespace kvpool::testing
