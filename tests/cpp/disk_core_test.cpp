// The order in which a store on disk does things, step by step in one thread.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "disk_kit.h"
#include "kvpool/base/clock.h"
#include "power_disk.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kBlock = 5000;

struct Rig {
  explicit Rig(std::uint64_t block_bytes = kBlock) : options(disk_options("memory", 8, block_bytes)) {
    options.io_bytes_max = 2 * kDiskPieceBytes;
    store = std::make_unique<SteppedStore>(options, disk);
  }
  void put(std::uint32_t slot, std::uint64_t generation) {
    const EntryWrite entry(slot, generation, options.block_bytes);
    const DiskTicket ticket = store->write(entry);
    store->run();
    REQUIRE(ticket->status(0) == DiskStatus::kOk);
  }
  DiskStatus get(std::uint32_t slot, std::uint64_t generation) {
    Bytes content(options.block_bytes);
    const DiskTicket ticket = store->read(slot, generation, content);
    store->run();
    if (ticket->status(0) == DiskStatus::kOk) CHECK(content == content_of(slot, generation, options.block_bytes));
    return ticket->status(0);
  }

  DiskOptions options;
  std::shared_ptr<PowerDisk> disk = std::make_shared<PowerDisk>();
  std::unique_ptr<SteppedStore> store;
};

TEST_CASE("a write to disk is not acknowledged before its record is durable") {
  Rig rig;
  const EntryWrite entry(3, 7, kBlock);
  const DiskTicket ticket = rig.store->write(entry);
  while (rig.store->core->dispatch()) continue;
  CHECK_FALSE(ticket->completion().done());
  CHECK(rig.store->core->commit());
  CHECK(ticket->status(0) == DiskStatus::kOk);
  CHECK(rig.get(3, 7) == DiskStatus::kOk);
}

TEST_CASE("an entry on disk cannot be read before it is acknowledged, nor after it is erased, nor as another one") {
  Rig rig;
  const EntryWrite entry(3, 7, kBlock);
  Bytes content(kBlock);
  rig.store->write(entry);
  CHECK(rig.store->read(3, 7, content)->status(0) == DiskStatus::kStale);
  rig.store->run();
  CHECK(rig.get(3, 7) == DiskStatus::kOk);
  CHECK(rig.get(3, 8) == DiskStatus::kStale);
  CHECK(rig.get(4, 7) == DiskStatus::kStale);
  rig.store->erase(3, 7);
  CHECK(rig.store->read(3, 7, content)->status(0) == DiskStatus::kStale);
}

TEST_CASE("a slot on disk is rewritten only after the record that frees it is durable") {
  Rig rig;
  rig.put(2, 1);
  const DiskTicket erased = rig.store->erase(2, 1);
  const EntryWrite entry(2, 2, kBlock);
  const DiskTicket written = rig.store->write(entry);
  CHECK_FALSE(rig.store->core->dispatch());
  CHECK(rig.store->core->commit());
  CHECK(erased->status(0) == DiskStatus::kOk);
  CHECK(rig.store->core->dispatch());
  CHECK(rig.store->core->commit());
  CHECK(written->status(0) == DiskStatus::kOk);
  CHECK(rig.get(2, 2) == DiskStatus::kOk);
}

TEST_CASE("a slot on disk is rewritten only after its last reader is gone") {
  Rig rig;
  rig.put(2, 1);
  HeldEngine& held = rig.store->hold();
  Bytes content(kBlock);
  const DiskTicket read = rig.store->read(2, 1, content);
  CHECK(rig.store->core->dispatch());
  rig.store->erase(2, 1);
  CHECK(rig.store->core->commit());
  const EntryWrite entry(2, 2, kBlock);
  const DiskTicket written = rig.store->write(entry);
  CHECK_FALSE(rig.store->core->dispatch());
  held.release();
  CHECK(read->status(0) == DiskStatus::kOk);
  CHECK(content == content_of(2, 1, kBlock));
  CHECK(rig.store->core->dispatch());
  held.release();
  rig.store->core->commit();
  CHECK(written->status(0) == DiskStatus::kOk);
}

