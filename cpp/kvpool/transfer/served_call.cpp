#include "kvpool/transfer/served_call.h"

#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/peer_calls.h"

namespace kvpool {

ServedCall::ServedCall(std::shared_ptr<PeerCalls> calls, const Verb& verb, std::uint64_t id,
                       std::int64_t deadline_ns) noexcept
    : calls_(std::move(calls)), verb_(verb), id_(id), deadline_ns_(deadline_ns) {}

ServedCall::~ServedCall() {
  if (!answered()) refuse(Error(ErrorCode::kCancelled, std::string(verb_.name) + " was given up before it was done"));
}

void ServedCall::answer(Bytes body) noexcept {
  if (claim()) calls_->send_answer(*this, FrameKind::kAnswer, std::move(body));
}

// A call that was given up because this side disconnects was not cancelled by its caller, who may still be told.
void ServedCall::refuse(const Error& error) noexcept {
  if (!claim()) return;
  Bytes body;
  const auto failure = failure_of([&] {
    const bool parting = error.code() == ErrorCode::kCancelled && calls_->ended();
    body = write_error(parting ? Error(ErrorCode::kPeerLost, "it disconnected before it answered") : for_peer(error));
  });
  if (failure) return calls_->close(*failure);
  calls_->send_answer(*this, FrameKind::kRefused, std::move(body));
}

void ServedCall::fail(const Error& why) noexcept {
  if (claim()) calls_->close(why);
}

void ServedCall::when_cancelled(std::function<void()> told) {
  {
    const std::lock_guard lock(mutex_);
    if (!cancelled()) {
      told_ = std::move(told);
      return;
    }
  }
  told();
}

void ServedCall::cancel() noexcept {
  std::function<void()> told;
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_.exchange(true)) return;
    told.swap(told_);
  }
  if (told && !answered()) told();
}

}  // namespace kvpool
