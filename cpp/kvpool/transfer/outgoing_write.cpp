// Writing what a transfer sends, step by step, and saying so.
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/outgoing.h"

namespace kvpool {
namespace {

double microseconds(std::int64_t ns) noexcept { return static_cast<double>(ns) / 1e3; }

}  // namespace

// Does what comes next. Lets go of the lock.
void Outgoing::advance(Lock& lock) {
  while (!why_ && next_step_ < steps_.size()) {
    if (!write(lock)) return;
  }
  if (why_) return give_up(lock, Error(*why_), why_->code() == ErrorCode::kCancelled);
  if (!finished_) {
    phase_ = Phase::kStreaming;
    return;
  }
  if (is_quiet()) return end(lock, std::nullopt);
  complete(lock);
}

// True: the step has been written, and the lock is held. Else it is written by somebody who goes on then, or nothing is
// any more.
bool Outgoing::write(Lock& lock) {
  phase_ = Phase::kWriting;
  phase_ns_ = session_->host().now_ns();
  const auto self = shared_from_this();  // who ends the write may drop the last other owner
  const auto failure = failure_of([&] {
    WriteJob job = next_job();
    turn_.store(Turn::kGiving);
    lock.unlock();
    session_->write(std::move(job));
  });
  if (failure) {
    if (!lock.owns_lock()) lock.lock();
    give_up(lock, *failure, /*wait_for_peer=*/false);
    return false;
  }
  if (turn_.exchange(Turn::kGiven) != Turn::kEnded) return false;
  lock.lock();
  return true;
}

WriteJob Outgoing::next_job() {
  WriteJob job;
  const WriteStep& step = steps_[next_step_];
  job.route = route_;
  job.request.transfer = id_;
  // A copy: send_layer() may move the steps.
  const auto strips = std::make_shared<std::vector<BlockStrip>>(step.strips);
  const std::shared_ptr<const DeviceOrder>& order = request_.streamed ? layer_orders_[next_step_] : request_.after;
  job.request.strips = *strips;
  job.request.from = std::span(request_.from).subspan(held_);
  job.request.to = write_to_;
  job.request.after = order.get();
  job.request.merge = step.merge;
  job.request.gather = step.merge;
  job.request.deadline_ns = deadline_ns_;
  job.request.cancelled = &stop_;
  job.request.bytes_done = &bytes_done_;
  job.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<const void>>>(strips, order);
  job.priority = request_.priority;
  for (const BlockStrip& strip : *strips) job.bytes += strip.bytes * write_to_.size();
  job.done = [self = std::static_pointer_cast<Outgoing>(shared_from_this())](
                 const WriteOutcome& outcome, const Error* error) { self->on_written(outcome, error); };
  return job;
}

void Outgoing::on_written(const WriteOutcome& outcome, const Error* error) {
  if (error != nullptr && breaks_route(*error)) {
    {
      const Lock lock(mutex_);  // before the link ends, and with it all transfers without another reason
      broken_ = true;
      if (!why_) why_ = *error;
    }
    session_->on_route_broken(*error);
  }
  Lock lock(mutex_);
  KVPOOL_DCHECK(phase_ == Phase::kWriting);
  stats_.calls += outcome.calls;
  stats_.bytes += outcome.bytes;
  const std::int64_t now_ns = session_->host().now_ns();
  stats_.write_us += microseconds(now_ns - phase_ns_);
  phase_ns_ = now_ns;
  ++next_step_;
  if (error != nullptr && !why_) why_ = *error;
  if (session_->lost() && !why_) why_ = Error(ErrorCode::kPeerLost, "peer " + request_.peer + " was lost");
  if (turn_.exchange(Turn::kEnded) != Turn::kGiving) advance(lock);
}

// All is written. The checksum reads the source blocks: that is as much under way as a write, so nothing ends
// meanwhile.
void Outgoing::complete(Lock& lock) {
  phase_ = Phase::kWriting;
  lock.unlock();
  Bytes body;
  const auto failure = failure_of([&] { body = write_body(completion()); });
  lock.lock();
  if (failure && !why_) why_ = failure;
  if (why_) return give_up(lock, Error(*why_), why_->code() == ErrorCode::kCancelled);
  phase_ = Phase::kCompleting;
  phase_ns_ = session_->host().now_ns();
  told_ = true;
  lock.unlock();
  const auto unsent = failure_of([&] { session_->calls().send(kCompleteVerb, id_, std::move(body), deadline_ns_); });
  if (!unsent) return;
  lock.lock();
  told_ = false;
  if (phase_ == Phase::kCompleting) return give_up(lock, *unsent, /*wait_for_peer=*/false);
  if (!std::exchange(lent_, false)) return;
  lock.unlock();  // it ended at its deadline, and left the destinations until the answer
  session_->calls().forget(id_);
  session_->end_named(id_, write_to_, /*still_borrowed=*/true);
}

// REQUIRES: nothing is written any more, nor will be.
CompleteBody Outgoing::completion() const {
  CompleteBody body;
  body.bytes = stats_.bytes;
  body.has_private = request_.private_bytes.has_value();
  if (body.has_private) body.private_bytes = *request_.private_bytes;
  if (named_) {
    body.named = write_to_;
    body.insert = request_.insert;
    if (request_.insert) {
      body.name_space = request_.name_space;
      body.tokens = request_.tokens;
    }
  }
  body.has_checksum = request_.checksum;
  if (request_.checksum) {
    body.checksum = session_->host().blocks().checksum(std::span(request_.from).subspan(held_));
  }
  return body;
}

}  // namespace kvpool
