// Makes changes durable: appends them to a file. From time to time it begins another file and folds the older ones into
// a snapshot, so that all of them together stay about as large as two snapshots.
//
//   kvpool.snapshot.7   what journals before 7 say
//   kvpool.journal.7    closed: folded with the snapshot into kvpool.snapshot.8, then both are removed
//   kvpool.journal.8    changes are appended here
//
// Folding reads closed files and nothing else, so changes go on meanwhile. An opened store never appends to a file that
// it found: behind the last sound record may be more of them, which were never acknowledged.
//
// Thread-safety: append() and rotate() in one thread, fold() in another; the rest: all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/disk/files.h"
#include "kvpool/disk/log_state.h"
#include "kvpool/disk/records.h"

namespace kvpool {

class Journal {
 public:
  // Makes the first file, durable but for its name. Returns 0 or an errno.
  static int make_first(DiskDirectory& directory, const DiskId& store);

  // Goes on behind what was read: makes durable what was found, removes what is superseded, and begins a file; on a
  // full disk it begins none, and wants_rotation(). Throws kStoreFailed (errno).
  Journal(std::shared_ptr<DiskDirectory> directory, const DiskId& store, const LogState& found,
          std::uint64_t bytes_min);

  // Durable when it returns 0; else an errno, and the journal must not be used again. REQUIRES: rotate() was called if
  // it was wanted. Throws std::bad_alloc.
  int append(std::span<const Record> records);

  bool wants_rotation() const noexcept;
  // Begins another file; then wants_fold(). Returns 0 or an errno.
  int rotate();
  bool wants_fold() const noexcept { return fold_wanted_.load(); }
  // Returns 0 or an errno. ENOSPC (a full disk, or a quota): the files are as before, and it is tried again when they
  // have doubled.
  int fold();

  std::uint64_t bytes() const noexcept { return old_bytes_ + current_bytes_ + snapshot_bytes_; }

 private:
  static int make_file(DiskDirectory& directory, const LogHeader& header, const std::string& name,
                       std::unique_ptr<DiskFile>& file);
  int write_snapshot(const LogState& state, std::uint64_t number, std::uint64_t& bytes);
  int remove_before(std::uint64_t number);

  const std::shared_ptr<DiskDirectory> directory_;
  const DiskId store_;
  const std::uint32_t slots_;
  const std::uint64_t bytes_min_;
  std::unique_ptr<DiskFile> file_;  // null: the disk was full when it was opened
  LogHeader header_;                // of file_
  std::uint64_t next_sequence_;
  std::vector<std::byte> encoded_;
  std::atomic<std::uint64_t> number_;  // of file_
  std::atomic<std::uint64_t> current_bytes_{0};
  std::atomic<std::uint64_t> old_bytes_;
  std::atomic<std::uint64_t> snapshot_bytes_;
  std::atomic<std::uint64_t> retry_bytes_{0};
  std::atomic<bool> fold_wanted_{false};
};

}  // namespace kvpool
