#include "kvpool/transfer/awaited.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;

}  // namespace

AwaitedTransfer::AwaitedTransfer(std::shared_ptr<Session> session, std::uint64_t id, std::int64_t deadline_ns) noexcept
    : session_(std::move(session)), id_(id), deadline_ns_(deadline_ns) {}

void AwaitedTransfer::start_clock() noexcept { started_ns_ = session_->host().now_ns(); }

std::uint64_t AwaitedTransfer::lifetime_ms() const noexcept {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(deadline_ns_ - started_ns_, 0) / kNsPerMs + 1);
}

double AwaitedTransfer::elapsed_us() const noexcept {
  return static_cast<double>(session_->host().now_ns() - started_ns_) / 1e3;
}

void AwaitedTransfer::finish_waiting(TransferKind kind, std::uint64_t bytes, std::optional<Error> error) noexcept {
  SessionHost& host = session_->host();
  if (kind == TransferKind::kFetch) session_->receiver().note_received(bytes);
  host.tally().ended(kind, error, bytes, host.now_ns() - started_ns_);
  finish_uncounted(std::move(error));
}

void AwaitedTransfer::finish_uncounted(std::optional<Error> error) noexcept {
  const auto link = session_->link();
  completion_.finish(std::move(error));
  if (link != nullptr) link->wake();  // a thread that drives the link looks whether this is done
}

bool AwaitedTransfer::wait(std::int64_t until_ns) {
  while (!done()) {
    const auto link = session_->link();
    if (link != nullptr && link->drive(std::min(until_ns, deadline_ns_), [this] { return done(); })) return true;
    const std::int64_t now = session_->host().now_ns();
    if (!done() && now >= deadline_ns_) on_tick(now);
    if (done() || now >= until_ns) break;
    // The link has ended, or the deadline has passed, and a write is under way that has not yet noticed.
    completion_.sleep_until(std::min(until_ns, now + kNsPerMs));
  }
  return done();
}

void AwaitedTransfer::rethrow_if_failed() const {
  KVPOOL_CHECK(completion_.done());
  if (completion_.error()) throw Error(*completion_.error());
}

void AwaitedTransfer::wait_on(const std::shared_ptr<const CudaContext>& /*context*/, CuStream /*stream*/) {
  throw Error(ErrorCode::kState, "a stream can wait for what a fetch brings; this transfer brings nothing here");
}

void AwaitedTransfer::throw_not_streamed() {
  throw Error(ErrorCode::kState, "this transfer was not opened for sending by layers");
}

}  // namespace kvpool
