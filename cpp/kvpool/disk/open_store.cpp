#include "kvpool/disk/open_store.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/disk/plan.h"

namespace kvpool {
namespace {

constexpr const char* kLock = "kvpool.lock";
constexpr const char* kBlocks = "kvpool.blocks";
constexpr const char* kStore = "kvpool.store";
constexpr const char* kStoreInMaking = "kvpool.store.new";
constexpr std::string_view kLockText = "The lock of a kvpool store on disk. Its directory is kvpool's alone.\n";

// At the begin of kvpool.blocks, so that the file of another store is not taken for this one's.
struct BlocksHeader {
  char magic[8] = {'k', 'v', 'p', 'o', 'o', 'l', 'B', '\n'};
  std::uint32_t version = kDiskVersion;
  std::uint32_t unused = 0;
  DiskId store{};
};

struct AlignedFree {
  void operator()(std::byte* memory) const noexcept { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedFree>;

AlignedBytes header_page() {
  AlignedBytes page(static_cast<std::byte*>(std::aligned_alloc(kDiskAlignment, kDiskAlignment)));
  if (page == nullptr) throw std::bad_alloc();
  std::memset(page.get(), 0, kDiskAlignment);
  return page;
}

void require_done(int error, const std::string& what) {
  if (error == 0) return;
  throw Error(ErrorCode::kStoreFailed, what + ": " + errno_text(error), {{"errno", error}});
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string> names_in(DiskDirectory& directory) {
  std::vector<std::string> names;
  require_done(directory.names(names), "cannot list the directory");
  return names;
}

[[noreturn]] void throw_foreign(const DiskOptions& options, const std::string& why) {
  throw Error(ErrorCode::kState, options.path + " is not the directory of a store on disk: " + why +
                                     ". Nothing was changed; give an empty directory, or one that does not exist")
      .because(ErrorCause::kForeign);
}

[[noreturn]] void throw_damaged(const std::string& how) {
  throw Error(ErrorCode::kState, "the store on disk is damaged: " + how + ". Nothing was changed")
      .because(ErrorCause::kDamaged);
}

std::string content_of(DiskDirectory& directory, const char* name) {
  std::unique_ptr<DiskFile> file;
  std::uint64_t bytes = 0;
  require_done(directory.open(name, DiskOpen::kThere, file), std::string("cannot open ") + name);
  require_done(file->size(bytes), std::string("cannot read ") + name);
  std::string content(std::min<std::uint64_t>(bytes, 64 << 20), '\0');
  const int error = read_all(*file, 0, reinterpret_cast<std::byte*>(content.data()), content.size());
  require_done(error, std::string("cannot read ") + name);
  return content;
}

// Makes the lock file if the directory is empty, and locks it.
void take_lock(const DiskOptions& options, DiskDirectory& directory) {
  std::vector<std::string> names = names_in(directory);
  if (!has(names, kLock)) {
    if (!names.empty()) throw_foreign(options, "it has a file '" + names.front() + "'");
    std::unique_ptr<DiskFile> file;
    const int error = directory.open(kLock, DiskOpen::kNew, file);
    if (error != EEXIST) require_done(error, "cannot make the lock file");
  }
  const int error = directory.lock(kLock);
  if (error == EAGAIN) {
    throw Error(ErrorCode::kState, "another pool has the store on disk in " + options.path + " open")
        .because(ErrorCause::kInUse);
  }
  require_done(error, "cannot lock the store on disk");
  const std::string found = content_of(directory, kLock);
  names = names_in(directory);
  if (found == kLockText && has(names, kStore)) return;
  // Loss of power may leave a part of the text, and zeros, in a directory where nothing else was made yet.
  const std::string_view written = std::string_view(found).substr(0, found.find('\0'));
  const bool unmade = kLockText.substr(0, written.size()) == written &&
                      found.find_first_not_of('\0', written.size()) == std::string::npos;
  if (found != kLockText && (names.size() != 1 || !unmade))
    throw_foreign(options, "kvpool.lock was not written by kvpool");
  // A killed process may have written it without making it durable.
  std::unique_ptr<DiskFile> file;
  require_done(directory.open(kLock, DiskOpen::kThere, file), "cannot open the lock file");
  const auto* const text = reinterpret_cast<const std::byte*>(kLockText.data());
  require_done(write_all(*file, 0, text, kLockText.size()), "cannot write the lock file");
  require_done(file->flush(), "cannot write the lock file");
  require_done(directory.flush(), "cannot make the directory durable");
}

// How long kvpool.blocks is.
std::uint64_t blocks_bytes(const StoreDescription& description) {
  return BlockShape(description.block_bytes).offset(description.slots, 0);
}

int write_blocks(DiskDirectory& directory, const StoreDescription& description, std::uint64_t bytes) {
  std::unique_ptr<DiskFile> file;
  int error = directory.open(kBlocks, DiskOpen::kNew, file);
  if (error == 0) error = file->reserve(bytes);
  if (error != 0) return error;
  const AlignedBytes page = header_page();
  BlocksHeader header;
  header.store = description.id;
  std::memcpy(page.get(), &header, sizeof(header));
  error = write_all(*file, 0, page.get(), kDiskAlignment);
  return error != 0 ? error : file->flush();
}

int write_description(DiskDirectory& directory, const StoreDescription& description) {
  const std::vector<std::byte> bytes = description.encoded();
  std::unique_ptr<DiskFile> file;
  int error = directory.open(kStoreInMaking, DiskOpen::kNew, file);
  if (error == 0) error = write_all(*file, 0, bytes.data(), bytes.size());
  if (error == 0) error = file->flush();
  if (error == 0) error = directory.flush();  // the names of the others, before this one
  if (error == 0) error = directory.rename(kStoreInMaking, kStore);
  return error != 0 ? error : directory.flush();
}

// What a making that was interrupted has left.
void remove_unfinished(DiskDirectory& directory) {
  for (const std::string& name : names_in(directory)) {
    if (name == kLock) continue;
    require_done(directory.remove(name), "cannot remove " + name);
  }
}

bool is_unfinished(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(), [](const std::string& name) {
    return name == kLock || name == kBlocks || name == kStoreInMaking || name == journal_name(1);
  });
}

// A store is used only once it has been made: a journal with more than its header belongs to one that was.
bool has_records(DiskDirectory& directory, const std::string& journal) {
  std::unique_ptr<DiskFile> file;
  std::uint64_t bytes = 0;
  require_done(directory.open(journal, DiskOpen::kThere, file), "cannot open " + journal);
  require_done(file->size(bytes), "cannot read " + journal);
  return bytes > sizeof(LogHeader);
}

void make_store(const DiskOptions& options, DiskDirectory& directory) {
  const std::vector<std::string> names = names_in(directory);
  if (!is_unfinished(names)) {
    throw Error(ErrorCode::kState, options.path +
                                       " has files of a store on disk and others, and no kvpool.store, which "
                                       "says what they are. Nothing was changed")
        .because(ErrorCause::kDamaged);
  }
  if (has(names, journal_name(1).c_str()) && has_records(directory, journal_name(1))) {
    throw_damaged("its journal has records, and there is no kvpool.store, which says what they are");
  }
  remove_unfinished(directory);
  StoreDescription description{{}, options.slots, options.block_bytes, options.format};
  if (getrandom(description.id.data(), description.id.size(), 0) != static_cast<ssize_t>(description.id.size())) {
    require_done(errno, "cannot name the store on disk");
  }
  const std::uint64_t bytes = blocks_bytes(description);
  const std::uint64_t room = directory.free_bytes();
  int error = room < bytes ? ENOSPC : write_blocks(directory, description, bytes);
  if (error == 0) error = Journal::make_first(directory, description.id);
  if (error == 0) error = write_description(directory, description);
  if (error == 0) return;
  remove_unfinished(directory);
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    throw Error(ErrorCode::kOutOfMemory,
                "the disk has no room for a store: " + std::to_string(bytes) + " bytes are needed, and " +
                    std::to_string(room) + " are free",
                {{"needed_bytes", static_cast<std::int64_t>(bytes)},
                 {"available_bytes", static_cast<std::int64_t>(room)},
                 {"errno", error}});
  }
  require_done(error, "cannot make the store on disk");
}

std::unique_ptr<DiskFile> open_blocks(DiskDirectory& directory, const StoreDescription& description) {
  std::unique_ptr<DiskFile> file;
  require_done(directory.open(kBlocks, DiskOpen::kThereDirect, file), "cannot open kvpool.blocks");
  std::uint64_t bytes = 0;
  require_done(file->size(bytes), "cannot read kvpool.blocks");
  // Slots behind the end of the file would fail one by one, as if the drive had failed.
  if (bytes < blocks_bytes(description)) throw_damaged("kvpool.blocks was cut off");
  const AlignedBytes page = header_page();
  require_done(read_all(*file, 0, page.get(), kDiskAlignment), "cannot read kvpool.blocks");
  BlocksHeader expected;
  expected.store = description.id;
  if (std::memcmp(page.get(), &expected, sizeof(expected)) != 0) {
    throw_damaged("kvpool.blocks is not its file");
  }
  return file;
}

}  // namespace

OpenedStore open_store(const DiskOptions& options, const std::shared_ptr<DiskDirectory>& directory) {
  take_lock(options, *directory);
  if (!has(names_in(*directory), kStore)) make_store(options, *directory);
  OpenedStore opened;
  const std::string content = content_of(*directory, kStore);
  opened.description = StoreDescription::decoded(std::as_bytes(std::span(content)));
  opened.description.require(options);
  opened.blocks = open_blocks(*directory, opened.description);
  opened.found = std::make_unique<LogState>(opened.description.id, options.slots);
  opened.found->read(*directory, log_files_of(names_in(*directory)), ~std::uint64_t{0});
  opened.journal =
      std::make_unique<Journal>(directory, opened.description.id, *opened.found, options.journal_bytes_min);
  return opened;
}

}  // namespace kvpool
