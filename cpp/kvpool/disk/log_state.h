// What the newest snapshot and the journals behind it say together: which slot holds which entry.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/disk/files.h"
#include "kvpool/disk/records.h"

namespace kvpool {

std::string journal_name(std::uint64_t number);
std::string snapshot_name(std::uint64_t number);
inline constexpr const char* kSnapshotInMaking = "kvpool.snapshot.new";

// Their numbers, ascending.
struct LogFiles {
  std::vector<std::uint64_t> journals;
  std::vector<std::uint64_t> snapshots;
};
LogFiles log_files_of(const std::vector<std::string>& names);

class LogReader;

class LogState {
 public:
  LogState(const DiskId& store, std::uint32_t slots) : store_(store), records_(slots) {}

  // Reads the newest snapshot and the journals from it on, but for those of number `end` and above. A journal's records
  // end at the first one that is not sound: behind it is what was never acknowledged. Throws kState (cause kDamaged),
  // kStoreFailed (errno), std::bad_alloc.
  void read(DiskDirectory& directory, const LogFiles& files, std::uint64_t end);

  std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(records_.size()); }
  std::uint32_t entries() const noexcept { return entries_; }
  bool holds(std::uint32_t slot) const noexcept { return records_[slot] != nullptr; }
  // REQUIRES: holds(slot). Valid as long as this object.
  Record record(std::uint32_t slot) const noexcept;

  std::uint64_t next_sequence() const noexcept { return next_sequence_; }
  std::uint64_t snapshot() const noexcept { return snapshot_; }  // its number; 0: no snapshot
  std::uint64_t snapshot_bytes() const noexcept { return snapshot_bytes_; }
  const std::vector<std::uint64_t>& journals() const noexcept { return journals_; }
  std::uint64_t journal_bytes() const noexcept { return journal_bytes_; }  // of all of them
  // Files whose making was interrupted, before anything was in them.
  const std::vector<std::uint64_t>& unmade() const noexcept { return unmade_; }

 private:
  LogHeader header_of(LogReader& reader, LogKind kind, std::uint64_t number) const;
  void read_snapshot(DiskDirectory& directory, std::uint64_t number);
  void read_journal(DiskDirectory& directory, std::uint64_t number);
  void apply(const LogReader& reader, const Record& record);

  DiskId store_;
  std::vector<std::shared_ptr<std::byte[]>> contents_;  // what records_ points into
  std::vector<const std::byte*> records_;               // by slot, in contents_
  std::uint32_t entries_ = 0;
  std::uint64_t next_sequence_ = 1;
  std::uint64_t snapshot_ = 0;
  std::uint64_t snapshot_bytes_ = 0;
  std::uint64_t journal_bytes_ = 0;
  std::vector<std::uint64_t> journals_;
  std::vector<std::uint64_t> unmade_;
};

}  // namespace kvpool
