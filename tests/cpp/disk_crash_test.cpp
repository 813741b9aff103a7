// Loss of power and kills at every point: what was acknowledged is there, with its bytes, and nothing else.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "disk_kit.h"
#include "fuzz_seeds.h"
#include "kvpool/base/failure.h"
#include "power_disk.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

using Entry = std::optional<std::uint64_t>;  // a slot's generation, or nothing

// What a slot may hold after a loss of power now.
struct SlotModel {
  std::set<Entry> possible{Entry()};
  Entry live;              // as the running store sees it
  bool writing = false;    // a write has not ended
  std::uint64_t next = 0;  // its generation
};

class CrashWorld {
 public:
  explicit CrashWorld(std::uint64_t seed) : dice_(seed), options_(disk_options("memory", kSlots, block_bytes(seed))) {
    options_.journal_bytes_min = 1200;  // so that it is compacted again and again
    options_.io_bytes_max = kDiskPieceBytes;
    models_.resize(kSlots);
  }

  // A store lives, loses power or is killed at some point, and is opened again.
  void live_once() {
    lost_ = nullptr;
    changes_left_ = dice_.below(120);
    disk_->changed = [this] { on_change(); };
    try {
      SteppedStore store(options_, disk_);
      opened_ = true;
      take_as_true(*store.found);
      while (lost_ == nullptr) step(store);
    } catch (const Error& error) {  // the power was lost while it opened
      if (lost_ == nullptr) throw;
    }
    pending_.clear();
    disk_->changed = nullptr;
    disk_ = std::move(lost_);
    opened_ = false;
    for (SlotModel& model : models_) model.writing = false;
  }

  int crashes() const { return crashes_; }

 private:
  static constexpr std::uint32_t kSlots = 6;
  static std::uint64_t block_bytes(std::uint64_t seed) { return seed % 2 == 0 ? 5000 : kDiskPieceBytes + 700; }

  void step(SteppedStore& store) {
    StoreCore& core = *store.core;
    switch (dice_.below(8)) {
      case 0:
      case 1:
        return write(store);
      case 2:
        return erase(store);
      case 3:
        core.commit();
        return;
      case 4:
        core.fold();
        return;
      case 5:
        return read(store);
      case 6:
        if (dice_.one_in(6) && !pending_.empty()) DiskTicket(dice_.pick(pending_)->ticket)->cancel();
        return;
      default:
        core.dispatch();
    }
  }

  struct Pending {
    std::vector<std::unique_ptr<EntryWrite>> entries;
    DiskTicket ticket;
  };

  void write(SteppedStore& store) {
    auto pending = std::make_shared<Pending>();
    std::vector<DiskWrite> writes;
    for (std::uint32_t slot = dice_.below(kSlots), end = slot + 1 + dice_.below(3); slot < std::min(end, kSlots);
         ++slot) {
      SlotModel& model = models_[slot];
      if (model.live || model.writing) break;
      model.writing = true;
      model.next = ++generation_;
      model.possible.insert(model.next);
      pending->entries.push_back(std::make_unique<EntryWrite>(slot, model.next, options_.block_bytes));
      writes.push_back(pending->entries.back()->write);
    }
    if (writes.empty()) return;
    pending_.insert(pending);
    pending->ticket = store.core->write(writes, kNoDeadline, [this, pending](DiskBatch& batch) {
      pending_.erase(pending);
      if (lost_ == nullptr) on_written(*pending, batch);
    });
  }

