// Reads a journal or a snapshot record by record, in pieces: a file that claims to be huge takes no more memory than
// its sound records do, and a piece.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kvpool/disk/files.h"
#include "kvpool/disk/records.h"

namespace kvpool {

class LogReader {
 public:
  // Opens the file. Throws kStoreFailed (errno), as the others do.
  LogReader(DiskDirectory& directory, std::string name);

  const std::string& name() const noexcept { return name_; }
  std::uint64_t bytes() const noexcept { return bytes_; }  // of the file
  // As it lies at the begin of the file, unchecked; nothing: the file is shorter. Before the first next().
  std::optional<LogHeader> header();
  // The next record; nothing: no sound one with this sequence number follows. Throws std::bad_alloc, too.
  std::optional<Record> next(const LogHeader& header, std::uint64_t sequence);
  // The record that next() gave last, and the memory that it lies in.
  const std::byte* at() const noexcept { return at_; }
  const std::shared_ptr<std::byte[]>& memory() const noexcept { return memory_; }

 private:
  bool read_more();
  void read(std::byte* to, std::size_t bytes);

  const std::string name_;
  std::unique_ptr<DiskFile> file_;
  std::uint64_t bytes_ = 0;
  std::uint64_t offset_ = 0;  // up to which it was read
  std::shared_ptr<std::byte[]> memory_;
  std::span<const std::byte> rest_;  // in memory_: behind the last record
  const std::byte* at_ = nullptr;
};

}  // namespace kvpool
