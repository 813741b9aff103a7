// A store on disk in a real directory: what survives, what is refused, both ways of I/O.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "disk_kit.h"
#include "fuzz_seeds.h"
#include "power_disk.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kBlock = 3 * kDiskPieceBytes + 900;

DiskStatus put(DiskStore& store, std::uint32_t slot, std::uint64_t generation, std::size_t bytes = kBlock) {
  const EntryWrite entry(slot, generation, bytes);
  return status_of(store.write({entry.write}, in_a_minute_ns()));
}

DiskStatus get(DiskStore& store, std::uint32_t slot, std::uint64_t generation, std::size_t bytes = kBlock) {
  Bytes content(bytes);
  const DiskStatus status = status_of(store.read({{slot, generation, {}, {std::span(content)}}}, in_a_minute_ns()));
  if (status == DiskStatus::kOk) CHECK(content == content_of(slot, generation, bytes));
  return status;
}

std::string text_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spoil(const std::string& path, std::size_t at, char with) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(with);
}

std::vector<DiskEngine> engines_here() {
  const TemporaryFolder folder;
  DiskOptions options = disk_options(folder / "probe", 1, 4096);
  options.engine = DiskEngine::kUring;
  if (code_of([&] { DiskStore::open(options); }) == ErrorCode::kUnsupported) return {DiskEngine::kThreads};
  return {DiskEngine::kUring, DiskEngine::kThreads};
}

TEST_CASE("a store on disk has its entries after it was closed and opened again") {
  for (const DiskEngine engine : engines_here()) {
    const TemporaryFolder folder;
    DiskOptions options = disk_options(folder / "store", 8, kBlock);
    options.engine = engine;
    {
      const auto store = DiskStore::open(options);
      CHECK(std::string(store->engine_name()) == (engine == DiskEngine::kUring ? "io_uring" : "threads"));
      CHECK(store->recovered().empty());
      CHECK(put(*store, 5, 3) == DiskStatus::kOk);
      CHECK(put(*store, 1, 9) == DiskStatus::kOk);
      CHECK(put(*store, 2, 1) == DiskStatus::kOk);
      CHECK(status_of(store->erase({{2, 1}}, in_a_minute_ns())) == DiskStatus::kOk);
      CHECK(get(*store, 5, 3) == DiskStatus::kOk);
    }
    const auto store = DiskStore::open(options);
    REQUIRE(store->recovered().size() == 2);
    CHECK(store->recovered()[0].slot == 1);
    CHECK(store->recovered()[1].slot == 5);
    CHECK(store->recovered()[1].generation == 3);
    const std::span<const std::byte> meta = store->recovered()[1].meta;
    CHECK(Bytes(meta.begin(), meta.end()) == meta_of(5, 3));
    CHECK(get(*store, 5, 3) == DiskStatus::kOk);
    CHECK(get(*store, 1, 9) == DiskStatus::kOk);
    CHECK(get(*store, 2, 1) == DiskStatus::kStale);
    store->forget_recovered();
    CHECK(store->recovered().empty());
    CHECK(store->counters().entries == 2);
  }
}

TEST_CASE("many threads use a store on disk at once, and each entry stays what it is") {
  for (const DiskEngine engine : engines_here()) {
    const TemporaryFolder folder;
    constexpr std::uint32_t kThreads = 3;
    constexpr std::uint32_t kEach = 4;
    constexpr std::size_t kBytes = kDiskPieceBytes + 4096;
    DiskOptions options = disk_options(folder / "store", kThreads * kEach, kBytes);
    options.engine = engine;
    options.journal_bytes_min = 4096;
    const auto store = DiskStore::open(options);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::uint32_t generation = 1; generation < 12; ++generation) {
          std::vector<std::unique_ptr<EntryWrite>> entries;
          std::vector<DiskWrite> writes;
          std::vector<DiskErase> erases;
          for (std::uint32_t slot = thread * kEach; slot < (thread + 1) * kEach; ++slot) {
            entries.push_back(std::make_unique<EntryWrite>(slot, generation, kBytes));
            writes.push_back(entries.back()->write);
            erases.push_back({slot, generation});
          }
          wrong += status_of(store->write(writes, in_a_minute_ns())) == DiskStatus::kOk ? 0 : 1;
          std::vector<Bytes> contents(kEach, Bytes(kBytes));
          std::vector<DiskRead> reads;
          for (std::uint32_t i = 0; i < kEach; ++i) {
            reads.push_back({thread * kEach + i, generation, {}, {std::span(contents[i])}});
          }
          const DiskTicket read = store->read(reads, in_a_minute_ns());
          read->completion().sleep_until(in_a_minute_ns());
          for (std::uint32_t i = 0; i < kEach; ++i) {
            wrong += read->status(i) == DiskStatus::kOk && contents[i] == entries[i]->content ? 0 : 1;
          }
          store->erase(erases, in_a_minute_ns());  // the next write waits for it
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(store->state().on);
    CHECK(store->counters().compactions > 0);
  }
}

