// One attention call over sequences, for callers that need not wait: what lies here is computed here, the query goes to
// what lies with peers, and the parts are merged (DistAttention, section 4.2).
//
// The part of this pool is computed by a thread of the pool, or by the thread that waits for it, whichever comes first:
// then a caller that waits at once pays for no other thread.
//
// Thread-safety: all of it, but take_parts(). Its holder keeps the node. Dropping the handle does not cancel it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/attention/partial.h"
#include "kvpool/distributed/remote_part.h"
#include "kvpool/distributed/sequence.h"
#include "kvpool/distributed/way_choice.h"
#include "kvpool/exec/completion.h"
#include "kvpool/sequences/attend_task.h"

namespace kvpool {

class PeerNode;

class Attend : public std::enable_shared_from_this<Attend> {
 public:
  struct Entry {
    std::shared_ptr<Sequence> sequence;
    std::uint32_t query_tokens = 1;  // with `causal`, the last tokens of the sequence
  };
  struct Request {
    std::uint32_t layer = 0;
    std::uint32_t query_heads = 0;
    DType query_dtype = DType::kNone;
    std::optional<float> scale;  // nullopt: 1 / sqrt(head_dim)
    bool causal = true;
    AttendWhere where = AttendWhere::kAuto;
    std::vector<Entry> sequences;
    std::vector<std::byte> q;  // [query tokens of all sequences, query head, head_dim]
    CallerStream stream;       // whose work so far may write to blocks on the GPU; nullopt: that of all streams
  };

  // Peers have until `until_ns` (CLOCK_MONOTONIC). Throws kUnsupported with kHere when a peer's memory is not mapped
  // here; kArgument for numbers that do not fit the pool or each other,
  // kNotOwner for a sequence of another pool, kState for a closed one, kUnsupported as Sequence and
  // as plan_leaves(); kArgument for a stream of another device, and any where the pool is not on a GPU.
  static std::shared_ptr<Attend> start(PeerNode& node, Request&& request, std::int64_t until_ns);

  Attend(PeerNode& node, Request&& request, std::int64_t until_ns = INT64_MAX);  // use start()
  Attend(const Attend&) = delete;
  Attend& operator=(const Attend&) = delete;

  bool done() const noexcept { return completion_.done(); }
  // Computes what is to be computed here if no thread has begun to and no stream has to be waited for, and returns when
  // all is done, or false at `until_ns`, which is not looked at while this thread computes.
  bool wait(std::int64_t until_ns);
  // Throws kCancelled; kClosed if the pool was closed before it began; kOutOfMemory; kPeerLost if a peer is lost that
  // had a part (see lost()), and what a peer refused it with: kBusy, kStaleAddress (blocks that it recalled),
  // kDeadline; kDeadline also when the work of `stream` has not ended in time, kDeviceLost.
  void rethrow_if_failed() const;
  // Ends it with kCancelled. Does nothing and returns false while this pool computes its part, and when it has ended.
  bool cancel() noexcept;
  // An eventfd that becomes readable when it is done; made at the first call, owned by this.
  int done_fd() { return completion_.descriptor(); }

  // Of a sequence of the batch: tokens whose part a lost peer had.
  struct Lost {
    std::size_t position = 0;
    std::vector<TokenRange> ranges;
  };
  // REQUIRES: done().
  std::vector<Lost> lost() const;

  // Merges what peers have computed with what this pool has; again, it does nothing. REQUIRES: done(), it has not
  // failed. Throws std::bad_alloc: then every later call does, too.
  void merge();
  // The part of each sequence over all of its tokens; the caller's from now on. REQUIRES: merge(), and nobody else
  // calls this meanwhile.
  std::vector<PartialAttention> take_parts() noexcept { return std::exchange(parts_, {}); }
  // Of each sequence, when the call was made.
  const std::vector<std::uint64_t>& tokens() const noexcept { return tokens_; }
  bool causal() const noexcept { return causal_; }
  std::uint32_t query_heads() const noexcept { return query_heads_; }

  struct SequencePlan {
    AttendPlan::Item here;
    std::uint64_t gpu_tokens = 0;                                       // that this pool's GPU attends to
    using Tokens = std::vector<std::pair<std::string, std::uint64_t>>;  // of peers
    Tokens there;                                                       // that each attends to
    Tokens mapped;                                                      // that this pool reads in their memory
  };
  struct Plan {
    KernelId kernel;
    std::optional<KernelId> gpu_kernel;
    int threads = 1;
    std::vector<SequencePlan> sequences;
  };
  const Plan& plan() const noexcept { return plan_; }

 private:
  enum class Phase : std::uint8_t { kWaiting, kComputing, kEnded, kCancelled };
  // Tokens of a sequence in a place at a peer.
  struct Away {
    std::size_t position;
    std::shared_ptr<RemoteView> view;
    TokenRange range;
    bool readable;
    bool from_here = false;
  };
  std::vector<Away> find_away(const Request& request) const;
  void choose_ways(std::vector<Away>& away, AttendWhere where, std::uint64_t own_tokens) const;
  void add_entries_here(AttendRequest& here, std::vector<Away>& away);
  void add_remote_parts(const Request& request, const std::vector<Away>& away);
  void make_plan(const std::vector<Away>& away);
  std::uint64_t token_bytes() const noexcept;
  void send(std::int64_t until_ns);
  void compute() noexcept;
  void on_answer(RemotePart& part, const Message* answer, const Error* error) noexcept;
  bool begin_here(RemotePart& part, const Error& refused) noexcept;
  void compute_refused(RemotePart& part, const Error& refused) noexcept;
  void end_part(const Error* error) noexcept;
  RemotePart* unanswered() noexcept;

  PeerNode& node_;
  const std::uint32_t query_heads_;
  const bool causal_;
  std::vector<std::uint64_t> tokens_;
  Plan plan_;
  const AttendWhere where_;
  std::vector<std::uint64_t> query_at_;       // in q, of each sequence
  std::vector<std::size_t> positions_;        // in the batch, of each entry of the task: first all sequences in order
  std::optional<AttendTask> task_;            // until it was computed
  std::shared_ptr<const DeviceOrder> order_;  // of the GPU's part; null: nothing to follow
  std::vector<RemotePart> remote_;            // does not change after send() has begun
  std::vector<Sequence::Snapshot> unsent_;    // until peers have been asked
  std::vector<PartialAttention> parts_;       // of this pool
  std::atomic<Phase> phase_{Phase::kWaiting};
  std::atomic<std::size_t> parts_left_{1};  // parts that have not ended: this pool's, and those of peers
  std::atomic<int> waiting_{0};             // threads in wait()
  std::mutex merging_;
  enum class Merged : std::uint8_t { kNot, kHalf, kAll } merged_ = Merged::kNot;  // under merging_
  mutable std::mutex mutex_;                                                      // guards the next
  std::optional<Error> error_;
  Completion completion_;
};

}  // namespace kvpool
