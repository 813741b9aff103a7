// One attention call over sequences of a pool, for callers that need not wait: its inputs, its progress, its results.
//
// A thread of the pool computes it, or the thread that waits for it, whichever comes first: then a caller that waits at
// once pays for no other thread.
//
// Thread-safety: all of it, but take_parts(). Its holder keeps the pool and the Attender. Dropping the handle does not
// cancel the task.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/attention/attend.h"
#include "kvpool/exec/completion.h"
#include "kvpool/sequences/layer_places.h"
#include "kvpool/sequences/sequence.h"

namespace kvpool {

class Attender;
class Pool;

struct AttendSequence {
  std::shared_ptr<Sequence> sequence;
  std::uint32_t query_tokens = 1;  // the last tokens of the sequence
};

struct AttendRequest {
  std::uint32_t layer = 0;
  std::uint32_t query_heads = 0;
  DType query_dtype = DType::kNone;
  std::optional<float> scale;  // nullopt: 1 / sqrt(head_dim)
  bool causal = true;
  std::vector<AttendSequence> sequences;
  std::vector<std::byte> q;  // [query tokens of all sequences, query head, head_dim]
};

class AttendTask {
 public:
  // Holds the sequences' blocks until it has ended. Throws kArgument for numbers that do not fit the pool or each
  // other, kNotOwner for a sequence of another pool, kState for a closed one, kUnsupported as Sequence.
  AttendTask(Pool& pool, AttendRequest&& request, Attender& attender);
  ~AttendTask();
  AttendTask(const AttendTask&) = delete;
  AttendTask& operator=(const AttendTask&) = delete;

  bool done() const noexcept { return completion_.done(); }
  // Computes it if no thread has begun to, and returns when it is done, or false at `until_ns` (CLOCK_MONOTONIC), which
  // is not looked at while this thread computes.
  bool wait(std::int64_t until_ns);
  // Throws kCancelled, kClosed if the pool was closed before it began, kOutOfMemory.
  void rethrow_if_failed() const;
  // Ends it with kCancelled. Does nothing and returns false when it has begun, or has ended.
  bool cancel() noexcept;
  // An eventfd that becomes readable when it is done; made at the first call, owned by the task.
  int done_fd() { return completion_.descriptor(); }

  // The part of each sequence over all of its tokens; the caller's from now on. REQUIRES: done(), it has not failed,
  // and nobody else calls this meanwhile.
  std::vector<PartialAttention> take_parts() noexcept { return std::exchange(parts_, {}); }
  // Of each sequence, when the task was made.
  const std::vector<std::uint64_t>& tokens() const noexcept { return tokens_; }
  bool causal() const noexcept { return request_.causal; }
  std::uint32_t query_heads() const noexcept { return request_.query_heads; }
  const AttendPlan& plan() const noexcept { return plan_; }

  // For a thread of the pool: computes it if no thread has begun to.
  void run() noexcept;

 private:
  enum class Phase : std::uint8_t { kWaiting, kBegun, kCancelled };
  void check(const Pool& pool) const;
  void begin_readings();
  void end_readings() noexcept;
  void fill_tables();
  AttendCall call() const noexcept;

  Pool& pool_;
  Attender& attender_;
  AttendRequest request_;
  std::optional<LayerPlaces> places_;        // keeps the memory until the task has ended
  std::vector<Sequence::Reading> readings_;  // as many as have begun; empty once they have ended
  std::vector<const std::byte*> tables_;     // K and V of each sequence, one behind the other
  std::vector<AttendItem> items_;
  std::vector<std::uint64_t> tokens_;
  KVRows rows_;
  AttendPlan plan_;
  std::atomic<Phase> phase_{Phase::kWaiting};
  std::vector<PartialAttention> parts_;
  Completion completion_;
};

}  // namespace kvpool