TEST_CASE("a store on disk belongs to its user alone") {
  const TemporaryFolder folder;
  const DiskOptions options = disk_options(folder / "store", 2, kBlock);
  const auto store = DiskStore::open(options);
  struct stat found{};
  REQUIRE(stat(options.path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0700);
  for (const auto& entry : std::filesystem::directory_iterator(options.path)) {
    REQUIRE(stat(entry.path().c_str(), &found) == 0);
    CHECK((found.st_mode & 0777) == 0600);
  }
  REQUIRE(stat((options.path + "/kvpool.blocks").c_str(), &found) == 0);
  CHECK(static_cast<std::uint64_t>(found.st_blocks) * 512 >= 2 * kBlock);
}

TEST_CASE("a store on disk is open once, in one process and in all") {
  const TemporaryFolder folder;
  const DiskOptions options = disk_options(folder / "store", 2, kBlock);
  auto store = DiskStore::open(options);
  const auto refused = error_of([&] { DiskStore::open(options); });
  REQUIRE(refused);
  CHECK(refused->code() == ErrorCode::kState);
  CHECK(refused->cause() == ErrorCause::kInUse);
  const pid_t child = fork();
  if (child == 0) {
    const auto error = error_of([&] {
      posix_directory(options.path)->lock("kvpool.lock") == EAGAIN ? throw Error(ErrorCode::kState, "in use") : void();
    });
    _exit(error ? 0 : 1);
  }
  int ended = 0;
  REQUIRE(waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
  store.reset();
  CHECK_FALSE(error_of([&] { DiskStore::open(options); }));
}

TEST_CASE("a forked child cannot use a store on disk, and does not harm it") {
  const TemporaryFolder folder;
  const DiskOptions options = disk_options(folder / "store", 2, kBlock);
  auto store = DiskStore::open(options);
  int go_on[2];
  REQUIRE(pipe(go_on) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto code = code_of([&] { store->erase({}, in_a_minute_ns()); });
    store.reset();
    close(go_on[1]);
    char ignored = 0;
    static_cast<void>(!read(go_on[0], &ignored, 1));
    _exit(code == ErrorCode::kFork ? 0 : 1);
  }
  CHECK(put(*store, 1, 1) == DiskStatus::kOk);
  store.reset();
  CHECK(get(*DiskStore::open(options), 1, 1) == DiskStatus::kOk);  // the child, which lives, does not keep the lock
  close(go_on[0]);
  close(go_on[1]);
  int ended = 0;
  REQUIRE(waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
}

TEST_CASE("a store on disk that was made for something else is refused, by what differs") {
  const TemporaryFolder folder;
  const DiskOptions made = disk_options(folder / "store", 4, kBlock);
  CHECK(put(*DiskStore::open(made), 1, 1) == DiskStatus::kOk);
  const auto refused = [&](const DiskOptions& options, const std::string& text) {
    std::string said;
    CHECK(code_of([&] { DiskStore::open(options); }, &said) == ErrorCode::kLayoutMismatch);
    INFO(said);
    CHECK(said.find(text) != std::string::npos);
  };
  DiskOptions other = made;
  other.format[1].second = "large";
  refused(other, "another model: it has 'tiny', and this pool 'large'");
  other = made;
  other.format.pop_back();
  refused(other, "another model");
  other = made;
  other.format.emplace_back("dtype", "int8");
  refused(other, "another dtype: it has none");
  other = made;
  other.block_bytes -= 1;
  refused(other, "bytes a block");
  other = made;
  other.slots = 5;
  refused(other, "4 blocks, and 5");
  CHECK(get(*DiskStore::open(made), 1, 1) == DiskStatus::kOk);
}

TEST_CASE("foreign files are refused and stay as they are") {
  const TemporaryFolder folder;
  const auto cause = [](const DiskOptions& options) {
    const auto error = error_of([&] { DiskStore::open(options); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kState);
    return error->cause();
  };
  std::ofstream(folder / "file") << "mine";
  CHECK(cause(disk_options(folder / "file", 1, 4096)) == ErrorCause::kForeign);
  CHECK(text_in(folder / "file") == "mine");
  std::filesystem::create_directory(folder / "folder");
  std::ofstream(folder / "folder/notes") << "mine";
  CHECK(cause(disk_options(folder / "folder", 1, 4096)) == ErrorCause::kForeign);
  std::filesystem::remove(folder / "folder/notes");
  std::ofstream(folder / "folder/kvpool.lock") << "mine";
  CHECK(cause(disk_options(folder / "folder", 1, 4096)) == ErrorCause::kForeign);
  CHECK(text_in(folder / "folder/kvpool.lock") == "mine");
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "folder"), {}) == 1);
}

TEST_CASE("another version of the format, and damage, are told apart") {
  const TemporaryFolder folder;
  const DiskOptions options = disk_options(folder / "store", 2, kBlock);
  CHECK(put(*DiskStore::open(options), 1, 1) == DiskStatus::kOk);
  const auto at = [&](const char* name) { return options.path + "/" + name; };
  const auto refused = [&](const char* name, std::size_t offset, char with, ErrorCode code, ErrorCause cause) {
    const std::string before = text_in(at(name));
    spoil(at(name), offset, with);
    const auto error = error_of([&] { DiskStore::open(options); });
    REQUIRE(error);
    INFO(error->what());
    CHECK(error->code() == code);
    CHECK(error->cause() == cause);
    spoil(at(name), offset, before[offset]);
  };
  refused("kvpool.store", 8, 9, ErrorCode::kUnsupported, ErrorCause::kOther);
  refused("kvpool.store", 30, 9, ErrorCode::kState, ErrorCause::kDamaged);
  refused("kvpool.store", 0, 'X', ErrorCode::kState, ErrorCause::kForeign);
  refused("kvpool.blocks", 20, 9, ErrorCode::kState, ErrorCause::kDamaged);
  // The store was opened once: its record is in kvpool.journal.2. Another opening makes the next one.
  static_cast<void>(DiskStore::open(options));
  refused("kvpool.journal.2", 40, 9, ErrorCode::kState, ErrorCause::kDamaged);
  refused("kvpool.journal.2", 70, 9, ErrorCode::kState, ErrorCause::kDamaged);
  std::filesystem::rename(at("kvpool.journal.2"), at("kvpool.journal.9"));
  CHECK(error_of([&] { DiskStore::open(options); })->cause() == ErrorCause::kDamaged);
  std::filesystem::rename(at("kvpool.journal.9"), at("kvpool.journal.2"));
  CHECK(get(*DiskStore::open(options), 1, 1) == DiskStatus::kOk);
}

TEST_CASE("options of a store on disk are checked") {
  const TemporaryFolder folder;
  const DiskOptions good = disk_options(folder / "store", 2, kBlock);
  const auto refused = [&](auto&& change) {
    DiskOptions options = good;
    change(options);
    CHECK(code_of([&] { DiskStore::open(options); }) == ErrorCode::kArgument);
  };
  refused([](DiskOptions& options) { options.path.clear(); });
  refused([](DiskOptions& options) { options.slots = 0; });
  refused([](DiskOptions& options) { options.block_bytes = 0; });
  refused([](DiskOptions& options) { options.read_depth = 0; });
  refused([](DiskOptions& options) { options.write_depth = 5000; });
  refused([](DiskOptions& options) { options.io_bytes_max = kDiskPieceBytes + 1; });
  refused([](DiskOptions& options) { options.hang_ns = -1; });
  refused([](DiskOptions& options) { options.read_errors_max = 0; });
  CHECK_FALSE(std::filesystem::exists(good.path));
  DiskOptions nowhere = good;
  nowhere.path = folder / "absent/store";
  CHECK(code_of([&] { DiskStore::open(nowhere); }) == ErrorCode::kStoreFailed);
}

TEST_CASE("a disk that has no room is told before a store is there") {
  const auto disk = std::make_shared<PowerDisk>();
  const DiskOptions options = disk_options("memory", 4, kBlock);
  disk->room = kBlock;
  auto error = error_of([&] { DiskStore::open(options, disk); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kOutOfMemory);
  disk->room = std::uint64_t{1} << 30;
  disk->fault = [](PowerDisk::Call call, const std::string&) { return call == PowerDisk::Call::kReserve ? ENOSPC : 0; };
  CHECK(code_of([&] { DiskStore::open(options, disk); }) == ErrorCode::kOutOfMemory);
  CHECK_FALSE(disk->has("kvpool.blocks"));
  disk->fault = nullptr;
  CHECK(put(*DiskStore::open(options, disk), 1, 1) == DiskStatus::kOk);
}

}  // namespace
}  // namespace kvpool::testing
