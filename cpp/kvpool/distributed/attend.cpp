// The course of an attention call: the questions to peers, the computing here, the answers, the end.
#include "kvpool/distributed/attend.h"

#include <algorithm>
#include <new>
#include <string>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"
#include "kvpool/transfer/verbs.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;

// Says which sequence of the batch a peer's refusal is about, where this side has heard of the recall.
Error in_batch(const Error& refused, const RemotePart& part, std::uint32_t block_tokens) {
  if (refused.code() != ErrorCode::kStaleAddress) return refused;
  Error error(ErrorCode::kStaleAddress,
              "peer " + part.session->peer().name + " no longer holds some of the blocks: " + refused.what());
  for (std::size_t i = 0; i < part.positions.size(); ++i) {
    for (const TokenRange& range : part.asked.items[i].ranges) {
      if (part.views[i]->missing(blocks_of(range, block_tokens)).empty()) continue;
      error.add("position", static_cast<std::int64_t>(part.positions[i]));
      error.add("begin", static_cast<std::int64_t>(range.begin));
      error.add("end", static_cast<std::int64_t>(range.end));
      return error;
    }
  }
  return error;
}

// A peer that is too late takes at least as long as it had, and one that is busy a millisecond more than its refusal.
void note_refusal(const RemotePart& part, const Error& error, std::uint64_t token_bytes) noexcept {
  if (error.code() != ErrorCode::kBusy && error.code() != ErrorCode::kDeadline) return;
  constexpr std::int64_t kBusyNs = 1'000'000;
  const std::int64_t now_ns = monotonic_ns();
  const std::int64_t took_ns = now_ns - part.sent_ns + (error.code() == ErrorCode::kBusy ? kBusyNs : 0);
  part.session->attend_pace().record(static_cast<double>(part.tokens * token_bytes), took_ns, now_ns);
}

// A handle that is kept when all is over holds nothing at the peer.
void let_go(RemotePart& part) noexcept {
  part.views.clear();
  part.snapshots.clear();
}

}  // namespace

std::shared_ptr<Attend> Attend::start(PeerNode& node, Request&& request, std::int64_t until_ns) {
  auto attend = std::make_shared<Attend>(node, std::move(request), until_ns);
  attend->send(until_ns);
  return attend;
}

// The calls go first: peers compute while this pool does.
void Attend::send(std::int64_t until_ns) {
  for (RemotePart& part : remote_) {
    const auto failure = failure_of([&] {
      PeerCalls& calls = part.session->calls();
      part.id = calls.next_id();
      part.sent_ns = monotonic_ns();
      calls.begin(kAttendVerb, part.id, write_body(part.asked), until_ns,
                  [self = shared_from_this(), &part](const Message* answer, const Error* error) {
                    self->on_answer(part, answer, error);
                  });
    });
    if (failure) on_answer(part, nullptr, &*failure);
  }
  unsent_.clear();
  const bool nothing_here = std::ranges::all_of(
      plan_.sequences, [](const SequencePlan& plan) { return plan.here.nodes == 0 && plan.gpu_tokens == 0; });
  if (nothing_here) return compute();
  node_.attender().start(Priority::kDecode, [self = shared_from_this()] { self->compute(); });
}

void Attend::compute() noexcept {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, Phase::kComputing)) return;
  const auto failure = failure_of([&] {
    std::vector<PartialAttention> parts = task_->run();
    for (std::size_t i = tokens_.size(); i < parts.size(); ++i) parts[positions_[i]].merge(std::move(parts[i]));
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(tokens_.size()), parts.end());
    parts_ = std::move(parts);
  });
  task_.reset();
  phase_.store(Phase::kEnded);
  end_part(failure ? &*failure : nullptr);
}

// An answer to another question says that the peer is broken.
void Attend::on_answer(RemotePart& part, const Message* answer, const Error* error) noexcept {
  if (part.over.exchange(true)) return;
  std::optional<Error> failure;
  if (error != nullptr) {
    note_refusal(part, *error, token_bytes());
    const bool has_no_time = error->code() == ErrorCode::kBusy || error->code() == ErrorCode::kUnsupported;
    if (has_no_time && where_ == AttendWhere::kAuto && begin_here(part, *error)) return;
    failure = in_batch(*error, part, node_.pool().layout().block_tokens);
  } else {
    const std::int64_t now_ns = monotonic_ns();
    part.session->attend_pace().record(static_cast<double>(part.tokens * token_bytes()), now_ns - part.sent_ns, now_ns);
    failure = failure_of(
        [&] { part.answer = read_attended(answer->body, part.asked, node_.pool().layout().format.head_dim); });
    if (failure && failure->code() == ErrorCode::kProtocol) {
      part.session->calls().close(*failure);
      failure = Error(ErrorCode::kPeerLost, failure->what());
    }
  }
  part.lost = failure && failure->code() == ErrorCode::kPeerLost;
  let_go(part);
  end_part(failure ? &*failure : nullptr);
}

