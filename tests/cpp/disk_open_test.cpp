// Opening a store on disk whose directory others may use, is damaged, full, or was left by a process that was killed.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>

#include "disk_kit.h"
#include "power_disk.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kBlock = 9000;
using Call = PowerDisk::Call;

DiskStatus put(DiskStore& store, std::uint32_t slot, std::uint64_t generation) {
  const EntryWrite entry(slot, generation, kBlock);
  return status_of(store.write({entry.write}, in_a_minute_ns()));
}

DiskStatus get(DiskStore& store, std::uint32_t slot, std::uint64_t generation) {
  Bytes content(kBlock);
  const DiskStatus status = status_of(store.read({{slot, generation, {}, {std::span(content)}}}, in_a_minute_ns()));
  if (status == DiskStatus::kOk) CHECK(content == content_of(slot, generation, kBlock));
  return status;
}

// A closed store with an entry in slot 1, in a directory of tests.
struct Left {
  Left() : options(disk_options(folder / "store", 4, kBlock)) {
    CHECK(put(*DiskStore::open(options), 1, 1) == DiskStatus::kOk);
  }
  std::filesystem::path at(const char* name) const { return std::filesystem::path(options.path) / name; }
  void refused(ErrorCause cause) const {
    const auto error = error_of([&] { DiskStore::open(options); });
    REQUIRE(error);
    INFO(error->what());
    CHECK(error->code() == ErrorCode::kState);
    CHECK(error->cause() == cause);
  }
  void is_whole() const { CHECK(get(*DiskStore::open(options), 1, 1) == DiskStatus::kOk); }

  TemporaryFolder folder;
  DiskOptions options;
};

TEST_CASE("generations of entries have 64 bits, also after the store was opened again") {
  const std::uint64_t later = (std::uint64_t{1} << 32) + 1;
  Left left;
  CHECK(put(*DiskStore::open(left.options), 2, later) == DiskStatus::kOk);
  const auto store = DiskStore::open(left.options);
  REQUIRE(store->recovered().size() == 2);
  CHECK(store->recovered()[1].generation == later);
  CHECK(get(*store, 2, later) == DiskStatus::kOk);
  CHECK(get(*store, 2, 1) == DiskStatus::kStale);
}

TEST_CASE("a file of slots that was cut off is damage, not a drive that fails") {
  const Left left;
  const auto bytes = std::filesystem::file_size(left.at("kvpool.blocks"));
  for (const std::uintmax_t size : {std::uintmax_t{4096}, bytes - 1}) {
    std::filesystem::resize_file(left.at("kvpool.blocks"), size);
    left.refused(ErrorCause::kDamaged);
    CHECK(std::filesystem::file_size(left.at("kvpool.blocks")) == size);
  }
}

TEST_CASE("a journal that claims to be huge takes no memory for what is not there") {
  const Left left;
  std::filesystem::resize_file(left.at("kvpool.journal.2"), std::uintmax_t{1} << 42);
  left.is_whole();
  std::filesystem::copy_file(left.at("kvpool.lock"), left.at("kvpool.journal.99"));
  std::filesystem::resize_file(left.at("kvpool.journal.99"), std::uintmax_t{1} << 42);
  left.refused(ErrorCause::kDamaged);
}

TEST_CASE("records of a journal are found wherever they lie in the pieces that are read") {
  TemporaryFolder folder;
  DiskOptions options = disk_options(folder / "store", 2, 4096);
  constexpr std::uint64_t kLast = 200;
  {
    const auto store = DiskStore::open(options);
    const Bytes content = content_of(0, 1, 4096);
    const Bytes meta(kDiskMetaBytesMax - 100, std::byte{5});  // so 200 of them lie in four pieces, some in two
    for (std::uint64_t generation = 1; generation <= kLast; ++generation) {
      CHECK(status_of(store->write({{0, generation, meta, {content}}}, in_a_minute_ns())) == DiskStatus::kOk);
      if (generation < kLast) CHECK(status_of(store->erase({{0, generation}}, in_a_minute_ns())) == DiskStatus::kOk);
    }
  }
  const auto store = DiskStore::open(options);
  REQUIRE(store->recovered().size() == 1);
  CHECK(store->recovered()[0].generation == kLast);
  CHECK(store->recovered()[0].meta.size() == kDiskMetaBytesMax - 100);
}

