// A call that the peer has made, until it is answered.
//
// Invariant
//   Y1  It is answered exactly once, by the first thread that does: with the handler's answer, or with a refusal when
//       the last reference to it is dropped. An answer that cannot be sent ends the link, which counts as an answer.
//
// Thread-safety: all of it. Answers without holding a lock.
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
  // When its caller stops waiting, by this side's clock; INT64_MAX if it has not said.
  std::int64_t deadline_ns() const noexcept { return deadline_ns_; }
  // Whether the caller no longer waits, or the link has ended. It must be answered all the same, although no one
  // receives the answer.
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_acquire); }
  // Calls `told` once, when the call is cancelled, or now if it has been; not after the answer. Must not wait or throw.
  void when_cancelled(std::function<void()> told);

  // The first of these calls counts.
  void answer(Bytes body) noexcept;
  void refuse(const Error& error) noexcept;
  // There is no memory for an answer: the link ends.
  void fail(const Error& why) noexcept;
  // Gives no answer, because the link is about to end and any answer could be wrong.
  void abstain() noexcept { static_cast<void>(claim()); }
  bool answered() const noexcept { return answered_.load(std::memory_order_acquire); }

  // Counts memory of the request until the answer.
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
  bool kept_ = false;  // calls_ may cancel it; under the mutex of calls_
};

using CallPointer = std::shared_ptr<ServedCall>;

}  // namespace kvpool
