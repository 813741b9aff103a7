#include "kvpool/peers/read_fetch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/fetch.h"
#include "kvpool/transfer/strategy.h"
#include "kvpool/transfer/transfer_id.h"
#include "kvpool/views/remote_view.h"

namespace kvpool {

ReadFetch::ReadFetch(std::shared_ptr<Session> session, std::uint64_t incarnation, const FetchRequest& request,
                     bool frees_on_failure, std::unique_ptr<Route> reader)
    : AwaitedTransfer(std::move(session), 0, request.deadline_ns),
      incarnation_(incarnation),
      from_(request.from),
      to_(request.to),
      priority_(request.priority),
      frees_on_failure_(frees_on_failure),
      reader_(std::move(reader)),
      view_(RemoteView::open(session_)) {
  session_->host().blocks().expect_writes(to_, {incarnation, 0});
}

void ReadFetch::start() {
  start_clock();
  const auto self = std::static_pointer_cast<ReadFetch>(shared_from_this());
  try {
    view_->begin_add(0, from_, deadline_ns_, [self](const Error* error) { self->on_held(error); });
  } catch (...) {
    if (!leave(Phase::kAsking, Phase::kDone)) return;  // it was told already
    session_->host().blocks().end_writes(to_);
    throw;
  }
}

// The owner has answered, or cannot.
void ReadFetch::on_held(const Error* error) noexcept {
  if (error != nullptr) {
    const bool refused = error->code() == ErrorCode::kBusy || error->code() == ErrorCode::kUnsupported;
    if (refused && leave(Phase::kAsking, Phase::kWriting)) return ask_to_write();
    if (leave(Phase::kAsking, Phase::kDone)) end(*error);
    return;
  }
  if (!leave(Phase::kAsking, Phase::kReading)) return;
  if (const auto failure = failure_of([&] { read(); })) {
    if (leave(Phase::kReading, Phase::kDone)) end(*failure);
  }
}

// Nobody writes to the destinations yet.
void ReadFetch::ask_to_write() noexcept {
  BlockHost& blocks = session_->host().blocks();
  blocks.end_writes(to_);
  const auto failure = failure_of([&] {
    FetchRequest request;
    request.from = from_;
    request.to = to_;
    request.priority = priority_;
    request.deadline_ns = deadline_ns_;
    const auto fetch =
        std::make_shared<Fetch>(session_, session_->calls().next_id() | kFetchBit, request, frees_on_failure_);
    const auto self = std::static_pointer_cast<ReadFetch>(shared_from_this());
    fetch->when_done([self](const std::optional<Error>& error) { self->on_written(error); });
    {
      const Lock lock(mutex_);
      written_ = fetch;
    }
    try {
      fetch->start();
    } catch (...) {
      fetch->when_done(nullptr);
      const Lock lock(mutex_);
      written_.reset();
      throw;
    }
    if (cancelled_.load()) static_cast<void>(fetch->cancel());
  });
  if (!failure || !leave(Phase::kWriting, Phase::kDone)) return;
  if (frees_on_failure_ && !failure_of([&] { blocks.expect_writes(to_, {incarnation_, 0}); })) blocks.release(to_);
  finish_waiting(TransferKind::kFetch, 0, failure);
}

void ReadFetch::on_written(const std::optional<Error>& error) noexcept {
  if (leave(Phase::kWriting, Phase::kDone)) finish_uncounted(error);  // the other is counted
}

std::shared_ptr<Fetch> ReadFetch::written() const noexcept {
  const Lock lock(mutex_);
  return written_;
}

void ReadFetch::read() {
  {
    const Lock lock(mutex_);
    held_us_ = elapsed_us();
  }
  const BlockRange all{0, from_.size()};
  if (!view_->is_readable(all)) {
    throw Error(ErrorCode::kStaleAddress, "blocks of peer " + session_->peer().name + " were recalled");
  }
  struct Kept {
    std::shared_ptr<ReadFetch> fetch;
    BlockStrip whole;
    ReadableBlocks held;  // until the last byte is copied
  };
  const auto kept = std::make_shared<Kept>(
      Kept{std::static_pointer_cast<ReadFetch>(shared_from_this()), {0, 0, bytes_total() / from_.size()}, {}});
  kept->held = view_->read();
  WriteJob job;
  job.route = reader_;
  job.request.strips = std::span(&kept->whole, 1);
  job.request.from = from_;
  job.request.to = to_;
  job.request.deadline_ns = deadline_ns_;
  job.request.cancelled = &cancelled_;
  job.request.bytes_done = &bytes_done_;
  job.bytes = bytes_total();
  job.priority = priority_;
  job.keep = kept;
  job.done = [kept](const WriteOutcome& outcome, const Error* error) {
    ReadFetch& fetch = *kept->fetch;
    {
      const Lock lock(fetch.mutex_);
      fetch.calls_ = outcome.calls;
    }
    if (!fetch.leave(Phase::kReading, Phase::kDone)) return;
    fetch.end(error != nullptr ? std::optional(*error) : std::nullopt);
  };
  session_->write(std::move(job));
}

// Called once, by the thread that has taken it to kDone.
void ReadFetch::end(std::optional<Error> error) noexcept {
  {
    const Lock lock(mutex_);
    total_us_ = elapsed_us();
  }
  BlockHost& blocks = session_->host().blocks();
  if (error && frees_on_failure_) {
    blocks.release(to_);
  } else {
    blocks.end_writes(to_);
  }
  view_->remove({0, from_.size()});  // told to the owner when nothing reads any more
  const std::uint64_t bytes = error ? 0 : bytes_total();
  finish_waiting(TransferKind::kFetch, bytes, std::move(error));
}

TransferStats ReadFetch::stats() const {
  if (const auto fetch = written()) return fetch->stats();
  TransferStats stats;
  stats.route = "fetch";
  stats.strategy = strategy_name(Strategy::kByRequestAgg);
  stats.blocks = from_.size();
  stats.runs = count_runs(from_, to_);
  stats.bytes = bytes_done();
  const Lock lock(mutex_);
  stats.calls = calls_;
  stats.reserve_us = held_us_;
  stats.write_us = std::max(total_us_ - held_us_, 0.0);
  stats.total_us = total_us_;
  return stats;
}

std::uint64_t ReadFetch::bytes_total() const noexcept {
  return from_.size() * session_->host().blocks().layout().block_bytes();
}

std::uint64_t ReadFetch::bytes_done() const noexcept {
  const auto fetch = written();
  return fetch != nullptr ? fetch->bytes_done() : bytes_done_.load(std::memory_order_relaxed);
}

bool ReadFetch::settled() const noexcept {
  if (!done()) return false;
  const auto fetch = written();
  return fetch == nullptr || fetch->settled();
}

bool ReadFetch::cancel() {
  if (leave(Phase::kAsking, Phase::kDone)) {
    end(Error(ErrorCode::kCancelled, "the fetch from " + session_->peer().name + " was cancelled"));
    return true;
  }
  if (phase_.load() == Phase::kDone) return false;
  cancelled_.store(true);
  if (const auto fetch = written()) return fetch->cancel();
  return true;
}

void ReadFetch::send_layer(std::uint32_t /*layer*/, std::shared_ptr<const DeviceOrder> /*after*/) {
  throw_not_streamed();
}
void ReadFetch::finish() { throw_not_streamed(); }

void ReadFetch::on_answer(Message&& /*message*/) {
  throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
}
void ReadFetch::on_lost(const Error& /*why*/) {}

// While it reads, the deadline ends the read.
std::int64_t ReadFetch::on_tick(std::int64_t now_ns) {
  if (now_ns < deadline_ns_) return deadline_ns_;
  if (leave(Phase::kAsking, Phase::kDone)) {
    end(Error(ErrorCode::kDeadline, "the fetch from " + session_->peer().name + " was not done by its deadline"));
  }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace kvpool
