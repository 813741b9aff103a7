#include "kvpool/routes/peer_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace kvpool {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
// Page tables are filled in advance for so long: all of them when the peer has huge pages, of an arena with small ones
// the beginning. The rest is filled as it is written to.
constexpr auto kPopulateTime = std::chrono::milliseconds(20);
constexpr std::size_t kPopulateStep = 8 * kHugePageBytes;

[[noreturn]] void throw_protocol(const std::string& text) {
  throw Error(ErrorCode::kProtocol, "the memory that the peer offers to map is not what its metadata says: " + text);
}

[[noreturn]] void throw_unsupported(const std::string& text, int error) {
  throw Error(ErrorCode::kUnsupported, text + ": " + std::generic_category().message(error), {{"errno", error}});
}

// Where the medium's first segment begins: at the start of its file.
std::uint64_t lowest_address(const MetadataMedium& medium) {
  std::uint64_t lowest = UINT64_MAX;
  for (const MetadataSegment& segment : medium.segments) lowest = std::min(lowest, segment.address);
  return lowest;
}

void check_segments(const MetadataMedium& medium) {
  const std::uint64_t lowest = lowest_address(medium);
  for (const MetadataSegment& segment : medium.segments) {
    // metadata.h: read_metadata has checked that none of this overflows.
    const std::uint64_t end = segment.address - lowest + (medium.blocks - 1) * segment.stride + segment.bytes;
    if (end > medium.mapped_bytes) {
      throw_protocol("a segment ends at byte " + std::to_string(end) + " of " + std::to_string(medium.mapped_bytes));
    }
  }
}

// A file that its owner can shrink is a way to kill us by SIGBUS.
void check_file(int fd, std::uint64_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) throw_protocol("its descriptor is no memory file");
  if ((seals & F_SEAL_SHRINK) == 0) throw_protocol("its memory file may shrink");
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_unsupported("fstat of the peer's memory file", errno);
  if (static_cast<std::uint64_t>(status.st_size) < bytes) {
    throw_protocol("its memory file has " + std::to_string(status.st_size) + " bytes of " + std::to_string(bytes));
  }
}

// A file mapped shared and writable at an address that allows huge pages.
class Mapping {
 public:
  Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
    const std::size_t reserved = bytes + kHugePageBytes;
    void* space = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) throw_unsupported("no address space for the peer's memory", errno);
    auto* first = static_cast<std::byte*>(space);
    const std::size_t lead = (0 - reinterpret_cast<std::uintptr_t>(space)) % kHugePageBytes;
    if (mmap(first + lead, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
      const int error = errno;
      munmap(space, reserved);
      throw_unsupported("the peer's memory file cannot be mapped", error);
    }
    base_ = first + lead;
    if (lead > 0) munmap(first, lead);
    const std::size_t used = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    munmap(base_ + used, reserved - lead - used);
    // A child has no use for it, and its core dump is not the place for prompts.
    madvise(base_, bytes, MADV_DONTFORK);
    madvise(base_, bytes, MADV_DONTDUMP);
    madvise(base_, bytes, MADV_HUGEPAGE);
    populate();
  }
  ~Mapping() {
    if (generation_ == fork_generation()) munmap(base_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const noexcept { return base_; }

 private:
  static std::size_t page_bytes() noexcept { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

  // Without it the first write to each page would stop at a fault. A kernel that does not know the call leaves it so.
  void populate() const noexcept {
    const auto until = std::chrono::steady_clock::now() + kPopulateTime;
    for (std::size_t at = 0; at < bytes_ && std::chrono::steady_clock::now() < until; at += kPopulateStep) {
      if (madvise(base_ + at, std::min(kPopulateStep, bytes_ - at), MADV_POPULATE_WRITE) != 0) return;
    }
  }

  const std::uint32_t generation_ = fork_generation();
  std::byte* base_ = nullptr;
  const std::size_t bytes_;
};

class MappedFiles final : public MappedPeer {
 public:
  MappedFiles(const PeerMetadata& metadata, const MediaFiles& files) {
    for (std::size_t i = 0; i < files.size(); ++i) {
      const MetadataMedium& medium = metadata.media[i];
      if (files[i] < 0 || medium.mapped_bytes == 0 || medium.blocks == 0 || medium.kind != MemoryKind::kHost) continue;
      check_file(files[i], medium.mapped_bytes);
      mappings_.push_back(std::make_unique<Mapping>(files[i], static_cast<std::size_t>(medium.mapped_bytes)));
      spans_[i] = mapped_span(medium, mappings_.back()->base());
      regions_[i] = {mappings_.back()->base(), static_cast<std::size_t>(medium.mapped_bytes)};
    }
    if (mappings_.empty()) throw Error(ErrorCode::kUnsupported, "the peer has no memory that can be mapped");
  }

 private:
  std::vector<std::unique_ptr<Mapping>> mappings_;
};

}  // namespace

MediumSpan mapped_span(const MetadataMedium& medium, std::byte* base) {
  check_segments(medium);
  const std::uint64_t lowest = lowest_address(medium);
  MediumSpan span{medium.blocks, {}};
  for (const MetadataSegment& segment : medium.segments) {
    span.segments.push_back(Segment{base + (segment.address - lowest), segment.stride, segment.bytes});
  }
  return span;
}

MediaSpans remote_spans(const PeerMetadata& metadata, const MediaSet& gpu_media) {
  MediaSpans spans;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (metadata.media[i].kind != MemoryKind::kHost && !gpu_media[i]) continue;
    spans[i].blocks = metadata.media[i].blocks;
    for (const MetadataSegment& segment : metadata.media[i].segments) {
      spans[i].segments.push_back(
          Segment{reinterpret_cast<std::byte*>(segment.address), segment.stride, segment.bytes});
    }
  }
  return spans;
}

std::unique_ptr<MappedPeer> MappedPeer::make(const PeerMetadata& metadata, const MediaFiles& files) {
  return std::make_unique<MappedFiles>(metadata, files);
}

}  // namespace kvpool