  void on_written(const Pending& pending, DiskBatch& batch) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      SlotModel& model = models_[pending.entries[i]->write.slot];
      const std::uint64_t generation = pending.entries[i]->write.generation;
      model.writing = false;
      if (batch.status(i) == DiskStatus::kOk) {
        model.possible = {Entry(generation)};
        model.live = generation;
      } else {
        CHECK(batch.status(i) == DiskStatus::kCancelled);
        model.possible.erase(Entry(generation));
      }
    }
  }

  void erase(SteppedStore& store) {
    const std::uint32_t slot = dice_.below(kSlots);
    SlotModel& model = models_[slot];
    if (!model.live) return;
    const std::uint64_t generation = *model.live;
    model.live.reset();
    model.possible.insert(Entry());
    store.core->erase({{slot, generation}}, kNoDeadline, [this, slot, generation](DiskBatch& batch) {
      if (lost_ != nullptr) return;
      CHECK(batch.status(0) == DiskStatus::kOk);
      models_[slot].possible.erase(Entry(generation));
    });
  }

  void read(SteppedStore& store) {
    const std::uint32_t slot = dice_.below(kSlots);
    if (models_[slot].live) check_content(store, slot, *models_[slot].live);
  }

  void check_content(SteppedStore& store, std::uint32_t slot, std::uint64_t generation) {
    Bytes content(options_.block_bytes);
    const DiskTicket ticket = store.read(slot, generation, content);
    while (!ticket->completion().done() && store.core->dispatch()) continue;
    if (lost_ != nullptr && opened_) return;
    CHECK(ticket->completion().done());
    CHECK(std::string(disk_status_name(ticket->status(0))) == "ok");
    CHECK(content == content_of(slot, generation, options_.block_bytes));
  }

  // After each change of the files: what would be there? Throws nothing: the store above calls it where it may not.
  void on_change() {
    if (lost_ != nullptr) return;
    const auto changed = std::exchange(disk_->changed, nullptr);
    check_crash(disk_->after_power_loss(dice_));
    if (dice_.one_in(4)) check_crash(disk_->after_kill());
    if (changes_left_-- == 0) {
      lost_ = dice_.one_in(3) ? disk_->after_kill() : disk_->after_power_loss(dice_);
      disk_->cut();
    }
    disk_->changed = changed;
  }

  void check_crash(const std::shared_ptr<PowerDisk>& left) {
    ++crashes_;
    const auto failure = failure_of([&] { check_left(left); });
    if (failure) FAIL_CHECK("it does not open again: " << std::string(failure->what()));
  }

  void check_left(const std::shared_ptr<PowerDisk>& left) {
    SteppedStore store(options_, left);
    const bool opened = std::exchange(opened_, false);
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      const Entry entry = entry_of(*store.found, slot);
      INFO("slot " << slot << " holds " << (entry ? std::to_string(*entry) : "nothing"));
      CHECK(models_[slot].possible.count(entry) == 1);
      if (entry) check_content(store, slot, *entry);
    }
    opened_ = opened;
  }

  static Entry entry_of(const LogState& found, std::uint32_t slot) {
    if (!found.holds(slot)) return Entry();
    const Record record = found.record(slot);
    const Bytes meta = meta_of(slot, record.generation);
    CHECK(std::equal(record.meta.begin(), record.meta.end(), meta.begin(), meta.end()));
    return record.generation;
  }

  // What an opened store has said stays so.
  void take_as_true(const LogState& found) {
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      SlotModel& model = models_[slot];
      const Entry entry = entry_of(found, slot);
      CHECK(model.possible.count(entry) == 1);
      model.possible = {entry};
      model.live = entry;
    }
  }

  Dice dice_;
  DiskOptions options_;
  std::shared_ptr<PowerDisk> disk_ = std::make_shared<PowerDisk>();
  std::shared_ptr<PowerDisk> lost_;  // what is left, once the power was lost
  std::vector<SlotModel> models_;
  std::set<std::shared_ptr<Pending>> pending_;
  std::uint64_t generation_ = 0;
  std::uint32_t changes_left_ = 0;
  bool opened_ = false;  // the store that runs, not one that only looks
  int crashes_ = 0;
};

TEST_CASE("a store on disk has what was acknowledged after a loss of power at any point") {
  int crashes = 0;
  for (const std::uint64_t first : fuzz_seeds()) {
    for (int run = 0; run < model_length(12); ++run) {
      const std::uint64_t seed = first + static_cast<std::uint64_t>(run) * 1000;
      announce_fuzz("disk crash", seed);
      INFO("KVPOOL_SEED=" << seed);
      CrashWorld world(seed);
      for (int life = 0; life < 6; ++life) world.live_once();
      crashes += world.crashes();
      if (given_seeds()) break;
    }
  }
  CHECK(crashes > 0);
  MESSAGE(crashes << " losses of power");
}

// The killed process had written the lock's text, and the next one took it for durable.
TEST_CASE("a kill and then a loss of power while a store on disk is made leave what can be made again") {
  const DiskOptions options = disk_options("memory", 2, 5000);
  const auto opens = [&](const std::shared_ptr<PowerDisk>& disk) {
    return !error_of([&] { SteppedStore store(options, disk); });
  };
  Dice dice(7);
  const auto first = std::make_shared<PowerDisk>();
  first->fault = [](PowerDisk::Call call, const std::string& name) {
    return call == PowerDisk::Call::kFlush && name == "kvpool.lock" ? EIO : 0;
  };
  CHECK_FALSE(opens(first));
  const std::shared_ptr<PowerDisk> second = first->after_kill();
  second->changed = [&] {
    for (int i = 0; i < 20; ++i) CHECK(opens(second->after_power_loss(dice)));
  };
  CHECK(opens(second));
  second->changed = nullptr;
}

}  // namespace
}  // namespace kvpool::testing
