// What the tests of a store on disk have in common: content that says where it belongs, and a store that goes step by
// step in one thread.
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/disk/core.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/open_store.h"

namespace kvpool::testing {

inline constexpr std::int64_t kNoDeadline = std::numeric_limits<std::int64_t>::max();

inline constexpr std::int64_t kDiskMinuteNs = 60'000'000'000;
inline std::int64_t in_a_minute_ns() { return monotonic_ns() + kDiskMinuteNs; }

// Of the first operation of a batch, when it has ended.
inline DiskStatus status_of(const DiskTicket& ticket) {
  ticket->completion().sleep_until(in_a_minute_ns());
  return ticket->status(0);
}

inline DiskOptions disk_options(const std::string& path, std::uint32_t slots, std::uint64_t block_bytes) {
  DiskOptions options;
  options.path = path;
  options.slots = slots;
  options.block_bytes = block_bytes;
  options.format = {{"layout", "2 layers"}, {"model", "tiny"}};
  options.read_depth = 4;
  options.write_depth = 2;
  return options;
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvpool-disk-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

using Bytes = std::vector<std::byte>;

// Of an entry: differs from that of all others, in every 8 bytes.
inline Bytes content_of(std::uint32_t slot, std::uint64_t generation, std::size_t bytes) {
  Bytes content(bytes);
  std::uint64_t word = (std::uint64_t{slot} << 40) + (generation << 20);
  for (std::size_t i = 0; i < bytes; ++i) {
    const std::uint64_t mixed = (word + i / 8) * 0x9E3779B97F4A7C15;
    content[i] = static_cast<std::byte>(mixed >> (8 * (i % 8)));
  }
  return content;
}

inline Bytes meta_of(std::uint32_t slot, std::uint64_t generation) {
  return content_of(slot + 1000, generation, (slot * 7 + generation * 13) % 90);
}

// A write of content_of() and meta_of(), with the memory that it needs until it has ended.
struct EntryWrite {
  EntryWrite(std::uint32_t slot, std::uint64_t generation, std::size_t bytes)
      : content(content_of(slot, generation, bytes)),
        meta(meta_of(slot, generation)),
        write{slot, generation, meta, {std::span(content).first(bytes / 3), std::span(content).subspan(bytes / 3)}} {}
  EntryWrite(const EntryWrite&) = delete;
  EntryWrite& operator=(const EntryWrite&) = delete;

  Bytes content;
  Bytes meta;
  DiskWrite write;
};

// Carries I/O out in the thread that submits it.
class InlineEngine final : public IoEngine {
 public:
  InlineEngine(DiskFile& file, DiskIoSink& sink) : file_(file), sink_(sink) {}
  void submit(DiskIo& io) noexcept override {
    sink_.io_done(io, io.write ? write_all(file_, io.offset, io.buffer, io.bytes)
                               : read_all(file_, io.offset, io.buffer, io.bytes));
  }
  const char* name() const noexcept override { return "inline"; }
  bool stop(std::int64_t /*until_ns*/) noexcept override { return true; }

 private:
  DiskFile& file_;
  DiskIoSink& sink_;
};

// I/O that waits until the test lets it go.
class HeldEngine final : public IoEngine {
 public:
  HeldEngine(DiskFile& file, DiskIoSink& sink) : inline_(file, sink) {}
  void submit(DiskIo& io) noexcept override { held.push_back(&io); }
  const char* name() const noexcept override { return "held"; }
  bool stop(std::int64_t /*until_ns*/) noexcept override { return true; }
  void release() {
    for (DiskIo* const io : std::exchange(held, {})) inline_.submit(*io);
  }
  std::vector<DiskIo*> held;

 private:
  InlineEngine inline_;
};

// A store without threads.
struct SteppedStore {
  SteppedStore(const DiskOptions& options, const std::shared_ptr<DiskDirectory>& directory) {
    OpenedStore opened = open_store(options, directory);
    found = std::move(opened.found);
    core = std::make_shared<StoreCore>(options, directory, std::move(opened), *found);
    core->use(std::make_unique<InlineEngine>(core->file(), *core));
  }
  ~SteppedStore() { core->close(); }
  SteppedStore(const SteppedStore&) = delete;
  SteppedStore& operator=(const SteppedStore&) = delete;
  HeldEngine& hold() {
    auto engine = std::make_unique<HeldEngine>(core->file(), *core);
    HeldEngine& held = *engine;
    core->use(std::move(engine));
    return held;
  }
  void run() {
    for (bool more = true; more;) {
      more = core->dispatch();
      more = core->commit() || more;
      more = core->fold() || more;
    }
  }
  DiskTicket write(const EntryWrite& entry) { return core->write({entry.write}, kNoDeadline, {}); }
  DiskTicket erase(std::uint32_t slot, std::uint64_t generation) {
    return core->erase({{slot, generation}}, kNoDeadline, {});
  }
  DiskTicket read(std::uint32_t slot, std::uint64_t generation, Bytes& into) {
    return core->read({{slot, generation, {}, {std::span(into)}}}, kNoDeadline, {});
  }

  std::unique_ptr<LogState> found;
  std::shared_ptr<StoreCore> core;
};

}  // namespace kvpool::testing
