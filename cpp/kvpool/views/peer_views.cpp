#include "kvpool/views/peer_views.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/loan_watch.h"
#include "kvpool/transfer/verbs.h"
#include "kvpool/views/lent_attends.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 100'000;  // sequences last long
constexpr std::int64_t kStopPeriodNs = 10'000'000;

}  // namespace

// Holding blocks takes longer than the thread that reads links may. A caller waits for the answer to `view` before it
// names the blocks; and what an `attend` reads is held when `unview` comes behind it.
void PeerViews::serve(PeerCalls& calls) {
  const auto self = shared_from_this();
  calls.serve(kViewVerb, PeerCalls::Runs::kLater, [self](const CallPointer& call, Bytes&& request) {
    self->on_view(read_view(request), call);
    call->answer({});
  });
  calls.serve(kUnviewVerb, PeerCalls::Runs::kLater, [self](const CallPointer& call, Bytes&& request) {
    self->on_unview(read_unview(request));
    call->answer({});
  });
  calls.serve(kAttendVerb, PeerCalls::Runs::kHere, [self](const CallPointer& call, Bytes&& request) {
    call->hold(self->request_bytes_->hold(request.size(), self->limits_.request_bytes_max));
    self->on_attend(call, read_attend(request));
  });
}

std::shared_ptr<SequenceBlocks> PeerViews::find(std::uint64_t view) const {
  const std::lock_guard lock(mutex_);
  const auto entry = views_.find(view);
  return entry == views_.end() ? nullptr : entry->second.blocks;
}

// Calls of one peer that change its views run one after another; a recall and the end of the link may come meanwhile.
void PeerViews::on_view(const ViewBody& body, const CallPointer& call) {
  SequenceBlocks::check_pool(pool_);
  if (!attends_.computes() && !(by_mapping_ && body.by_mapping)) {
    throw Error(ErrorCode::kUnsupported, "this pool computes no attention for its peers");
  }
  const std::uint64_t blocks_max = kSequenceTokensMax / pool_.layout().block_tokens;
  if (body.addresses.empty() || body.first + body.addresses.size() > blocks_max) {
    throw Error(ErrorCode::kProtocol, "the peer views block " + std::to_string(body.first) + " of a sequence");
  }
  auto blocks = std::make_shared<SequenceBlocks>(pool_, incarnation_, attends_.reads_gpu());
  {
    const std::lock_guard lock(mutex_);
    if (lost_) throw Error(ErrorCode::kPeerLost, "the link has ended");
    if (blocks_ + body.addresses.size() > limits_.blocks_max) {
      throw Error(ErrorCode::kBusy, std::to_string(blocks_) + " blocks are viewed already",
                  {{"limit", static_cast<std::int64_t>(limits_.blocks_max)},
                   {"requested", static_cast<std::int64_t>(body.addresses.size())},
                   {"retry_after_us", kRetryAfterUs}});
    }
    const auto [entry, is_new] = views_.try_emplace(body.view, View{blocks, by_mapping_ && body.by_mapping});
    if (is_new && views_.size() > limits_.views_max) {
      views_.erase(entry);
      throw Error(ErrorCode::kBusy, "too many views are open",
                  {{"limit", static_cast<std::int64_t>(limits_.views_max)}, {"retry_after_us", kRetryAfterUs}});
    }
    blocks = entry->second.blocks;
  }
  try {
    blocks->add(body.first, body.addresses);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (blocks->blocks() == 0) views_.erase(body.view);
    throw;
  }
  {
    const std::lock_guard lock(mutex_);  // before anything waits: a recall may take some out meanwhile
    blocks_ += body.addresses.size();
  }
  try {
    await_content(body, by_mapping_ && body.by_mapping, call);
  } catch (...) {
    take_out(body.view, *blocks, {body.first, body.addresses.size()});
    throw;
  }
}

// Once, and not for each attention: blocks that were cached may still be filled by the engine's work on the GPU, also
// those in DRAM, which this pool's own attention waits for by itself; and what peers write has arrived when they may
// name it.
void PeerViews::await_content(const ViewBody& body, bool by_mapping, const CallPointer& call) const {
  if (!pool_.on_device()) return;
  if (!by_mapping && std::ranges::find(body.addresses, Medium::kHbm, medium_of) == body.addresses.end()) return;
  const auto given_up = std::make_shared<std::atomic<bool>>(false);
  call->when_cancelled([given_up] { given_up->store(true, std::memory_order_relaxed); });
  try {
    const auto order = pool_.order_of_all_now();
    for (bool ended = false; !ended;) {  // in steps: there are two reasons to stop
      const std::int64_t until_ns = std::min(call->deadline_ns(), monotonic_ns() + kStopPeriodNs);
      const auto failure = failure_of([&] { order->wait(until_ns, given_up.get()); });
      ended = !failure;
      if (attends_.stopping()) throw Error(ErrorCode::kClosed, "the pool was closed before the GPU had ended its work");
      if (failure && (failure->code() != ErrorCode::kDeadline || until_ns == call->deadline_ns()))
        throw Error(*failure);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) pool_.fail(error);
    if (error.code() == ErrorCode::kClosed || error.code() == ErrorCode::kDeviceLost) throw for_peer(error);
    if (error.code() != ErrorCode::kState) throw;
    throw Error(ErrorCode::kBusy, error.what(), {{"retry_after_us", kRetryAfterUs}});  // a CUDA graph is captured
  }
}