TEST_CASE("reads from disk go before writes that wait, and writes have a bound") {
  Rig rig;
  rig.put(0, 1);
  HeldEngine& held = rig.store->hold();
  std::vector<std::unique_ptr<EntryWrite>> entries;
  for (std::uint32_t slot = 1; slot < 7; ++slot) {
    entries.push_back(std::make_unique<EntryWrite>(slot, 1, kBlock));
    rig.store->write(*entries.back());
  }
  while (rig.store->core->dispatch()) continue;
  CHECK(held.held.size() == rig.options.write_depth);
  Bytes content(kBlock);
  rig.store->read(0, 1, content);
  rig.store->core->dispatch();
  REQUIRE(held.held.size() == rig.options.write_depth + 1);
  CHECK_FALSE(held.held.back()->write);
  held.release();
  rig.store->read(0, 1, content);
  CHECK(rig.store->core->dispatch());
  REQUIRE(held.held.size() == 1);
  CHECK_FALSE(held.held.front()->write);
  held.release();
}

TEST_CASE("adjacent slots on disk are written and read together") {
  Rig rig(kDiskAlignment);
  std::vector<std::unique_ptr<EntryWrite>> entries;
  std::vector<DiskWrite> writes;
  for (const std::uint32_t slot : {5U, 3U, 4U, 0U}) {
    entries.push_back(std::make_unique<EntryWrite>(slot, 9, kDiskAlignment));
    writes.push_back(entries.back()->write);
  }
  const DiskTicket ticket = rig.store->core->write(writes, kNoDeadline, {});
  while (rig.store->core->dispatch()) continue;
  CHECK(rig.store->core->commit());
  for (std::size_t i = 0; i < 4; ++i) CHECK(ticket->status(i) == DiskStatus::kOk);
  CHECK(rig.store->core->counters().writes == 2);
  CHECK(rig.store->core->counters().commits == 1);
  std::vector<Bytes> contents(3, Bytes(kDiskAlignment));
  const DiskTicket read = rig.store->core->read({{4, 9, {}, {std::span(contents[1])}},
                                                 {3, 9, {}, {std::span(contents[0])}},
                                                 {5, 9, {}, {std::span(contents[2])}}},
                                                kNoDeadline, {});
  rig.store->run();
  CHECK(rig.store->core->counters().reads == 1);
  for (std::uint32_t i = 0; i < 3; ++i) {
    CHECK(read->status(i) == DiskStatus::kOk);
    CHECK(contents[i] == content_of(3 + i, 9, kDiskAlignment));
  }
}

TEST_CASE("a block that is larger than one I/O is written and read in several") {
  Rig rig(5 * kDiskPieceBytes + 100);
  rig.put(1, 4);
  CHECK(rig.store->core->counters().writes == 3);
  CHECK(rig.get(1, 4) == DiskStatus::kOk);
  rig.store->erase(1, 4);
  rig.put(1, 5);
  CHECK(rig.get(1, 5) == DiskStatus::kOk);
}

TEST_CASE("ranges of a block on disk are read as they are asked for, with the pieces that contain them") {
  constexpr std::size_t kBytes = 4 * kDiskPieceBytes + 300;
  Rig rig(kBytes);
  rig.put(6, 2);
  const Bytes whole = content_of(6, 2, kBytes);
  const std::uint64_t before = rig.store->core->counters().bytes_read;
  Bytes first(30);
  Bytes rest(1000 + 200 - 30);
  const std::vector<DiskRange> ranges = {{kDiskPieceBytes - 500, 1000}, {4 * kDiskPieceBytes + 50, 200}};
  const DiskTicket ticket =
      rig.store->core->read({{6, 2, ranges, {std::span(first), std::span(rest)}}}, kNoDeadline, {});
  rig.store->run();
  REQUIRE(ticket->status(0) == DiskStatus::kOk);
  Bytes found = first;
  found.insert(found.end(), rest.begin(), rest.end());
  Bytes expected(whole.begin() + kDiskPieceBytes - 500, whole.begin() + kDiskPieceBytes + 500);
  expected.insert(expected.end(), whole.begin() + 4 * kDiskPieceBytes + 50, whole.begin() + 4 * kDiskPieceBytes + 250);
  CHECK(found == expected);
  CHECK(rig.store->core->counters().bytes_read - before == 2 * kDiskPieceBytes + kDiskAlignment);
}

