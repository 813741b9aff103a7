// What each part of an attention call is computed by: this pool, over its blocks or over mapped memory of peers, or a
// peer. It is decided when the call is made.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/distributed/attend.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"

namespace kvpool {
namespace {

void check_query(std::size_t position, std::uint64_t tokens, std::uint32_t query_tokens) {
  if (query_tokens <= tokens) return;
  throw Error(ErrorCode::kArgument,
              "sequence " + std::to_string(position) + " has " + std::to_string(tokens) +
                  " tokens: the query cannot be its last " + std::to_string(query_tokens),
              {{"position", static_cast<std::int64_t>(position)},
               {"tokens", static_cast<std::int64_t>(tokens)},
               {"query_tokens", query_tokens}});
}

// About how many of the range's tokens, which are in `blocks`, a GPU attends to.
std::uint64_t tokens_on_gpu(const Pool& pool, const ReadableBlocks& here, const BlockRange& blocks,
                            const TokenRange& range) noexcept {
  if (!pool.on_device()) return 0;
  const auto addresses = here.runs->find(blocks);
  if (!addresses) return 0;
  const auto on_gpu = static_cast<std::uint64_t>(std::ranges::count(*addresses, Medium::kHbm, medium_of));
  return std::min(on_gpu * pool.layout().block_tokens, range.tokens());
}

std::uint64_t query_begin(std::uint64_t tokens, std::uint32_t query_tokens) noexcept {
  return tokens - std::min<std::uint64_t>(query_tokens, tokens);
}

}  // namespace

Attend::Attend(PeerNode& node, Request&& request, std::int64_t until_ns)
    : node_(node), query_heads_(request.query_heads), causal_(request.causal), where_(request.where) {
  Pool& pool = node.pool();
  pool.guard();
  AttendRequest here{request.layer, request.query_heads, request.query_dtype, request.scale, request.causal, {}, {}};
  here.follows = true;
  here.stream = request.stream;
  here.follows_until_ns = until_ns;
  std::uint64_t query_tokens = 0;
  std::uint64_t own_tokens = 0;
  for (std::size_t i = 0; i < request.sequences.size(); ++i) {
    const Entry& entry = request.sequences[i];
    if (&entry.sequence->node() != &node) {
      throw Error(ErrorCode::kNotOwner, "sequence " + std::to_string(i) + " is of another pool",
                  {{"position", static_cast<std::int64_t>(i)}});
    }
    Sequence::Snapshot& snapshot = unsent_.emplace_back(entry.sequence->snapshot());
    if (request.causal) check_query(i, snapshot.tokens, entry.query_tokens);
    tokens_.push_back(snapshot.tokens);
    query_at_.push_back(query_tokens);
    std::vector<TokenRange> ranges;
    for (const Sequence::Place& place : snapshot.places) {
      const TokenRange range = entry.sequence->tokens_in(place.blocks, snapshot.tokens);
      if (place.view != nullptr || range.tokens() == 0) continue;
      ranges.push_back(range);
      own_tokens += range.tokens() - tokens_on_gpu(pool, snapshot.here, place.blocks, range);
    }
    here.entries.push_back({std::move(snapshot.here), std::move(ranges), query_tokens, entry.query_tokens,
                            query_begin(snapshot.tokens, entry.query_tokens), i});
    query_tokens += entry.query_tokens;
  }
  std::vector<Away> away = find_away(request);
  choose_ways(away, request.where, own_tokens);
  add_entries_here(here, away);
  here.q = std::move(request.q);
  task_.emplace(pool, std::move(here), query_tokens, node.attender());
  order_ = task_->order();
  add_remote_parts(request, away);
  make_plan(away);
}

std::uint64_t Attend::token_bytes() const noexcept { return kv_token_bytes(node_.pool().layout().format); }

std::vector<Attend::Away> Attend::find_away(const Request& request) const {
  std::vector<Away> away;
  for (std::size_t i = 0; i < unsent_.size(); ++i) {
    for (const Sequence::Place& place : unsent_[i].places) {
      if (place.view == nullptr) continue;
      const TokenRange range = request.sequences[i].sequence->tokens_in(place.blocks, tokens_[i]);
      if (range.tokens() == 0) continue;
      const bool readable = !place.view->session().lost() && place.view->is_readable(place.blocks);
      away.push_back({i, place.view, range, readable});
    }
  }
  return away;
}

// Blocks that were recalled, or whose peer is lost, are asked for there: the answer says what became of them.
void Attend::choose_ways(std::vector<Away>& away, AttendWhere where, std::uint64_t own_tokens) const {
  if (away.empty() || where == AttendWhere::kThere) return;
  std::vector<const Session*> sessions;
  std::vector<PeerOption> peers;
  for (const Away& one : away) {
    Session& session = one.view->session();
    if (where == AttendWhere::kHere && !one.view->is_mapped() && !session.lost()) {
      throw Error(ErrorCode::kUnsupported,
                  "the memory of peer " + session.peer().name + " is not mapped here: it cannot be read from here");
    }
    const auto at = static_cast<std::size_t>(std::ranges::find(sessions, &session) - sessions.begin());
    if (at == sessions.size()) {
      sessions.push_back(&session);
      peers.push_back({&session.attend_pace(), 0, true});
    }
    peers[at].bytes += one.range.tokens() * token_bytes();
    peers[at].readable = peers[at].readable && one.readable;
  }
  std::vector<bool> from_here(peers.size(), true);
  if (where == AttendWhere::kAuto) {
    from_here = read_from_here(own_tokens * token_bytes(), node_.attender().pace(), peers, monotonic_ns());
  }
  for (Away& one : away) {
    const auto at = static_cast<std::size_t>(std::ranges::find(sessions, &one.view->session()) - sessions.begin());
    one.from_here = from_here[at] && one.readable;
  }
}

// An entry for each view of which something is read from here, behind those of the sequences.
void Attend::add_entries_here(AttendRequest& here, std::vector<Away>& away) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) positions_.push_back(i);
  const RemoteView* last = nullptr;
  for (Away& one : away) {
    if (!one.from_here) continue;
    if (one.view.get() == last && positions_.back() == one.position) {
      here.entries.back().ranges.push_back(one.range);
      continue;
    }
    std::optional<ReadableBlocks> blocks;
    const auto failure = failure_of([&] { blocks = one.view->read(); });
    if (failure && failure->code() != ErrorCode::kPeerLost) throw Error(*failure);
    const BlockRange wanted = blocks_of(one.range, node_.pool().layout().block_tokens);
    if (failure || !blocks->runs->find(wanted)) {  // the peer says what became of it
      one.from_here = false;
      continue;
    }
    const AttendEntry& own = here.entries[one.position];
    here.entries.push_back(
        {std::move(*blocks), {one.range}, own.query_at, own.query_tokens, own.query_begin, one.position});
    positions_.push_back(one.position);
    last = one.view.get();
  }
}

