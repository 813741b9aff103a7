#include "kvpool/arena/commit.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/signals_blocked.h"

// Kernel constants that older headers lack.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace kvpool {
namespace {

// A collapse call starts by draining every processor's page lists, so it is given many huge pages at a time.
constexpr std::size_t kSliceBytes = 32 * kHugePageBytes;
// A machine without free huge pages compacts its memory in vain for each one that is asked for. After so many failures
// in a row no more are.
constexpr int kFailuresMax = 8;

std::size_t page_bytes() noexcept { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// The error number, 0 for success.
int advise(std::byte* base, std::size_t bytes, int advice) noexcept {
  while (madvise(base, bytes, advice) != 0) {
    if (errno != EINTR && errno != EAGAIN) {
      return errno;
    }
  }
  return 0;
}

// Whether the error says that this kernel, or a sandbox around it, does not know the call.
bool is_unknown_call(int error) noexcept {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM;
}

// Makes all pages of the range present, by whatever means the kernel has. The error number, 0 for success.
int populate(int fd, std::byte* mapping, std::byte* base, std::size_t bytes) noexcept {
  const int error = advise(base, bytes, MADV_POPULATE_WRITE);
  if (!is_unknown_call(error)) {
    // EFAULT stands for the SIGBUS that a store would have met: the memory is used up.
    return error == EFAULT ? ENOMEM : error;
  }
  // Before Linux 5.14. Allocating the file's pages reports an error where touching them would kill.
  while (fallocate(fd, 0, base - mapping, static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) {
      return errno == ENOSPC ? ENOMEM : errno;
    }
  }
  const std::size_t page = page_bytes();
  for (std::size_t at = 0; at < bytes; at += page) {
    static_cast<void>(*static_cast<volatile std::byte*>(base + at));
  }
  return 0;
}

// One commitment, shared by the threads that carry it out.
class Commitment {
 public:
  Commitment(int fd, std::byte* base, std::size_t bytes, bool huge) noexcept
      : fd_(fd), base_(base), bytes_(bytes), huge_(huge) {}

  // Takes slice after slice until none is left or one failed.
  void work() noexcept {
    while (error_.load(std::memory_order_relaxed) == 0) {
      const std::size_t at = next_.fetch_add(kSliceBytes, std::memory_order_relaxed);
      if (at >= bytes_) {
        return;
      }
      const std::size_t length = std::min(kSliceBytes, bytes_ - at);
      if (huge_) {
        collapse(base_ + at, length - length % kHugePageBytes);
      }
      if (const int error = populate(fd_, base_, base_ + at, length)) {
        error_.store(error, std::memory_order_relaxed);
      }
    }
  }

  int error() const noexcept { return error_.load(std::memory_order_relaxed); }

 private:
  // Turns the range into huge pages where it can. Failing is no error: `populate` puts small pages where none are.
  void collapse(std::byte* base, std::size_t bytes) noexcept {
    if (bytes == 0 || failures_.load(std::memory_order_relaxed) >= kFailuresMax) {
      return;
    }
    // The kernel collapses only what has a page already.
    const std::size_t page = page_bytes();
    for (std::size_t at = 0; at < bytes; at += kHugePageBytes) {
      if (advise(base + at, page, MADV_POPULATE_WRITE) != 0) {
        return;
      }
    }
    if (advise(base, bytes, MADV_COLLAPSE) == 0) {
      failures_.store(0, std::memory_order_relaxed);
      return;
    }
    // The call may have stopped at the first page that it could not collapse.
    for (std::size_t at = 0; at < bytes && failures_.load(std::memory_order_relaxed) < kFailuresMax;
         at += kHugePageBytes) {
      if (advise(base + at, kHugePageBytes, MADV_COLLAPSE) == 0) {
        failures_.store(0, std::memory_order_relaxed);
      } else {
        failures_.fetch_add(1, std::memory_order_relaxed);
      }
    }
  }

  const int fd_;
  std::byte* const base_;
  const std::size_t bytes_;
  const bool huge_;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> error_{0};
  std::atomic<int> failures_{0};  // to collapse, in a row
};

// Runs `work` in `threads` threads, or in as many as can be started. They take no signals.
template <typename Work>
void run_in_threads(int threads, const Work& work) {
  std::vector<std::thread> others;
  try {
    const SignalsBlocked blocked;
    for (int i = 1; i < threads; ++i) {
      others.emplace_back(work);
    }
  } catch (const std::exception&) {
    // No thread to be had: those that there are do all of the work.
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
}

// Removes leading blanks and a number from `text` and returns the number; nullopt if `text` does not begin with one.
std::optional<std::uint64_t> take_number(std::string_view& text, int base) noexcept {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{}) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

// How much of the range is mapped by huge pages at this moment. A mapping's entry begins "first-end rw-s ..." and goes
// on with lines "Key:   number kB".
std::size_t huge_bytes_in_smaps(const std::byte* base, std::size_t bytes) {
  constexpr std::string_view kKey = "ShmemPmdMapped:";
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  std::size_t found = 0;
  for (std::string line; std::getline(smaps, line);) {
    std::string_view text = line;
    if (text.starts_with(kKey)) {
      text.remove_prefix(kKey.size());
      found += inside ? take_number(text, 10).value_or(0) << 10 : 0;
    } else if (const auto first = take_number(text, 16); first && text.starts_with('-')) {
      if (*first >= begin + bytes) {
        break;  // the entries ascend
      }
      inside = *first >= begin;
    }
  }
  return found;
}

}  // namespace

std::size_t commit_memory(int fd, std::byte* base, std::size_t bytes, HugePages huge_pages, int threads) {
  const std::size_t huge_possible = bytes - bytes % kHugePageBytes;
  const bool huge = huge_pages != HugePages::kNever && huge_possible > 0;
  // Only a hint: a kernel without huge pages does not know it. It decides what a fault brings where the machine's
  // setting is "advise".
  static_cast<void>(advise(base, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));

  Commitment commitment(fd, base, bytes, huge);
  const std::size_t slices = (bytes + kSliceBytes - 1) / kSliceBytes;
  run_in_threads(static_cast<int>(std::min<std::size_t>(slices, static_cast<std::size_t>(std::max(threads, 1)))),
                 [&commitment] { commitment.work(); });
  if (const int error = commitment.error()) {
    throw Error(ErrorCode::kOutOfMemory,
                "committing " + std::to_string(bytes) + " bytes failed: " + std::generic_category().message(error),
                {{"needed_bytes", static_cast<std::int64_t>(bytes)}, {"errno", error}});
  }
  const std::size_t huge_bytes = huge ? huge_bytes_in_smaps(base, bytes) : 0;
  if (huge_pages == HugePages::kRequire && huge_bytes < huge_possible) {
    throw Error(ErrorCode::kUnsupported,
                "huge pages are required, and the kernel gave " + std::to_string(huge_bytes) + " of " +
                    std::to_string(huge_possible) + " bytes in huge pages",
                {{"needed_bytes", static_cast<std::int64_t>(huge_possible)},
                 {"huge_page_bytes", static_cast<std::int64_t>(huge_bytes)}});
  }
  return huge_bytes;
}

void prefer_numa_node(std::byte* base, std::size_t bytes, int node) {
  constexpr int kMpolPreferred = 1;
  constexpr int kNodesMax = 1024;  // as many as a kernel can be built for
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  int error = EINVAL;
  if (node < kNodesMax) {
    unsigned long mask[kNodesMax / kWordBits] = {};
    mask[node / kWordBits] = 1UL << (node % kWordBits);
    // The kernel reads one bit less than it is told.
    const long result = syscall(SYS_mbind, base, bytes, kMpolPreferred, mask, kNodesMax + 1UL, 0U);
    error = result == 0 ? 0 : errno;
  }
  if (error == 0 || (error == ENOSYS && node == 0)) {
    return;  // a kernel without NUMA has node 0 only
  }
  const bool absent = error == EINVAL || error == ENOSYS;
  throw Error(absent ? ErrorCode::kArgument : ErrorCode::kUnsupported,
              "NUMA node " + std::to_string(node) +
                  (absent ? std::string(" does not exist here or has no memory")
                          : " cannot be bound to: " + std::generic_category().message(error)),
              {{"numa_node", node}, {"errno", error}});
}

}  // namespace kvpool