TEST_CASE("a rotten block on disk is told, counted, and never served") {
  constexpr std::size_t kBytes = 2 * kDiskPieceBytes;
  Rig rig(kBytes);
  rig.put(0, 1);
  rig.put(1, 1);
  rig.disk->bytes_of("kvpool.blocks")[kDiskAlignment + kBytes + kDiskPieceBytes + 77] ^= std::byte{4};
  Bytes content(kBytes, std::byte{0xEE});
  const DiskTicket ticket = rig.store->read(1, 1, content);
  rig.store->run();
  CHECK(ticket->status(0) == DiskStatus::kCorrupt);
  CHECK(
      std::all_of(content.begin() + kDiskPieceBytes, content.end(), [](std::byte b) { return b == std::byte{0xEE}; }));
  CHECK(rig.store->core->counters().corrupt == 1);
  CHECK(rig.get(0, 1) == DiskStatus::kOk);
  // A range in the sound piece is still there.
  Bytes part(100);
  const DiskTicket sound = rig.store->core->read({{1, 1, {{0, 100}}, {std::span(part)}}}, kNoDeadline, {});
  rig.store->run();
  CHECK(sound->status(0) == DiskStatus::kOk);
  CHECK(rig.store->core->health().on);
}

TEST_CASE("a block that the drive has put into another slot is not taken for the one that was there") {
  Rig rig(kDiskAlignment);
  rig.put(0, 1);
  rig.put(1, 1);
  Bytes& file = rig.disk->bytes_of("kvpool.blocks");
  std::copy_n(file.begin() + kDiskAlignment, kDiskAlignment, file.begin() + 2 * kDiskAlignment);
  CHECK(rig.get(1, 1) == DiskStatus::kCorrupt);
}

TEST_CASE("a cancelled write to disk gives its slot back, and one that has started goes on") {
  Rig rig;
  HeldEngine& held = rig.store->hold();
  const EntryWrite first(1, 1, kBlock);
  const EntryWrite second(2, 1, kBlock);
  const DiskTicket started = rig.store->write(first);
  REQUIRE(rig.store->core->dispatch());
  const DiskTicket waiting = rig.store->write(second);
  started->cancel();
  waiting->cancel();
  CHECK(waiting->completion().done());
  CHECK(waiting->status(0) == DiskStatus::kCancelled);
  CHECK_FALSE(started->completion().done());
  held.release();
  rig.store->run();
  held.release();
  CHECK(started->status(0) == DiskStatus::kOk);
  const EntryWrite again(2, 2, kBlock);
  const DiskTicket ticket = rig.store->write(again);
  rig.store->core->dispatch();
  held.release();
  rig.store->core->commit();
  CHECK(ticket->status(0) == DiskStatus::kOk);
}

TEST_CASE("a write to disk whose caller has given up leaves no entry, and its slot waits for the drive") {
  Rig rig;
  HeldEngine& held = rig.store->hold();
  const EntryWrite first(1, 1, kBlock);
  const DiskTicket given_up = rig.store->write(first);
  REQUIRE(rig.store->core->dispatch());
  given_up->abandon();
  CHECK(given_up->status(0) == DiskStatus::kCancelled);
  const EntryWrite second(1, 2, kBlock);
  const DiskTicket ticket = rig.store->write(second);
  CHECK_FALSE(rig.store->core->dispatch());
  held.release();
  CHECK(rig.store->core->dispatch());
  held.release();
  rig.store->core->commit();
  CHECK(ticket->status(0) == DiskStatus::kOk);
  CHECK(rig.store->core->counters().entries == 1);
}

TEST_CASE("a read from disk that comes after its deadline touches nothing of its caller") {
  Rig rig;
  rig.put(1, 1);
  HeldEngine& held = rig.store->hold();
  Bytes content(kBlock, std::byte{0x11});
  const std::int64_t now = monotonic_ns();
  const DiskTicket ticket = rig.store->core->read({{1, 1, {}, {std::span(content)}}}, now + 1000, {});
  REQUIRE(rig.store->core->dispatch());
  rig.store->core->watch(now + 2000);
  REQUIRE(ticket->completion().done());
  CHECK(ticket->status(0) == DiskStatus::kDeadline);
  CHECK(rig.store->core->health().on);
  held.release();
  CHECK(content == Bytes(kBlock, std::byte{0x11}));
  CHECK(rig.store->core->counters().deadlines == 1);
}

TEST_CASE("I/O that hangs switches the store on disk off, and all that is pending ends") {
  Rig rig;
  rig.put(1, 1);
  HeldEngine& held = rig.store->hold();
  Bytes content(kBlock);
  const DiskTicket hung = rig.store->read(1, 1, content);
  REQUIRE(rig.store->core->dispatch());
  const EntryWrite entry(2, 1, kBlock);
  const DiskTicket waiting = rig.store->write(entry);
  rig.store->core->watch(monotonic_ns() + rig.options.hang_ns / 2);
  CHECK(rig.store->core->health().on);
  rig.store->core->watch(monotonic_ns() + 2 * rig.options.hang_ns);
  CHECK(rig.store->core->health().fault == DiskFault::kHung);
  CHECK(hung->status(0) == DiskStatus::kOff);
  CHECK(waiting->status(0) == DiskStatus::kOff);
  held.release();
  CHECK(rig.get(1, 1) == DiskStatus::kOff);
  CHECK(content == Bytes(kBlock));
}