TEST_CASE("a store that was used and has lost its description is not made anew") {
  const Left left;
  std::filesystem::remove(left.at("kvpool.journal.1"));
  std::filesystem::rename(left.at("kvpool.journal.2"), left.at("kvpool.journal.1"));
  std::filesystem::rename(left.at("kvpool.store"), left.folder / "description");
  left.refused(ErrorCause::kDamaged);
  std::filesystem::rename(left.at("kvpool.journal.1"), left.at("kvpool.journal.2"));
  std::filesystem::rename(left.folder / "description", left.at("kvpool.store"));
  CHECK(std::filesystem::file_size(left.at("kvpool.journal.2")) > sizeof(LogHeader));
}

TEST_CASE("a directory or a file that others may use is refused") {
  const Left left;
  const auto mode = [&](const char* name, mode_t bits) { REQUIRE(chmod(left.at(name).c_str(), bits) == 0); };
  for (const mode_t bits : {0777, 0720, 0702}) {
    mode(".", bits);
    left.refused(ErrorCause::kForeign);
  }
  mode(".", 0755);
  left.is_whole();
  for (const char* name : {"kvpool.blocks", "kvpool.store", "kvpool.lock", "kvpool.journal.2"}) {
    for (const mode_t bits : {0666, 0640, 0604}) {
      mode(name, bits);
      left.refused(ErrorCause::kForeign);
    }
    mode(name, 0600);
  }
  left.is_whole();
}

TEST_CASE("files of a store on disk are regular ones") {
  const Left left;
  std::filesystem::rename(left.at("kvpool.blocks"), left.folder / "elsewhere");
  std::filesystem::create_symlink(left.folder / "elsewhere", left.at("kvpool.blocks"));
  left.refused(ErrorCause::kForeign);
  std::filesystem::remove(left.at("kvpool.blocks"));
  REQUIRE(mkfifo(left.at("kvpool.blocks").c_str(), 0600) == 0);
  left.refused(ErrorCause::kForeign);
  std::filesystem::remove(left.at("kvpool.blocks"));
  std::filesystem::rename(left.folder / "elsewhere", left.at("kvpool.blocks"));
  left.is_whole();
}

TEST_CASE("a full disk does not keep a store from being opened and read") {
  for (const int error : {ENOSPC, EDQUOT}) {
    const auto disk = std::make_shared<PowerDisk>();
    const DiskOptions options = disk_options("memory", 4, kBlock);
    CHECK(put(*DiskStore::open(options, disk), 1, 1) == DiskStatus::kOk);
    const auto full = [error](Call call, const std::string& name) {
      return call == Call::kWrite && name.rfind("kvpool.journal", 0) == 0 ? error : 0;
    };
    disk->fault = full;
    {
      const auto store = DiskStore::open(options, disk);
      CHECK(get(*store, 1, 1) == DiskStatus::kOk);
      CHECK(store->state().on);
      CHECK(put(*store, 2, 1) != DiskStatus::kOk);
      CHECK(store->state().fault == DiskFault::kJournalFailed);
      CHECK(store->state().error == error);
    }
    auto store = DiskStore::open(options, disk);
    disk->fault = nullptr;  // room again: no call is under way
    CHECK(put(*store, 2, 1) == DiskStatus::kOk);
    store.reset();
    store = DiskStore::open(options, disk);
    CHECK(get(*store, 1, 1) == DiskStatus::kOk);
    CHECK(get(*store, 2, 1) == DiskStatus::kOk);
  }
}

// Forks; the child does this and ends with its result, without destructors, as if it was killed.
template <class Work>
pid_t in_child(Work&& work) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(work() ? 0 : 1);
  return child;
}

bool ended_well(pid_t child) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("a process that was killed leaves no lock to the children that it has forked") {
  const Left left;
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  // The child of the child has inherited everything, and lives until the pipe is closed here.
  const pid_t killed = in_child([&] {
    close(ends[1]);
    const auto* const directory = new std::shared_ptr<DiskDirectory>(posix_directory(left.options.path));
    if ((*directory)->lock("kvpool.lock") != 0) return false;  // never given back
    const pid_t child = fork();
    char byte = 0;
    if (child == 0) _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
    return child > 0;
  });
  CHECK(ended_well(killed));
  left.is_whole();
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("a forked child leaves its parent's lock alone") {
  const Left left;
  const auto directory = posix_directory(left.options.path);
  REQUIRE(directory->lock("kvpool.lock") == 0);
  CHECK(ended_well(in_child([] { return true; })));
  left.refused(ErrorCause::kInUse);
}

}  // namespace
}  // namespace kvpool::testing
