#include "kvpool/disk/log_state.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "kvpool/base/error.h"
#include "kvpool/disk/log_reader.h"

namespace kvpool {
namespace {

constexpr std::string_view kJournalPrefix = "kvpool.journal.";
constexpr std::string_view kSnapshotPrefix = "kvpool.snapshot.";

[[noreturn]] void throw_damaged(const std::string& name, const std::string& how) {
  throw Error(ErrorCode::kState, "the store on disk is damaged: " + name + " " + how +
                                     ". Nothing was changed; remove its files to begin with an empty store")
      .because(ErrorCause::kDamaged);
}

// Whether the name is the prefix and a number, as journal_name() writes it.
bool is_numbered(const std::string& name, std::string_view prefix, std::uint64_t& number) {
  if (name.size() <= prefix.size() || name.compare(0, prefix.size(), prefix) != 0) return false;
  const char* const end = name.data() + name.size();
  const auto [stopped, error] = std::from_chars(name.data() + prefix.size(), end, number);
  return error == std::errc() && stopped == end && number > 0;
}

// The header lies in one sector: it is not there, or is cut off, if power was lost while the file was being made.
bool is_unmade(DiskDirectory& directory, const std::string& name) {
  const std::optional<LogHeader> header = LogReader(directory, name).header();
  if (!header) return true;
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&*header, 1));
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

std::string journal_name(std::uint64_t number) { return std::string(kJournalPrefix) + std::to_string(number); }
std::string snapshot_name(std::uint64_t number) { return std::string(kSnapshotPrefix) + std::to_string(number); }

LogFiles log_files_of(const std::vector<std::string>& names) {
  LogFiles files;
  for (const std::string& name : names) {
    std::uint64_t number = 0;
    if (is_numbered(name, kJournalPrefix, number)) files.journals.push_back(number);
    if (is_numbered(name, kSnapshotPrefix, number)) files.snapshots.push_back(number);
  }
  std::sort(files.journals.begin(), files.journals.end());
  std::sort(files.snapshots.begin(), files.snapshots.end());
  return files;
}

void LogState::read(DiskDirectory& directory, const LogFiles& files, std::uint64_t end) {
  if (!files.snapshots.empty()) read_snapshot(directory, files.snapshots.back());
  for (const std::uint64_t number : files.journals) {
    if (number >= snapshot_ && number < end) read_journal(directory, number);
  }
  if (journals_.empty()) throw_damaged(journal_name(std::max<std::uint64_t>(snapshot_, 1)), "is missing");
}

Record LogState::record(std::uint32_t slot) const noexcept {
  const std::byte* const at = records_[slot];
  RecordHead head;
  std::memcpy(&head, at, sizeof(head));
  const std::span<const std::byte> checksums(at + sizeof(head), head.pieces * sizeof(std::uint32_t));
  return {head.change, head.slot, head.generation, checksums, {at + sizeof(head) + checksums.size(), head.meta_bytes}};
}

LogHeader LogState::header_of(LogReader& reader, LogKind kind, std::uint64_t number) const {
  const std::optional<LogHeader> header = reader.header();
  if (!header) throw_damaged(reader.name(), "has no header");
  if (!is_sound(*header) || header->kind != kind || header->number != number) {
    throw_damaged(reader.name(), "has a wrong header");
  }
  if (header->store != store_) throw_damaged(reader.name(), "belongs to another store");
  return *header;
}

void LogState::read_snapshot(DiskDirectory& directory, std::uint64_t number) {
  LogReader reader(directory, snapshot_name(number));
  const LogHeader header = header_of(reader, LogKind::kSnapshot, number);
  snapshot_ = number;
  snapshot_bytes_ = reader.bytes();
  for (std::uint64_t i = 1; i <= header.records; ++i) {
    const auto found = reader.next(header, i);
    if (!found) throw_damaged(reader.name(), "has a wrong checksum");
    apply(reader, *found);
  }
  next_sequence_ = header.first_sequence;
}

void LogState::read_journal(DiskDirectory& directory, std::uint64_t number) {
  if (is_unmade(directory, journal_name(number))) {
    unmade_.push_back(number);
    return;
  }
  LogReader reader(directory, journal_name(number));
  const LogHeader header = header_of(reader, LogKind::kJournal, number);
  if (header.first_sequence != next_sequence_) throw_damaged(reader.name(), "does not follow the file before it");
  journals_.push_back(number);
  journal_bytes_ += reader.bytes();
  while (const auto found = reader.next(header, next_sequence_)) {
    apply(reader, *found);
    ++next_sequence_;
  }
}

void LogState::apply(const LogReader& reader, const Record& record) {
  if (record.slot >= records_.size()) throw_damaged(reader.name(), "names a slot that is not there");
  if (contents_.empty() || contents_.back() != reader.memory()) contents_.push_back(reader.memory());
  const std::byte*& place = records_[record.slot];
  entries_ -= place != nullptr ? 1 : 0;
  place = record.change == Change::kPut ? reader.at() : nullptr;
  entries_ += place != nullptr ? 1 : 0;
}

}  // namespace kvpool