void PeerViews::take_out(std::uint64_t view, SequenceBlocks& blocks, const BlockRange& range) noexcept {
  std::size_t removed = 0;
  if (failure_of([&] { removed = blocks.remove(range); })) {
    removed = blocks.blocks();
    blocks.close();
  }
  const std::lock_guard lock(mutex_);
  blocks_ -= removed;
  if (blocks.blocks() == 0) views_.erase(view);
}

void PeerViews::on_unview(const UnviewBody& body) {
  const auto blocks = find(body.view);
  if (blocks == nullptr) return;
  const std::size_t removed = blocks->remove(body.blocks);
  const std::lock_guard lock(mutex_);
  blocks_ -= removed;
  if (blocks->blocks() == 0) views_.erase(body.view);
}

void PeerViews::on_attend(const CallPointer& call, AttendBody&& body) {
  check_bytes(body);
  AttendRequest request;
  request.layer = body.layer;
  request.query_heads = body.query_heads;
  request.query_dtype = body.query_dtype;
  request.scale = body.scale;
  request.causal = body.causal;
  request.q = std::move(body.q);
  request.entries.reserve(body.items.size());
  std::uint64_t query_at = 0;
  for (const AttendBody::Item& item : body.items) {
    const auto blocks = find(item.view);
    if (blocks == nullptr) {
      const TokenRange& range = item.ranges.front();
      throw Error(ErrorCode::kStaleAddress,
                  "the blocks with tokens from " + std::to_string(range.begin) + " on are no longer viewed",
                  {{"begin", static_cast<std::int64_t>(range.begin)},
                   {"end", static_cast<std::int64_t>(range.end)},
                   {"position", static_cast<std::int64_t>(request.entries.size())}});
    }
    if (request.entries.empty() || item.view != body.items[request.entries.size() - 1].view) {
      request.entries.push_back({blocks->read(), {}});
    } else {
      request.entries.push_back({request.entries.back().blocks, {}});  // one reading serves all
    }
    AttendEntry& entry = request.entries.back();
    entry.number = request.entries.size() - 1;
    entry.ranges = item.ranges;
    entry.query_at = query_at;
    entry.query_tokens = item.query_tokens;
    entry.query_begin = item.query_begin;
    query_at += item.query_tokens;
  }
  attends_.start(incarnation_, call, std::move(body), std::move(request));
}

// An answer longer than the verb allows would end the link; and results take memory while they are computed.
void PeerViews::check_bytes(const AttendBody& body) const {
  const PageFormat& format = pool_.layout().format;
  const std::uint64_t query_bytes =
      std::uint64_t{body.query_heads} * format.head_dim * dtype_bytes(body.query_dtype);  // less than 2^64
  std::size_t bytes = kAttendedHeaderBytes;
  std::uint64_t queries = 0;
  for (const AttendBody::Item& item : body.items) {
    queries += item.query_tokens;
    if (query_bytes > body.q.size() / queries) throw Error(ErrorCode::kProtocol, "the peer sends too few queries");
    bytes += attended_bytes(item.ranges, {item.query_tokens, body.query_heads, format.head_dim});
    if (bytes > kAttendVerb.answer_bytes_max) throw Error(ErrorCode::kProtocol, "the peer asks for too long an answer");
  }
}

// A peer that reads through a mapping removes recalled blocks from its views when it no longer reads them.
std::size_t PeerViews::on_recalled(std::span<const Address> addresses) noexcept {
  std::size_t read = 0;
  const auto failure = failure_of([&] {
    const AddressSet recalled(addresses.begin(), addresses.end());
    std::vector<View> views;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [number, view] : views_) views.push_back(view);
    }
    for (const View& view : views) {
      if (view.by_mapping) {
        read += view.blocks->count(recalled);
        continue;
      }
      const std::size_t dropped = view.blocks->drop(recalled);
      const std::lock_guard lock(mutex_);
      blocks_ -= dropped;
    }
  });
  if (failure) on_lost();  // there is no memory to look for them
  return read;
}

bool PeerViews::has_any() const noexcept {
  const std::lock_guard lock(mutex_);
  return !views_.empty();
}

void PeerViews::on_lost() noexcept {
  const std::lock_guard lock(mutex_);
  lost_ = true;
  std::erase_if(views_, [](const auto& entry) { return !entry.second.by_mapping; });
}

void PeerViews::on_reader_gone() noexcept {
  Views views;  // destroyed, and closed, without the lock
  const std::lock_guard lock(mutex_);
  lost_ = true;
  views.swap(views_);
}

bool PeerViews::awaits_proof() const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(views_, [](const auto& entry) { return entry.second.by_mapping; });
}

}  // namespace kvpool
