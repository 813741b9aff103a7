// Which cached pages have a copy on disk, in which slot, and what is still to be done about it.
//
// A slot is a block of DISK. Either the page itself lies there: the index has the slot's address. Or the slot is the
// copy of a page that lies in HBM or DRAM.
//
// Invariants
//   A18  A page with a slot has slots of all pages before it in its prompt. So what is on disk can be found after a
//       restart, and a page without a slot that is dropped takes none with it.
//   A19  A slot that is a copy is historical, has kCacheTag, and its mark names the block where the page lies.
//   A20  A slot that is being written, or whose write has not been committed, is reserved. Its mark names the block
//       where the page lies, which may move meanwhile; it is 0 once the page is gone.
//
// Thread-safety: none; callers hold the lock of the space.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/index/token_run.h"
#include "kvpool/pool/disk_admission.h"
#include "kvpool/pool/disk_record.h"

namespace kvpool {

class DiskCopies {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  static constexpr std::size_t kWantedMax = 1 << 14;

  // `blocks`: the capacity of each medium. Throws std::bad_alloc.
  DiskCopies(const MediumMap<std::uint32_t>& blocks, DiskAdmission admission)
      : admission_(admission), generations_(blocks[Medium::kDisk], 0), scratch_(kScratch), old_(kScratch) {
    for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
      slots_[medium].assign(blocks[medium], kNone);
      written_[medium].assign(blocks[medium], kNone);
    }
    erased_.reserve(blocks[Medium::kDisk]);
  }

  DiskAdmission admission() const noexcept { return admission_; }

  // The slot of the copy of a page that lies in HBM or DRAM; kNone: it has none.
  std::uint32_t slot_of(Address address) const noexcept { return slots_[medium_of(address)][block_of(address)]; }
  // Whether a page that lies here has a slot.
  bool on_disk(Address address) const noexcept {
    return medium_of(address) == Medium::kDisk || slot_of(address) != kNone;
  }
  void set(Address address, std::uint32_t slot) noexcept {
    slots_[medium_of(address)][block_of(address)] = slot;
    ++count_;
  }
  // REQUIRES: it has a copy.
  std::uint32_t take(Address address) noexcept {
    --count_;
    return std::exchange(slots_[medium_of(address)][block_of(address)], kNone);
  }
  std::uint32_t count() const noexcept { return count_; }  // copies

  // The slot to which a page that lies in HBM or DRAM is being written; kNone: to none.
  std::uint32_t written_to(Address address) const noexcept { return written_[medium_of(address)][block_of(address)]; }
  bool being_written(Address address) const noexcept {
    return medium_of(address) != Medium::kDisk && written_to(address) != kNone;
  }
  void set_written_to(Address address, std::uint32_t slot) noexcept {
    written_[medium_of(address)][block_of(address)] = slot;
  }

  // Of the entry in a slot, as the store knows it; 0: it has none, or it is to be erased.
  std::uint64_t generation(std::uint32_t slot) const noexcept { return generations_[slot]; }
  void set_generation(std::uint32_t slot, std::uint64_t generation) noexcept {
    generations_[slot] = generation;
    last_generation_ = generation > last_generation_ ? generation : last_generation_;
  }
  // From 1 on. 64 bits do not come round: a directory would take 2^64 writes.
  std::uint64_t next_generation() noexcept { return ++last_generation_; }

  // The entry in this slot, if it has one, is to be erased. Before the slot is written again, take_erased() is called.
  void erase(std::uint32_t slot) noexcept {
    const std::uint64_t generation = std::exchange(generations_[slot], 0);
    if (generation == 0) return;            // it was told before: a pinned page was forgotten
    erased_.push_back({slot, generation});  // there is room: each slot stands there once
    work_.notify_all();
  }
  std::vector<DiskErase> take_erased() {
    std::vector<DiskErase> erased(erased_);
    erased_.clear();
    return erased;
  }
  // What the store did not take: without it, no later write to these slots succeeds.
  void put_back(const std::vector<DiskErase>& erased) noexcept {
    erased_.insert(erased_.end(), erased.begin(), erased.end());  // there is room, as above
  }
  bool has_erased() const noexcept { return !erased_.empty(); }

  // A prompt that ends with this page is worth a look: it may have pages to write. The oldest are forgotten when there
  // are too many.
  void want(Address last) noexcept {
    if (!wanted_.empty() && wanted_.back() == last) return;
    try {
      wanted_.push_back(last);
    } catch (const std::bad_alloc&) {
      return;  // it is looked at when it is used again
    }
    if (wanted_.size() > kWantedMax) wanted_.pop_front();
    work_.notify_all();
  }
  Address next_wanted() noexcept {
    if (wanted_.empty()) return 0;
    const Address last = wanted_.front();
    wanted_.pop_front();
    return last;
  }
  bool has_wanted() const noexcept { return !wanted_.empty(); }
  // Signalled with the space's lock held when there is something to write or to erase.
  std::condition_variable& work() noexcept { return work_; }

  // Room for the addresses of a node that moves to DISK.
  static constexpr std::size_t kScratch = 4096;
  Address* scratch() noexcept { return scratch_.data(); }
  Address* old() noexcept { return old_.data(); }

 private:
  const DiskAdmission admission_;
  MediumMap<std::vector<std::uint32_t>> slots_;
  MediumMap<std::vector<std::uint32_t>> written_;
  std::vector<std::uint64_t> generations_;
  std::uint64_t last_generation_ = 0;
  std::uint32_t count_ = 0;
  std::vector<DiskErase> erased_;
  std::deque<Address> wanted_;
  std::condition_variable work_;
  std::vector<Address> scratch_;
  std::vector<Address> old_;
};

// A page that is to be written: where it lies, and where its entry goes.
struct DiskPage {
  Address from;
  Address slot;
  std::uint64_t generation;
  std::optional<DiskPlace> parent;  // of the page before it in its prompt; none: it is the first
};

// Pages of one prompt, one after another, that are to be written.
struct DiskPages {
  std::string name_space;
  std::vector<Token> tokens;
  std::vector<DiskPage> pages;
  std::size_t looked = 0;  // how many pages of the prompt were looked at
  bool waits = false;      // for a page that is being written: what continues it can be chosen then
};

}  // namespace kvpool
