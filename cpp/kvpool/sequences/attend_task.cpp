#include "kvpool/sequences/attend_task.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"

namespace kvpool {

AttendTask::AttendTask(Pool& pool, AttendRequest&& request, Attender& attender)
    : pool_(pool), attender_(attender), request_(std::move(request)) {
  pool.guard();
  Sequence::check_pool(pool);
  check(pool);
  const Layout& layout = pool.layout();
  places_.emplace(layout, pool.arenas(), request_.layer);
  // The tables name the pieces themselves, whether or not an arena keeps all pieces of a block together.
  rows_ = kv_rows(layout.format, layout.block_tokens, request_.layer, /*aggregated=*/false);
  try {
    begin_readings();
    fill_tables();
    plan_ = explain(call(), attender_.team());
  } catch (...) {
    end_readings();
    throw;
  }
}

AttendTask::~AttendTask() { end_readings(); }

void AttendTask::check(const Pool& pool) const {
  const Layout& layout = pool.layout();
  const std::size_t layers = layout.piece_bytes.size() / layout.format.pieces_per_layer();
  if (request_.layer >= layers) {
    throw Error(
        ErrorCode::kArgument,
        "layer is " + std::to_string(request_.layer) + ", and the blocks have " + std::to_string(layers) + " layers",
        {{"layer", request_.layer}, {"layers", static_cast<std::int64_t>(layers)}});
  }
  for (std::size_t i = 0; i < request_.sequences.size(); ++i) {
    if (&request_.sequences[i].sequence->pool() == &pool) continue;
    throw Error(ErrorCode::kNotOwner, "sequence " + std::to_string(i) + " is of another pool",
                {{"position", static_cast<std::int64_t>(i)}});
  }
}

void AttendTask::begin_readings() {
  readings_.reserve(request_.sequences.size());
  tokens_.reserve(request_.sequences.size());
  for (const AttendSequence& entry : request_.sequences) {
    readings_.push_back(entry.sequence->begin_reading());
    tokens_.push_back(readings_.back().tokens);
  }
}

void AttendTask::end_readings() noexcept {
  for (std::size_t i = 0; i < readings_.size(); ++i) request_.sequences[i].sequence->end_reading();
  readings_.clear();
  places_.reset();
}

void AttendTask::fill_tables() {
  std::size_t blocks = 0;
  for (const Sequence::Reading& reading : readings_) blocks += reading.addresses.size();
  tables_.resize(2 * blocks);
  items_.resize(readings_.size());
  const std::byte** next = tables_.data();
  std::uint64_t query_begin = 0;  // of all sequences' query tokens, one behind the other
  const std::uint64_t query_bytes =
      std::uint64_t{request_.query_heads} * rows_.head_dim * dtype_bytes(request_.query_dtype);
  for (std::size_t i = 0; i < readings_.size(); ++i) {
    const Sequence::Reading& reading = readings_[i];
    const std::uint32_t query_tokens = request_.sequences[i].query_tokens;
    if (request_.causal && query_tokens > reading.tokens) {
      throw Error(ErrorCode::kArgument,
                  "sequence " + std::to_string(i) + " has " + std::to_string(reading.tokens) +
                      " tokens: the query cannot be its last " + std::to_string(query_tokens),
                  {{"position", static_cast<std::int64_t>(i)},
                   {"tokens", static_cast<std::int64_t>(reading.tokens)},
                   {"query_tokens", query_tokens}});
    }
    const std::size_t n = reading.addresses.size();
    places_->fill(reading.addresses, next, next + n);
    AttendItem& item = items_[i];
    item.k_blocks = {next, n};
    item.v_blocks = {next + n, n};
    item.range = {0, reading.tokens};
    item.q = request_.q.data() + query_begin * query_bytes;
    item.query_tokens = query_tokens;
    item.query_begin = reading.tokens - std::min<std::uint64_t>(query_tokens, reading.tokens);
    next += 2 * n;
    query_begin += query_tokens;
  }
  if (query_begin * query_bytes == request_.q.size()) return;
  throw Error(ErrorCode::kArgument,
              "q has " + std::to_string(request_.q.size()) + " bytes, and " + std::to_string(query_begin) +
                  " query tokens have " + std::to_string(query_begin * query_bytes),
              {{"query_tokens", static_cast<std::int64_t>(query_begin)}});
}

AttendCall AttendTask::call() const noexcept {
  AttendCall call;
  call.kv = rows_;
  call.layer = request_.layer;
  call.query_heads = request_.query_heads;
  call.query_dtype = request_.query_dtype;
  call.scale = request_.scale;
  call.causal = request_.causal;
  call.items = items_;
  return call;
}

bool AttendTask::wait(std::int64_t until_ns) {
  if (!done() && monotonic_ns() < until_ns) run();
  if (!done()) completion_.sleep_until(until_ns);
  return done();
}

void AttendTask::rethrow_if_failed() const {
  if (completion_.error()) throw Error(*completion_.error());
}

bool AttendTask::cancel() noexcept {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, Phase::kCancelled)) return false;
  end_readings();
  completion_.finish(Error(ErrorCode::kCancelled, "the attention was cancelled"));
  return true;
}

void AttendTask::run() noexcept {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, Phase::kBegun)) return;
  std::optional<Error> failure = failure_of([&] {
    const Attender::Computing computing(attender_);
    pool_.guard();
    parts_ = attend(call(), attender_.team());
  });
  end_readings();
  completion_.finish(std::move(failure));
}

}  // namespace kvpool
