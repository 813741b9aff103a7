#include "kvpool/distributed/attend.h"

#include <algorithm>
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

void check_query(std::size_t position, std::uint64_t tokens, std::uint32_t query_tokens) {
  if (query_tokens <= tokens) return;
  throw Error(ErrorCode::kArgument,
              "sequence " + std::to_string(position) + " has " + std::to_string(tokens) +
                  " tokens: the query cannot be its last " + std::to_string(query_tokens),
              {{"position", static_cast<std::int64_t>(position)},
               {"tokens", static_cast<std::int64_t>(tokens)},
               {"query_tokens", query_tokens}});
}

std::uint64_t query_begin(std::uint64_t tokens, std::uint32_t query_tokens) noexcept {
  return tokens - std::min<std::uint64_t>(query_tokens, tokens);
}

}  // namespace

std::shared_ptr<Attend> Attend::start(PeerNode& node, Request&& request, std::int64_t until_ns) {
  auto attend = std::make_shared<Attend>(node, std::move(request));
  attend->send(until_ns);
  return attend;
}

Attend::Attend(PeerNode& node, Request&& request)
    : node_(node), query_heads_(request.query_heads), causal_(request.causal) {
  Pool& pool = node.pool();
  pool.guard();
  AttendRequest here{request.layer, request.query_heads, request.query_dtype, request.scale, request.causal, {}, {}};
  for (std::size_t i = 0; i < request.sequences.size(); ++i) {
    const Entry& entry = request.sequences[i];
    if (&entry.sequence->node() != &node) {
      throw Error(ErrorCode::kNotOwner, "sequence " + std::to_string(i) + " is of another pool",
                  {{"position", static_cast<std::int64_t>(i)}});
    }
    Sequence::Snapshot& snapshot = unsent_.emplace_back(entry.sequence->snapshot());
    if (request.causal) check_query(i, snapshot.tokens, entry.query_tokens);
    tokens_.push_back(snapshot.tokens);
    std::vector<TokenRange>& ranges = here_.emplace_back();
    for (const Sequence::Place& place : snapshot.places) {
      const TokenRange range = entry.sequence->tokens_in(place.blocks, snapshot.tokens);
      if (place.view == nullptr && range.tokens() > 0) ranges.push_back(range);
    }
    here.entries.push_back(
        {std::move(snapshot.here), ranges, entry.query_tokens, query_begin(snapshot.tokens, entry.query_tokens)});
  }
  here.q = std::move(request.q);
  task_.emplace(pool, std::move(here), node.attender());
  add_remote_parts(request);
  make_plan();
}

// REQUIRES: the task has checked the request.
void Attend::add_remote_parts(const Request& request) {
  const bool all_here = std::ranges::all_of(unsent_, [](const Sequence::Snapshot& snapshot) {
    return std::ranges::all_of(snapshot.places, [](const Sequence::Place& place) { return place.view == nullptr; });
  });
  if (all_here) return;
  const std::uint32_t head_dim = node_.pool().layout().format.head_dim;
  RemoteParts parts({request.layer,
                     request.query_heads,
                     request.query_dtype,
                     request.scale,
                     request.causal,
                     Priority::kDecode,
                     {},
                     {}},
                    head_dim);
  std::span<const std::byte> q = task_->queries();
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::uint32_t query_tokens = request.sequences[i].query_tokens;
    const std::size_t bytes =
        std::size_t{query_tokens} * request.query_heads * head_dim * dtype_bytes(request.query_dtype);
    for (const Sequence::Place& place : unsent_[i].places) {
      const TokenRange range = request.sequences[i].sequence->tokens_in(place.blocks, tokens_[i]);
      if (place.view == nullptr || range.tokens() == 0) continue;
      parts.add(*place.view, i, query_tokens, query_begin(tokens_[i], query_tokens), q.first(bytes), range);
    }
    q = q.subspan(bytes);
  }
  remote_ = std::move(parts).take();
  parts_left_.fetch_add(remote_.size());
}

// The plan of this pool has an item for each range, and one for a sequence of which nothing lies here.
void Attend::make_plan() {
  const AttendPlan& here = task_->plan();
  plan_ = {here.kernel, here.threads, {}};
  std::size_t next = 0;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    SequencePlan& plan = plan_.sequences.emplace_back();
    plan.here = here.items[next++];
    for (std::size_t range = 1; range < here_[i].size(); ++range) {
      const AttendPlan::Item& item = here.items[next++];
      plan.here.way = std::max(plan.here.way, item.way);
      plan.here.head_groups = std::max(plan.here.head_groups, item.head_groups);
      plan.here.nodes += item.nodes;
    }
  }
  for (const RemotePart& part : remote_) {
    for (std::size_t i = 0; i < part.positions.size(); ++i) {
      std::uint64_t tokens = 0;
      for (const TokenRange& range : part.asked.items[i].ranges) tokens += range.tokens();
      plan_.sequences[part.positions[i]].there.emplace_back(part.session->peer().name, tokens);
    }
  }
}

// The calls go first: peers compute while this pool does.
void Attend::send(std::int64_t until_ns) {
  for (RemotePart& part : remote_) {
    const auto failure = failure_of([&] {
      PeerCalls& calls = part.session->calls();
      part.id = calls.next_id();
      calls.begin(kAttendVerb, part.id, write_body(part.asked), until_ns,
                  [self = shared_from_this(), &part](const Message* answer, const Error* error) {
                    self->on_answer(part, answer, error);
                  });
    });
    if (failure) on_answer(part, nullptr, &*failure);
  }
  unsent_.clear();
  const bool nothing_here = std::ranges::all_of(here_, [](const auto& ranges) { return ranges.empty(); });
  if (nothing_here) return compute();
  node_.attender().start(Priority::kDecode, [self = shared_from_this()] { self->compute(); });
}

void Attend::compute() noexcept {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, Phase::kComputing)) return;
  const auto failure = failure_of([&] { parts_ = task_->run(); });
  task_.reset();
  phase_.store(Phase::kEnded);
  end_part(failure ? &*failure : nullptr);
}

// An answer that is none to what was asked says that the peer is broken.
void Attend::on_answer(RemotePart& part, const Message* answer, const Error* error) noexcept {
  if (part.over.exchange(true)) return;
  std::optional<Error> failure;
  if (error != nullptr) {
    failure = *error;
  } else {
    failure = failure_of(
        [&] { part.answer = read_attended(answer->body, part.asked, node_.pool().layout().format.head_dim); });
    if (failure && failure->code() == ErrorCode::kProtocol) {
      part.session->calls().close(*failure);
      failure = Error(ErrorCode::kPeerLost, failure->what());
    }
  }
  part.lost = failure && failure->code() == ErrorCode::kPeerLost;
  end_part(failure ? &*failure : nullptr);
}

// The loss of a peer tells a caller most: it goes before other errors.
void Attend::end_part(const Error* error) noexcept {
  if (error != nullptr) {
    const std::lock_guard lock(mutex_);
    if (!error_ || (error->code() == ErrorCode::kPeerLost && error_->code() != ErrorCode::kCancelled)) error_ = *error;
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
  if (!done() && monotonic_ns() < until_ns) compute();
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

std::vector<PartialAttention> Attend::take_parts() {
  const std::uint32_t head_dim = node_.pool().layout().format.head_dim;
  for (RemotePart& part : remote_) {
    for (std::size_t i = 0; i < part.positions.size(); ++i) parts_[part.positions[i]].merge(part.take(i, head_dim));
  }
  return std::exchange(parts_, {});
}

}  // namespace kvpool