// REQUIRES: the task has checked the request.
void Attend::add_remote_parts(const Request& request, const std::vector<Away>& away) {
  if (std::ranges::all_of(away, &Away::from_here)) return;
  const std::uint32_t head_dim = node_.pool().layout().format.head_dim;
  const std::size_t query_bytes = std::size_t{query_heads_} * head_dim * dtype_bytes(request.query_dtype);
  RemoteParts parts({request.layer,
                     request.query_heads,
                     request.query_dtype,
                     request.scale,
                     request.causal,
                     Priority::kDecode,
                     {},
                     {}},
                    head_dim);
  for (const Away& one : away) {
    if (one.from_here) continue;
    const std::uint32_t query_tokens = request.sequences[one.position].query_tokens;
    const auto q = task_->queries().subspan(query_at_[one.position] * query_bytes, query_tokens * query_bytes);
    parts.add(one.view, one.position, query_tokens, query_begin(tokens_[one.position], query_tokens), q, one.range);
  }
  remote_ = std::move(parts).take();
  parts_left_.fetch_add(remote_.size());
  if (where_ != AttendWhere::kAuto) return;
  for (RemotePart& part : remote_) {  // what the peer refuses may be computed here, over the same blocks
    for (const std::size_t position : part.positions) part.snapshots.push_back(unsent_[position].removals);
  }
}

void Attend::make_plan(const std::vector<Away>& away) {
  plan_ = {task_->kernel(), node_.attender().gpu_kernel(), task_->threads(), std::vector<SequencePlan>(tokens_.size())};
  for (std::size_t entry = 0; entry < task_->plans().size(); ++entry) {
    const AttendTask::EntryPlan& of_entry = task_->plans()[entry];
    SequencePlan& plan = plan_.sequences[positions_[entry]];
    plan.here.way = std::max(plan.here.way, of_entry.on_cpu.way);
    plan.here.head_groups = std::max(plan.here.head_groups, of_entry.on_cpu.head_groups);
    plan.here.nodes += of_entry.on_cpu.nodes;
    plan.gpu_tokens += of_entry.gpu_tokens;
  }
  for (const Away& one : away) {
    SequencePlan& plan = plan_.sequences[one.position];
    SequencePlan::Tokens& peers = one.from_here ? plan.mapped : plan.there;
    const std::string& name = one.view->session().peer().name;
    const auto known = std::ranges::find(peers, name, &SequencePlan::Tokens::value_type::first);
    if (known == peers.end()) {
      peers.emplace_back(name, one.range.tokens());
    } else {
      known->second += one.range.tokens();
    }
  }
}

}  // namespace kvpool
