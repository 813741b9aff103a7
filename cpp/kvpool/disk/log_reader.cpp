#include "kvpool/disk/log_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// Longer than any record: the checksums of a block of 4 GiB and the largest meta are less than 300 KiB.
constexpr std::size_t kReadBytes = 1 << 20;

void require_read(int error, const std::string& name) {
  if (error == 0) return;
  throw Error(ErrorCode::kStoreFailed, "cannot read " + name + ": " + errno_text(error), {{"errno", error}});
}

}  // namespace

LogReader::LogReader(DiskDirectory& directory, std::string name) : name_(std::move(name)) {
  require_read(directory.open(name_, DiskOpen::kThere, file_), name_);
  require_read(file_->size(bytes_), name_);
}

std::optional<LogHeader> LogReader::header() {
  LogHeader header;
  if (bytes_ < sizeof(header)) return std::nullopt;
  read(reinterpret_cast<std::byte*>(&header), sizeof(header));
  return header;
}

std::optional<Record> LogReader::next(const LogHeader& header, std::uint64_t sequence) {
  for (;;) {
    if (const auto found = read_record(rest_, header, sequence)) {
      at_ = rest_.data();
      rest_ = rest_.subspan(found->bytes);
      return found->record;
    }
    if (rest_.size() >= kReadBytes || !read_more()) return std::nullopt;
  }
}

// Records that were given before keep the memory that they lie in.
bool LogReader::read_more() {
  const std::size_t more = std::min<std::uint64_t>(kReadBytes, bytes_ - offset_);
  if (more == 0) return false;
  const std::shared_ptr<std::byte[]> memory(new std::byte[rest_.size() + more]);  // not filled first, unlike a vector
  if (!rest_.empty()) std::memcpy(memory.get(), rest_.data(), rest_.size());
  read(memory.get() + rest_.size(), more);
  rest_ = {memory.get(), rest_.size() + more};
  memory_ = memory;
  return true;
}

void LogReader::read(std::byte* to, std::size_t bytes) {
  require_read(read_all(*file_, offset_, to, bytes), name_);
  offset_ += bytes;
}

}  // namespace kvpool
