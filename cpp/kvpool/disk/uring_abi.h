// The part of the kernel's interface for io_uring that is used here (include/uapi/linux/io_uring.h, since 5.1): the
// headers of older distributions lack it, and the kernel below may have it all the same.
#pragma once

#include <cstdint>

namespace kvpool::uring {

inline constexpr long kSetupCall = 425;
inline constexpr long kEnterCall = 426;

inline constexpr std::uint64_t kSubmissionRing = 0;  // offsets for mmap
inline constexpr std::uint64_t kCompletionRing = 0x8000000;
inline constexpr std::uint64_t kEntries = 0x10000000;
inline constexpr std::uint32_t kSingleMmap = 1;  // a feature: both rings in one mapping
inline constexpr std::uint32_t kGetEvents = 1;   // a flag of enter: wait for completions

enum class Operation : std::uint8_t { kNop = 0, kReadv = 1, kWritev = 2 };

struct SubmissionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, unused;
  std::uint64_t user_address;
};
struct CompletionOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, unused;
  std::uint64_t user_address;
};
struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, unused[3];
  SubmissionOffsets sq;
  CompletionOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Submission {
  Operation operation;
  std::uint8_t flags;
  std::uint16_t priority;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t operation_flags;
  std::uint64_t user_data;
  std::uint64_t unused[3];
};
static_assert(sizeof(Submission) == 64);

struct Completed {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
static_assert(sizeof(Completed) == 16);

}  // namespace kvpool::uring
