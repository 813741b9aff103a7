#include "kvpool/disk/disk_store.h"

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/disk/core.h"
#include "kvpool/disk/crew.h"
#include "kvpool/disk/files.h"
#include "kvpool/disk/open_store.h"

namespace kvpool {

struct DiskRuntime {
  std::shared_ptr<StoreCore> core;
  Crew crew;
  std::unique_ptr<LogState> found;  // has the bytes of the entries
  std::vector<DiskEntry> entries;
};

namespace {

constexpr std::uint64_t kIoBytesMax = 64 << 20;
constexpr std::uint64_t kBlockBytesMax = std::uint64_t{1} << 32;
constexpr std::uint32_t kDepthMax = 1024;
constexpr std::int64_t kHungWaitNs = 100'000'000;

void require_between(const char* name, std::uint64_t value, std::uint64_t minimum, std::uint64_t maximum) {
  if (value >= minimum && value <= maximum) return;
  throw Error(ErrorCode::kArgument,
              std::string(name) + " of a store on disk is " + std::to_string(value) + ": from " +
                  std::to_string(minimum) + " to " + std::to_string(maximum),
              {{"value", static_cast<std::int64_t>(value)},
               {"minimum", static_cast<std::int64_t>(minimum)},
               {"maximum", static_cast<std::int64_t>(maximum)}});
}

void require_options(const DiskOptions& options) {
  if (options.path.empty()) throw Error(ErrorCode::kArgument, "the path of a store on disk is empty");
  require_between("slots", options.slots, 1, kDiskSlotsMax);
  require_between("block_bytes", options.block_bytes, 1, kBlockBytesMax);
  require_between("slots * block_bytes", options.slots * options.block_bytes, 1, std::uint64_t{1} << 60);
  require_between("read_depth", options.read_depth, 1, kDepthMax);
  require_between("write_depth", options.write_depth, 1, kDepthMax);
  require_between("io_bytes_max", options.io_bytes_max, kDiskPieceBytes, kIoBytesMax);
  require_between("io_bytes_max % piece", options.io_bytes_max % kDiskPieceBytes, 0, 0);
  require_between("hang_ns", static_cast<std::uint64_t>(options.hang_ns), 1, 3'600'000'000'000);
  require_between("read_errors_max", options.read_errors_max, 1, std::numeric_limits<std::uint32_t>::max());
}

std::unique_ptr<IoEngine> make_engine(const DiskOptions& options, const std::shared_ptr<StoreCore>& core) {
  const std::uint32_t depth = options.read_depth + options.write_depth;
  if (options.engine != DiskEngine::kThreads) {
    if (auto engine = make_uring_engine(core->file(), depth, core)) return engine;
    if (options.engine == DiskEngine::kUring) {
      throw Error(ErrorCode::kUnsupported, "io_uring is forbidden here, or the kernel is older than 5.4");
    }
  }
  return make_thread_engine(core->file(), depth, core);
}

bool start_threads(Crew& crew, const std::shared_ptr<StoreCore>& core) {
  return crew.start([core] {
    while (core->wait_dispatch()) core->dispatch();
  }) && crew.start([core] {
    while (core->wait_commit()) core->commit();
  }) && crew.start([core] {
    while (core->wait_fold()) core->fold();
  }) && crew.start([core] {
    while (core->wait_watch(core->watch(monotonic_ns()))) continue;
  });
}

void end_threads(DiskRuntime& runtime, std::int64_t until_ns) noexcept {
  runtime.core->close();
  runtime.crew.wait_until(until_ns);
  runtime.core->engine().stop(until_ns);
}

// What open() throws when memory runs out is an Error, too.
template <class Work>
auto with_memory(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, "memory ran out for a store on disk");
  }
}

void require_no_fork(std::uint32_t generation) {
  if (fork_generation() == generation) return;
  throw Error(ErrorCode::kFork, "a store on disk cannot be used in a child process after fork");
}

}  // namespace

const char* disk_status_name(DiskStatus status) noexcept {
  switch (status) {
    case DiskStatus::kPending:
      return "pending";
    case DiskStatus::kOk:
      return "ok";
    case DiskStatus::kStale:
      return "stale";
    case DiskStatus::kCorrupt:
      return "corrupt";
    case DiskStatus::kIoError:
      return "I/O error";
    case DiskStatus::kDeadline:
      return "deadline";
    case DiskStatus::kCancelled:
      return "cancelled";
    case DiskStatus::kOff:
      return "off";
  }
  return "unknown";
}

