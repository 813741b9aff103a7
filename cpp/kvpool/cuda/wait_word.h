// Lets a stream wait for an event that is not GPU work: for a word in page-locked memory, which this process sets.
//
// Words lie in pages of 4 KiB, which a context allocates as needed and keeps. A stream reads its word when it gets to
// the wait; that may be long after the word was set and given to another user.
//
// Invariants
//   Q1  A word only grows (as a cyclic number), each user waits for one more than the last, and a wait ends when the
//       word has reached its value. So a word can be reused at once: a late poll succeeds as the first one would have,
//       for the next 2^31 users of the word.
//   Q2  A word has one user at a time, and is set when its use ends.
//   Q3  A page stays mapped to the end of the process, and page-locked as long as the context.
//
// The driver does not know what sets a word. Copies that are not ordered after the waiting stream may still be behind
// it in a queue of the GPU; if the word is only set after they end, neither makes progress. A thread that waits for
// such a copy waits kWordPatienceNs and then sets the words by force, which fails their users.
//
// Thread-safety: all of it. Does nothing in a forked child.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/cuda/context.h"

namespace kvpool {

class WaitWords;

// Far more than an unobstructed copy takes.
inline constexpr std::int64_t kWordPatienceNs = 1'000'000'000;

class WaitWord {
 public:
  // Takes a word, which is set by force at `until_ns` (CLOCK_MONOTONIC) unless it has been set. Throws kUnsupported if
  // streams of this GPU cannot wait in this way, or would share one queue with the copies for which they wait
  // (CUDA_DEVICE_MAX_CONNECTIONS=1); kBusy while a Standstill lives; kOutOfMemory, kDeviceLost, kState, std::bad_alloc.
  static std::shared_ptr<WaitWord> take(std::shared_ptr<const CudaContext> context, std::int64_t until_ns);
  ~WaitWord();
  WaitWord(const WaitWord&) = delete;
  WaitWord& operator=(const WaitWord&) = delete;

  // Work that the stream gets from now on begins when the word is set. Does not wait itself, unless the stream's queue
  // is full. Throws as check_stream_of, kUnsupported, kDeviceLost; then the stream does not wait.
  void hold_up(CuStream stream) const;
  // Idempotent. The stream then sees all writes of this thread, and those of the GPU that this thread has seen.
  void set() noexcept;
  // The same, by force: was_forced() is true then.
  void force() noexcept;
  // Whether it was set by force: the stream may have continued too early.
  bool was_forced() const noexcept { return forced_.load(std::memory_order_acquire); }

 private:
  friend class WaitWords;
  WaitWord(std::shared_ptr<const CudaContext> context, WaitWords& words) noexcept;

  const std::shared_ptr<const CudaContext> context_;
  WaitWords& words_;
  std::uint32_t slot_ = 0;
  std::uint32_t value_ = 0;
  std::atomic<std::uint32_t>* word_ = nullptr;
  std::atomic<bool> set_{false};
  std::atomic<bool> forced_{false};
  std::int64_t until_ns_ = 0;
};

// Held while a caller waits for all work of a GPU and must not wait for streams that wait for words: making an NCCL
// communicator, which loads kernels. No word is given out meanwhile.
class Standstill {
 public:
  // Throws kRouteFailed when words of this context are in use and not set: a stream may be waiting.
  explicit Standstill(const CudaContext& context);
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;

 private:
  WaitWords& words_;
};

// Whether words of this context are in use and not set: a stream may be waiting.
bool words_unset(const CudaContext& context) noexcept;
// Sets all of them by force.
void force_words(const CudaContext& context) noexcept;

}  // namespace kvpool
