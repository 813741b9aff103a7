// A call that the peer has made, until it is answered.
//
// Invariant
//   Y1  It is answered exactly once, by whichever thread comes first: by what its handler says, or with a refusal when
//       everybody who could answer has let go of it. An answer that cannot be sent ends the link, which is an answer,
//       too.
//
// Thread-safety: all of it. Nothing is locked while it is answered.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/net/wire.h"
#include "kvpool/transfer/request_bytes.h"
#include "kvpool/transfer/verbs.h"

namespace kvpool {

class PeerCalls;

class ServedCall {
 public:
  ServedCall(std::shared_ptr<PeerCalls> calls, const Verb& verb, std::uint64_t id, std::int64_t deadline_ns) noexcept;
  ~ServedCall();
  ServedCall(const ServedCall&) = delete;
  ServedCall& operator=(const ServedCall&) = delete;

  const Verb& verb() const noexcept { return verb_; }
  std::uint64_t id() const noexcept { return id_; }
  // When its caller stops waiting, by this side's clock; INT64_MAX where it does not say.
  std::int64_t deadline_ns() const noexcept { return deadline_ns_; }
  // The caller waits no more, or the link has ended: whatever is answered, nobody hears it. An answer is due all the
  // same.
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_acquire); }
  // Called once, when it is cancelled, or at once when it has been; not after the answer. Must not wait or throw.
  void when_cancelled(std::function<void()> told);

  // The first of these counts.
  void answer(Bytes body) noexcept;
  void refuse(const Error& error) noexcept;
  // There is no memory for an answer: the link ends.
  void fail(const Error& why) noexcept;
  // No answer, for the link is about to end: any would say too much.
  void abstain() noexcept { static_cast<void>(claim()); }
  bool answered() const noexcept { return answered_.load(std::memory_order_acquire); }

  // Memory of the request that lives until the answer.
  void hold(RequestBytes::Held bytes) noexcept { held_ = std::move(bytes); }

 private:
  friend class PeerCalls;
  void cancel() noexcept;
  bool claim() noexcept { return !answered_.exchange(true); }

  const std::shared_ptr<PeerCalls> calls_;
  const Verb& verb_;
  const std::uint64_t id_;
  const std::int64_t deadline_ns_;
  std::atomic<bool> answered_{false};
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::function<void()> told_;  // under mutex_
  RequestBytes::Held held_;
  bool kept_ = false;  // it is among those that calls_ may cancel; under its mutex
};

using CallPointer = std::shared_ptr<ServedCall>;

}  // namespace kvpool
