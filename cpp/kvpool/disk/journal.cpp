#include "kvpool/disk/journal.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::size_t kJournalsMax = 8;  // that an opened store leaves unfolded
constexpr std::size_t kWriteBytes = 1 << 20;

LogHeader journal_header(const DiskId& store, std::uint64_t number, std::uint64_t first_sequence) noexcept {
  LogHeader header;
  header.kind = LogKind::kJournal;
  header.store = store;
  header.number = number;
  header.first_sequence = first_sequence;
  return sealed(header);
}

int flush_file(DiskDirectory& directory, const std::string& name) {
  std::unique_ptr<DiskFile> file;
  const int error = directory.open(name, DiskOpen::kThere, file);
  return error != 0 ? error : file->flush();
}

bool is_full(int error) noexcept { return error == ENOSPC || error == EDQUOT; }

void require(int error, const char* what) {
  if (error == 0) return;
  throw Error(ErrorCode::kStoreFailed, std::string(what) + ": " + errno_text(error), {{"errno", error}});
}

}  // namespace

int Journal::make_file(DiskDirectory& directory, const LogHeader& header, const std::string& name,
                       std::unique_ptr<DiskFile>& file) {
  int error = directory.open(name, DiskOpen::kNew, file);
  if (error == 0) error = write_all(*file, 0, reinterpret_cast<const std::byte*>(&header), sizeof(header));
  return error != 0 ? error : file->flush();
}

int Journal::make_first(DiskDirectory& directory, const DiskId& store) {
  std::unique_ptr<DiskFile> file;
  return make_file(directory, journal_header(store, 1, 1), journal_name(1), file);
}

Journal::Journal(std::shared_ptr<DiskDirectory> directory, const DiskId& store, const LogState& found,
                 std::uint64_t bytes_min)
    : directory_(std::move(directory)),
      store_(store),
      slots_(found.slots()),
      bytes_min_(bytes_min),
      next_sequence_(found.next_sequence()),
      number_(found.journals().back()),
      old_bytes_(found.journal_bytes()),
      snapshot_bytes_(found.snapshot_bytes()) {
  // A killed process leaves records and names that are visible and not durable. They count from here on.
  for (const std::uint64_t number : found.journals()) {
    require(flush_file(*directory_, journal_name(number)), "cannot make the journal durable");
  }
  for (const std::uint64_t number : found.unmade()) {
    require(directory_->remove(journal_name(number)), "cannot remove an empty journal");
    number_ = std::max(number_.load(), number);
  }
  require(directory_->flush(), "cannot make the directory durable");
  require(remove_before(found.snapshot()), "cannot remove old files");
  const int error = rotate();
  if (is_full(error)) return;  // what was found can be read; the first change begins the file, or fails
  require(error, "cannot begin a journal");
  fold_wanted_ = old_bytes_ > std::max(bytes_min_, snapshot_bytes_.load()) || found.journals().size() > kJournalsMax;
}

int Journal::append(std::span<const Record> records) {
  encoded_.clear();
  std::uint64_t sequence = next_sequence_;
  for (const Record& record : records) add_record(encoded_, header_, sequence++, record);
  int error = write_all(*file_, current_bytes_, encoded_.data(), encoded_.size());
  if (error == 0) error = file_->flush();
  if (error != 0) return error;
  next_sequence_ = sequence;
  current_bytes_ += encoded_.size();
  return 0;
}

bool Journal::wants_rotation() const noexcept {
  if (file_ == nullptr) return true;
  const std::uint64_t bytes = old_bytes_ + current_bytes_;
  return !fold_wanted_ && bytes > std::max({bytes_min_, snapshot_bytes_.load(), retry_bytes_.load()});
}

int Journal::rotate() {
  const std::uint64_t number = number_ + 1;
  const LogHeader header = journal_header(store_, number, next_sequence_);
  std::unique_ptr<DiskFile> file;
  int error = make_file(*directory_, header, journal_name(number), file);
  if (is_full(error)) static_cast<void>(directory_->remove(journal_name(number)));  // it may be tried again
  if (error == 0) error = directory_->flush();
  if (error != 0) return error;
  file_ = std::move(file);
  header_ = header;
  old_bytes_ += current_bytes_;
  current_bytes_ = sizeof(header);
  number_ = number;
  fold_wanted_ = true;
  return 0;
}

int Journal::fold() {
  const std::uint64_t number = number_;  // stays, because nothing rotates while a fold is wanted
  int error = 0;
  std::uint64_t bytes = 0;
  try {
    LogState state(store_, slots_);
    std::vector<std::string> names;
    error = directory_->names(names);
    if (error == 0) {
      state.read(*directory_, log_files_of(names), number);
      const bool whole = state.next_sequence() == header_.first_sequence;
      error = whole ? write_snapshot(state, number, bytes) : EIO;
    }
  } catch (const Error&) {
    error = EIO;  // what was written cannot be read back
  } catch (const std::bad_alloc&) {
    error = ENOSPC;  // as harmless, and as likely to pass
  }
  if (is_full(error)) {
    static_cast<void>(directory_->remove(kSnapshotInMaking));
    retry_bytes_ = 2 * (old_bytes_ + current_bytes_);
    fold_wanted_ = false;
    return ENOSPC;
  }
  if (error != 0) return error;
  error = remove_before(number);
  old_bytes_ = 0;
  snapshot_bytes_ = bytes;
  retry_bytes_ = 0;
  fold_wanted_ = false;
  return error;
}

int Journal::write_snapshot(const LogState& state, std::uint64_t number, std::uint64_t& bytes) {
  LogHeader header = journal_header(store_, number, state.next_sequence());
  header.kind = LogKind::kSnapshot;
  header.records = state.entries();
  header = sealed(header);
  int error = directory_->remove(kSnapshotInMaking);
  if (error != 0 && error != ENOENT) return error;
  std::unique_ptr<DiskFile> file;
  error = directory_->open(kSnapshotInMaking, DiskOpen::kNew, file);
  if (error != 0) return error;
  const auto* const head = reinterpret_cast<const std::byte*>(&header);
  std::vector<std::byte> encoded(head, head + sizeof(header));
  std::uint64_t sequence = 0;
  bytes = 0;
  for (std::uint32_t slot = 0; slot <= state.slots() && error == 0; ++slot) {
    const bool last = slot == state.slots();
    if (!last && state.holds(slot)) add_record(encoded, header, ++sequence, state.record(slot));
    if (!last && encoded.size() < kWriteBytes) continue;
    error = write_all(*file, bytes, encoded.data(), encoded.size());
    bytes += encoded.size();
    encoded.clear();
  }
  if (error == 0) error = file->flush();
  if (error == 0) error = directory_->rename(kSnapshotInMaking, snapshot_name(number));
  return error != 0 ? error : directory_->flush();
}

int Journal::remove_before(std::uint64_t number) {
  std::vector<std::string> names;
  int error = directory_->names(names);
  if (error != 0) return error;
  const LogFiles files = log_files_of(names);
  for (const std::uint64_t journal : files.journals) {
    if (journal < number && error == 0) error = directory_->remove(journal_name(journal));
  }
  for (const std::uint64_t snapshot : files.snapshots) {
    if (snapshot < number && error == 0) error = directory_->remove(snapshot_name(snapshot));
  }
  return error;
}

}  // namespace kvpool
