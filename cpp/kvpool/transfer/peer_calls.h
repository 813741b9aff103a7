// Calls between two pools: a request with a body, and an answer with a body or a refusal. Both sides call, and both
// serve.
//
//   caller                                             the other side
//   kCall: verb, id, lifetime, request ─────────────▶  the handler of the verb; Y1 of served_call.h
//   kCancel: verb, id (it waits no more) ───────────▶  ServedCall::cancelled()
//                                        ◀───────────  kAnswer: verb, id, answer; or kRefused: verb, id, error
//
// A new verb is a constant in verbs.h, its bodies, and one serve(); nothing here, nor in a frame, knows it. A verb that
// nobody serves is refused (kUnsupported), and the link goes on. What cannot be read, or is longer than the verb
// allows, ends the link.
//
// Invariants
//   Y2  A pending answer ends once: answered, lost with the link, or given up by the caller; what arrives for one that
//       was given up goes to when_late() of its verb.
//   Y3  At most transfers_max calls of each verb of the peer are unanswered here; more are refused (kBusy), but for
//       those that free blocks. Of this side as many of all verbs wait for the peer.
//
// Thread-safety: all of it, but serve() and when_late() come before the first message. Lives on while a call is served.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvpool/base/wait.h"
#include "kvpool/net/link.h"
#include "kvpool/transfer/served_call.h"
#include "kvpool/transfer/session_host.h"

namespace kvpool {

// Something that waits for the peer's answer to calls with its id.
class PendingAnswer {
 public:
  virtual ~PendingAnswer() = default;
  virtual void on_answer(Message&& message) = 0;
  virtual void on_lost(const Error& why) = 0;
  // Ends what is too late; returns when to look again, INT64_MAX for never.
  virtual std::int64_t on_tick(std::int64_t now_ns) = 0;
};

class PeerCalls final : public std::enable_shared_from_this<PeerCalls> {
 public:
  // Throws what the call is refused with. kProtocol, for what no pool of ours would ask, ends the link instead.
  using Handler = std::function<void(const CallPointer& call, Bytes&& request)>;
  using Late = std::function<void(Message&& answer)>;
  // The answer, or how the call has failed: called once, from any thread. Must not wait, and must not throw.
  using Done = std::function<void(const Message* answer, const Error* error)>;
  enum class Runs : std::uint8_t {
    kHere,   // in the thread that reads the link: the handler is quick
    kLater,  // on the host's executor, one after another for this peer
  };

  // `owner` is kept while a handler runs.
  PeerCalls(SessionHost& host, std::string peer, const std::shared_ptr<Link>& link, std::weak_ptr<void> owner);

  void serve(const Verb& verb, Runs runs, Handler handler);
  // What an answer is good for that nobody waits for any more. Runs in the thread that reads the link.
  void when_late(const Verb& verb, Late late);

  // --- the caller's side ---
  std::uint64_t next_id() noexcept { return ids_.fetch_add(1, std::memory_order_relaxed); }
  // Calls, and waits for the answer in this thread. Throws what the peer refuses with, kDeadline, kPeerLost,
  // kCancelled, kBusy. `on_sent`: called when the request is on its way.
  Message call(const Verb& verb, std::uint64_t id, Bytes request, const Waiting& waiting,
               const std::function<void()>& on_sent = {});
  // The same without waiting. Throws, and `done` is not called then. The host's tick() ends it at `until_ns`.
  void begin(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns, Done done);
  // For those that wait by themselves: answers with this id go there. Throws kPeerLost, kBusy.
  void expect(std::uint64_t id, std::shared_ptr<PendingAnswer> pending);
  void forget(std::uint64_t id) noexcept;
  // Sends the request. `until_ns`: the time that the peer is told; INT64_MAX: none.
  void send(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns);
  // The same for what the peer has to hear: if it cannot be sent, the link ends. An answer need not be expected.
  void post(const Verb& verb, std::uint64_t id, std::span<const std::byte> request = {}) noexcept;
  // Nobody waits for this call any more.
  void cancel(const Verb& verb, std::uint64_t id) noexcept;
  std::uint32_t pending() const;

  // --- what arrives ---
  // REQUIRES: the message is a call, a cancellation, an answer or a refusal. Throws kProtocol: the link ends.
  void on_message(Message&& message);
  // Whether it may set blocks free.
  bool frees_blocks(const Message& message) const noexcept;
  // Ends what is too late on the caller's side. Returns when to call it again, INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // The peer is lost: what waits for it hears so, and what is served for it is cancelled. Once.
  void end(const Error& why) noexcept;
  void close(const Error& why) noexcept;

 private:
  friend class ServedCall;
  class Awaited;
  class Begun;
  struct Known {
    const Verb* verb;
    Runs runs = Runs::kHere;
    Handler handler;
    Late late;
    // By id, those that were not answered by the time when their handler returned. Others need no cancelling.
    std::unordered_map<std::uint64_t, std::weak_ptr<ServedCall>> served = {};  // under mutex_
  };
  Known& known(const Verb& verb);
  Known* find(std::uint16_t number) noexcept;
  const Known* find(std::uint16_t number) const noexcept;
  void on_call(Message&& message);
  void on_cancel(const Message& message);
  void on_answer(Message&& message);
  void on_late(Message&& message);
  void admit(const Known& known, std::uint64_t id) const;
  void run(const Known& known, const CallPointer& call, Bytes&& request);
  void run_later(const Known& known, const CallPointer& call, Bytes&& request);
  void keep(Known& known, const CallPointer& call);
  void send_answer(ServedCall& call, FrameKind kind, Bytes&& body) noexcept;
  void transmit(Message&& message);
  std::uint32_t lifetime_ms(std::int64_t until_ns) const noexcept;
  Error too_late(const Verb& verb) const;
  [[noreturn]] void throw_lost() const;

  SessionHost& host_;
  const std::string peer_;
  const std::weak_ptr<Link> link_;
  const std::weak_ptr<void> owner_;
  const std::shared_ptr<RequestBytes> request_bytes_ = std::make_shared<RequestBytes>();  // of kLater
  std::vector<Known> known_;                                                              // few
  std::atomic<std::uint64_t> ids_{1};

  mutable std::mutex mutex_;
  std::atomic<bool> ended_{false};  // changed under mutex_
  std::optional<Error> why_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PendingAnswer>> pending_;
};

}  // namespace kvpool