// A peer that has too much to do leaves its memory to be read from here.
bool Attend::begin_here(RemotePart& part, const Error& refused) noexcept {
  if (!std::ranges::all_of(part.views, [](const auto& view) { return view->is_mapped(); })) return false;
  return !failure_of([&] {
    node_.attender().start(Priority::kDecode,
                           [self = shared_from_this(), &part, refused] { self->compute_refused(part, refused); });
  });
}

void Attend::compute_refused(RemotePart& part, const Error& refused) noexcept {
  const auto failure = failure_of([&] {
    AttendBody& asked = part.asked;
    AttendRequest request{asked.layer, asked.query_heads, asked.query_dtype, asked.scale, asked.causal, {}, asked.q};
    std::uint64_t query_tokens = 0;
    for (std::size_t i = 0; i < asked.items.size(); ++i) {
      const AttendBody::Item& item = asked.items[i];
      request.entries.push_back(
          {part.views[i]->read(), item.ranges, query_tokens, item.query_tokens, item.query_begin, part.positions[i]});
      query_tokens += item.query_tokens;
    }
    AttendTask task(node_.pool(), std::move(request), query_tokens, node_.attender());
    std::vector<PartialAttention> parts = task.run();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      part.answer.items.push_back({asked.items[i].view, std::move(parts[i]).take_nodes()});
    }
  });
  part.lost = failure && failure->code() == ErrorCode::kPeerLost;
  let_go(part);
  end_part(!failure ? nullptr : part.lost ? &*failure : &refused);
}

// What the caller did itself goes before the loss of a peer, and that before other errors.
void Attend::end_part(const Error* error) noexcept {
  if (error != nullptr) {
    const std::lock_guard lock(mutex_);
    const auto weight = [](const Error& one) {
      return one.code() == ErrorCode::kCancelled ? 2 : one.code() == ErrorCode::kPeerLost ? 1 : 0;
    };
    if (!error_ || weight(*error) > weight(*error_)) error_ = *error;
  }
  if (parts_left_.fetch_sub(1) > 1) return;
  completion_.finish(error_);
  if (waiting_.load() == 0) return;
  for (const RemotePart& part : remote_) {
    if (const auto link = part.session->link()) link->wake();
  }
}

RemotePart* Attend::unanswered() noexcept {
  const auto part = std::ranges::find_if(remote_, [](const RemotePart& one) { return !one.over.load(); });
  return part == remote_.end() ? nullptr : &*part;
}

bool Attend::wait(std::int64_t until_ns) {
  // Behind a stream that still works a thread of the pool waits: this one has its own time to keep.
  const bool is_ready = order_ == nullptr || order_->ended();
  if (is_ready && !done() && monotonic_ns() < until_ns) compute();
  waiting_.fetch_add(1);
  while (!done()) {
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns >= until_ns) break;
    RemotePart* const part = unanswered();
    const auto link = part == nullptr ? nullptr : part->session->link();
    if (link != nullptr && link->drive(until_ns, [&] { return done() || part->over.load(); })) continue;
    // Another thread computes, or the link has ended and another thread is about to say so.
    if (!done()) completion_.sleep_until(part == nullptr ? until_ns : std::min(until_ns, now_ns + kNsPerMs));
  }
  waiting_.fetch_sub(1);
  return done();
}

void Attend::rethrow_if_failed() const {
  if (completion_.error()) throw Error(*completion_.error());
}

bool Attend::cancel() noexcept {
  if (done()) return false;
  Phase before = Phase::kWaiting;
  const bool claimed = phase_.compare_exchange_strong(before, Phase::kCancelled);
  if (!claimed && before != Phase::kEnded) return false;
  const Error cancelled(ErrorCode::kCancelled, "the attention was cancelled");
  bool ended = claimed;
  for (RemotePart& part : remote_) {
    if (part.over.exchange(true)) continue;
    ended = true;
    part.session->calls().cancel(kAttendVerb, part.id);
    part.session->calls().forget(part.id);
    let_go(part);
    end_part(&cancelled);
  }
  if (claimed) {
    task_.reset();
    end_part(&cancelled);
  }
  return ended;
}

std::vector<Attend::Lost> Attend::lost() const {
  std::vector<Lost> lost;
  for (const RemotePart& part : remote_) {
    if (!part.lost) continue;
    for (std::size_t i = 0; i < part.positions.size(); ++i) {
      auto one = std::ranges::find(lost, part.positions[i], &Lost::position);
      if (one == lost.end()) one = lost.insert(lost.end(), {part.positions[i], {}});
      one->ranges.insert(one->ranges.end(), part.asked.items[i].ranges.begin(), part.asked.items[i].ranges.end());
    }
  }
  return lost;
}

void Attend::merge() {
  const std::lock_guard lock(merging_);
  if (merged_ == Merged::kAll) return;
  if (merged_ == Merged::kHalf) throw std::bad_alloc();
  merged_ = Merged::kHalf;
  const std::uint32_t head_dim = node_.pool().layout().format.head_dim;
  for (RemotePart& part : remote_) {
    for (std::size_t i = 0; i < part.positions.size(); ++i) parts_[part.positions[i]].merge(part.take(i, head_dim));
  }
  merged_ = Merged::kAll;
}

}  // namespace kvpool