TEST_CASE("what is wrong with an operation on disk is told before anything starts") {
  Rig rig;
  rig.put(1, 1);
  StoreCore& core = *rig.store->core;
  Bytes some(kBlock);
  const EntryWrite taken(1, 2, kBlock);
  const EntryWrite other(2, 2, kBlock);
  const EntryWrite outside(8, 2, kBlock);
  CHECK(code_of([&] { core.write({other.write, taken.write}, kNoDeadline, {}); }) == ErrorCode::kState);
  CHECK(code_of([&] { core.write({other.write, other.write}, kNoDeadline, {}); }) == ErrorCode::kState);
  CHECK(code_of([&] { core.write({outside.write}, kNoDeadline, {}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { core.write({{3, 1, {}, {std::span(some).first(10)}}}, kNoDeadline, {}); }) ==
        ErrorCode::kArgument);
  CHECK(code_of([&] { core.write({{3, 1, {}, {some, some}}}, kNoDeadline, {}); }) == ErrorCode::kArgument);
  const Bytes meta(kDiskMetaBytesMax + 1);
  CHECK(code_of([&] { core.write({{3, 1, meta, {some}}}, kNoDeadline, {}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { core.read({{1, 1, {{kBlock, 1}}, {std::span(some).first(1)}}}, kNoDeadline, {}); }) ==
        ErrorCode::kArgument);
  CHECK(code_of([&] { core.read({{1, 1, {{1, ~std::uint64_t{0}}}, {some}}}, kNoDeadline, {}); }) ==
        ErrorCode::kArgument);
  CHECK(code_of([&] { core.read({{1, 1, {{0, 10}}, {some}}}, kNoDeadline, {}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { core.read({{1, 1, {}, {std::span(some).first(10)}}}, kNoDeadline, {}); }) ==
        ErrorCode::kArgument);
  CHECK(code_of([&] { core.erase({{1, 1}, {1, 1}}, kNoDeadline, {}); }) == ErrorCode::kState);
  CHECK(code_of([&] { core.erase({{1, 2}}, kNoDeadline, {}); }) == ErrorCode::kState);
  CHECK_FALSE(core.commit());
  CHECK(rig.get(1, 1) == DiskStatus::kOk);
  rig.put(2, 2);
  CHECK(core.counters().entries == 2);
}

TEST_CASE("a journal on disk stays bounded") {
  Rig rig;
  rig.store.reset();
  rig.options.journal_bytes_min = 4096;
  rig.store = std::make_unique<SteppedStore>(rig.options, rig.disk);
  for (std::uint32_t generation = 1; generation <= 300; ++generation) {
    rig.put(generation % 8, generation);
    rig.store->erase(generation % 8, generation);
    rig.store->run();
    CHECK(rig.store->core->counters().journal_bytes < 3 * 4096);
  }
  CHECK(rig.store->core->counters().compactions > 5);
}

TEST_CASE("a full disk, or a quota, keeps a store from being compacted, and nothing else") {
  for (const int error : {ENOSPC, EDQUOT}) {
    Rig rig;
    rig.store.reset();
    rig.options.journal_bytes_min = 2048;
    rig.store = std::make_unique<SteppedStore>(rig.options, rig.disk);
    bool full = true;
    rig.disk->fault = [&](PowerDisk::Call call, const std::string& name) {
      return full && call == PowerDisk::Call::kWrite && name == kSnapshotInMaking ? error : 0;
    };
    std::uint32_t generation = 0;
    const auto turn_over = [&] {
      for (int i = 0; i < 200; ++i) {
        rig.put(0, ++generation);
        rig.store->erase(0, generation);
        rig.store->run();
      }
    };
    turn_over();
    CHECK(rig.store->core->counters().compactions == 0);
    CHECK(rig.store->core->health().on);
    full = false;
    turn_over();
    CHECK(rig.store->core->counters().compactions > 0);
    rig.put(0, 1000);
    rig.store.reset();
    rig.store = std::make_unique<SteppedStore>(rig.options, rig.disk);
    CHECK(rig.get(0, 1000) == DiskStatus::kOk);
  }
}

}  // namespace
}  // namespace kvpool::testing
