// Arenas that kvpool owns: one memfd, one mapping.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <utility>

#include "kvpool/arena/arena.h"
#include "kvpool/arena/commit.h"
#include "kvpool/arena/pin.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace kvpool {
namespace {

// Left to the rest of the process when an arena takes nearly everything: without it the arena would be made, and the
// next allocation of anybody would be the one that is killed.
constexpr std::uint64_t kReserveBytes = std::uint64_t{64} << 20;
constexpr std::size_t kLabelBytesMax = 249;  // of a memfd's name

std::string error_text(int error) { return std::generic_category().message(error); }

[[noreturn]] void throw_out_of_memory(std::size_t needed, std::uint64_t available, const std::string& limit) {
  throw Error(ErrorCode::kOutOfMemory,
              "an arena of " + std::to_string(needed) + " bytes does not fit: " + std::to_string(available) +
                  " bytes are available (limit: " + limit + ")",
              {{"needed_bytes", static_cast<std::int64_t>(needed)},
               {"available_bytes", static_cast<std::int64_t>(std::min<std::uint64_t>(available, INT64_MAX))}});
}

std::size_t round_to_page(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void check_headroom(std::size_t bytes) {
  const MemoryHeadroom headroom = memory_headroom();
  const std::uint64_t available = headroom.available_bytes - std::min(headroom.available_bytes, kReserveBytes);
  if (bytes > available) {
    throw_out_of_memory(bytes, available, headroom.limit);
  }
}

// An anonymous file of exactly `bytes`, sealed at that size: no peer that is given the descriptor can shrink it and
// have the others killed by SIGBUS.
class SealedFile {
 public:
  SealedFile(const std::string& label, std::size_t bytes) {
    const std::string name = label.empty() ? "kvpool" : label.substr(0, kLabelBytesMax);
    fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd_ < 0 && errno == EINVAL) {
      fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    }
    if (fd_ < 0) {
      fail("memfd_create", bytes);
    }
    try {
      check_file_limit(bytes);
      if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
        fail("ftruncate", bytes);
      }
      if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        fail("sealing", bytes);
      }
    } catch (...) {
      close(fd_);
      throw;
    }
  }
  ~SealedFile() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  SealedFile(const SealedFile&) = delete;
  SealedFile& operator=(const SealedFile&) = delete;

  int fd() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  // ftruncate beyond this limit does not only fail: it sends a signal that ends the process.
  static void check_file_limit(std::size_t bytes) {
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
      throw_out_of_memory(bytes, limit.rlim_cur, "RLIMIT_FSIZE");
    }
  }

  [[noreturn]] static void fail(const char* call, std::size_t bytes) {
    const int error = errno;
    throw Error(
        error == ENOMEM || error == ENOSPC || error == EFBIG ? ErrorCode::kOutOfMemory : ErrorCode::kUnsupported,
        std::string(call) + " failed for an arena of " + std::to_string(bytes) + " bytes: " + error_text(error),
        {{"needed_bytes", static_cast<std::int64_t>(bytes)}, {"errno", error}});
  }

  int fd_ = -1;
};

// The file mapped shared and writable, aligned to a huge page.
class Mapping {
 public:
  Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
    // Address space with room to align, most of which is given back at once.
    const std::size_t reserved = bytes + kHugePageBytes;
    void* space = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) {
      fail();
    }
    auto* first = static_cast<std::byte*>(space);
    const std::size_t lead = (0 - reinterpret_cast<std::uintptr_t>(space)) % kHugePageBytes;
    if (mmap(first + lead, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
      const int error = errno;
      munmap(space, reserved);
      errno = error;
      fail();
    }
    base_ = first + lead;
    if (lead > 0) {
      munmap(first, lead);
    }
    munmap(base_ + bytes, kHugePageBytes - lead);
    // Prompts are private and arenas are large: neither belongs into a core dump.
    madvise(base_, bytes, MADV_DONTDUMP);
  }
  ~Mapping() {
    if (base_ != nullptr) {
      munmap(base_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const noexcept { return base_; }
  std::byte* release() noexcept { return std::exchange(base_, nullptr); }

 private:
  [[noreturn]] void fail() const {
    const int error = errno;
    throw Error(ErrorCode::kOutOfMemory,
                "no address space for an arena of " + std::to_string(bytes_) + " bytes: " + error_text(error),
                {{"needed_bytes", static_cast<std::int64_t>(bytes_)}, {"errno", error}});
  }

  std::byte* base_ = nullptr;
  const std::size_t bytes_;
};

class OwnedArena final : public Arena {
 public:
  explicit OwnedArena(const ArenaOptions& options) {
    const ArenaSize size = arena_size(options.blocks, options.segment_bytes);
    if (options.numa_node < -1) {
      throw Error(ErrorCode::kArgument,
                  "a NUMA node is -1 (any) or its number, not " + std::to_string(options.numa_node),
                  {{"numa_node", options.numa_node}});
    }
    medium_ = options.medium;
    blocks_ = options.blocks;
    block_bytes_ = size.block_bytes;
    mapped_bytes_ = round_to_page(size.payload_bytes);
    if (mapped_bytes_ > 0) {
      commit(options);
    }
    segments_ = arena_segments(base_, blocks_, options.segment_bytes);
  }

  ~OwnedArena() override {
    if (generation_ != fork_generation()) {
      // A forked child shares the memory with its parent and frees nothing of it; the driver does not work here.
      static_cast<void>(pin_.release());
      return;
    }
    pin_.reset();
    if (base_ != nullptr) {
      munmap(base_, mapped_bytes_);
      close(memfd_);
    }
  }

 private:
  void commit(const ArenaOptions& options) {
    if (options.check_memory) {
      check_headroom(mapped_bytes_);
    }
    SealedFile file(options.label, mapped_bytes_);
    Mapping mapping(file.fd(), mapped_bytes_);
    if (options.numa_node >= 0) {
      prefer_numa_node(mapping.base(), mapped_bytes_, options.numa_node);
    }
    huge_page_bytes_ =
        commit_memory(file.fd(), mapping.base(), mapped_bytes_, options.huge_pages, options.commit_threads);
    if (options.pin) {
      pin_ = std::make_unique<PinnedRange>(mapping.base(), mapped_bytes_, options.pin_device);
      pinned_ = true;
    }
    base_ = mapping.release();
    memfd_ = file.release();
    owned_ = true;
  }

  const std::uint32_t generation_ = fork_generation();
  std::byte* base_ = nullptr;
  std::unique_ptr<PinnedRange> pin_;
};

}  // namespace

std::shared_ptr<Arena> make_owned_arena(const ArenaOptions& options) { return std::make_shared<OwnedArena>(options); }

}  // namespace kvpool