const char* disk_fault_name(DiskFault fault) noexcept {
  switch (fault) {
    case DiskFault::kNone:
      return "none";
    case DiskFault::kReadFailed:
      return "a read failed";
    case DiskFault::kWriteFailed:
      return "a write failed";
    case DiskFault::kFlushFailed:
      return "a flush failed";
    case DiskFault::kJournalFailed:
      return "its journal failed";
    case DiskFault::kHung:
      return "the drive hangs";
  }
  return "unknown";
}

std::unique_ptr<DiskStore> DiskStore::open(const DiskOptions& options) {
  require_options(options);
  return open(options, posix_directory(options.path));
}

std::unique_ptr<DiskStore> DiskStore::open(const DiskOptions& options, std::shared_ptr<DiskDirectory> directory) {
  require_options(options);
  return with_memory([&] {
    OpenedStore opened = open_store(options, directory);
    auto runtime = std::make_shared<DiskRuntime>();
    runtime->found = std::move(opened.found);
    LogState& found = *runtime->found;
    runtime->entries.reserve(found.entries());
    for (std::uint32_t slot = 0; slot < found.slots(); ++slot) {
      if (!found.holds(slot)) continue;
      const Record record = found.record(slot);
      runtime->entries.push_back({slot, record.generation, record.meta});
    }
    runtime->core = std::make_shared<StoreCore>(options, std::move(directory), std::move(opened), found);
    runtime->core->use(make_engine(options, runtime->core));
    if (!start_threads(runtime->crew, runtime->core)) {
      end_threads(*runtime, monotonic_ns() + options.hang_ns);
      throw Error(ErrorCode::kOutOfMemory, "the kernel gives no thread for a store on disk");
    }
    return std::unique_ptr<DiskStore>(new DiskStore(std::move(runtime), options.hang_ns));
  });
}

DiskStore::DiskStore(std::shared_ptr<DiskRuntime> runtime, std::int64_t hang_ns) noexcept
    : runtime_(std::move(runtime)), hang_ns_(hang_ns), fork_generation_(fork_generation()) {}

DiskStore::~DiskStore() {
  if (fork_generation() != fork_generation_) {
    // Threads and locks are the parent's: what they use is left alone.
    static_cast<void>(new std::shared_ptr<DiskRuntime>(std::move(runtime_)));
    return;
  }
  // I/O that hangs has had its time: only what ends at once is waited for.
  const std::int64_t wait = runtime_->core->hung() ? std::min(hang_ns_, kHungWaitNs) : hang_ns_;
  end_threads(*runtime_, monotonic_ns() + wait);
}

std::span<const DiskEntry> DiskStore::recovered() const noexcept { return runtime_->entries; }

void DiskStore::forget_recovered() noexcept {
  runtime_->entries = {};
  runtime_->found.reset();
}

DiskTicket DiskStore::write(std::vector<DiskWrite> writes, std::int64_t deadline_ns, DiskEnd on_end) {
  require_no_fork(fork_generation_);
  return with_memory([&] { return runtime_->core->write(writes, deadline_ns, std::move(on_end)); });
}

DiskTicket DiskStore::read(std::vector<DiskRead> reads, std::int64_t deadline_ns, DiskEnd on_end) {
  require_no_fork(fork_generation_);
  return with_memory([&] { return runtime_->core->read(reads, deadline_ns, std::move(on_end)); });
}

DiskTicket DiskStore::erase(std::vector<DiskErase> erases, std::int64_t deadline_ns, DiskEnd on_end) {
  require_no_fork(fork_generation_);
  return with_memory([&] { return runtime_->core->erase(erases, deadline_ns, std::move(on_end)); });
}

DiskHealth DiskStore::state() const {
  require_no_fork(fork_generation_);
  return runtime_->core->health();
}

DiskCounters DiskStore::counters() const noexcept {
  return fork_generation() == fork_generation_ ? runtime_->core->counters() : DiskCounters();
}

const char* DiskStore::engine_name() const noexcept { return runtime_->core->engine().name(); }
bool DiskStore::direct() const noexcept { return runtime_->core->file().direct(); }
std::uint64_t DiskStore::slot_bytes() const noexcept { return runtime_->core->shape().slot_bytes; }

}  // namespace kvpool
