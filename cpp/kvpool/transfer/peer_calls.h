// Calls between two pools: a request with a body, and an answer with a body or a refusal. Both sides call, and both
// serve.
//
//   caller                                             the other side
//   kCall: verb, id, lifetime, request ─────────────▶  the handler of the verb; Y1 of served_call.h
//   kCancel: verb, id (it waits no more) ───────────▶  ServedCall::cancelled()
//                                        ◀───────────  kAnswer: verb, id, answer; or kRefused: verb, id, error
//
// A new verb needs a constant in verbs.h, its bodies, and one serve(); neither this file nor the frames change. A call
// of a verb without a handler is refused (kUnsupported), and the link stays. A message that cannot be read, or is
// longer than the verb allows, ends the link.
//
// Invariants
//   Y2  A pending answer ends once: answered, lost with the link, or given up by the caller. An answer that arrives
//       after the caller gave up goes to when_late() of its verb.
//   Y3  For each verb, at most transfers_max calls of the peer are unanswered here; more are refused (kBusy), except
//       for verbs that free blocks. At most transfers_max calls of this side, of all verbs together, wait for the peer.
//
// Thread-safety: all of it, except that serve() and when_late() must precede the first message. Lives on while a call
// is served. While the lock is held, nothing is called that could take a lock but the leaves of routes: the session
// asks routes for their costs, and whether they are ready, without it.
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

// Waits for the peer's answers to calls with its id.
class PendingAnswer {
 public:
  virtual ~PendingAnswer() = default;
  virtual void on_answer(Message&& message) = 0;
  virtual void on_lost(const Error& why) = 0;
  // Ends it if its deadline has passed; returns when to call again, INT64_MAX for never.
  virtual std::int64_t on_tick(std::int64_t now_ns) = 0;
};

class PeerCalls final : public std::enable_shared_from_this<PeerCalls> {
 public:
  // An error that it throws refuses the call; kProtocol, for a request that no pool of ours makes, ends the link
  // instead.
  using Handler = std::function<void(const CallPointer& call, Bytes&& request)>;
  using Late = std::function<void(Message&& answer)>;
  // Gets the answer or the error: called once, from any thread. Must not wait or throw.
  using Done = std::function<void(const Message* answer, const Error* error)>;
  enum class Runs : std::uint8_t {
    kHere,   // in the thread that reads the link: the handler is quick
    kLater,  // on the host's executor, one call after another for this peer
  };

  // `owner` is kept alive while a handler runs.
  PeerCalls(SessionHost& host, std::string peer, const std::shared_ptr<Link>& link, std::weak_ptr<void> owner);

  void serve(const Verb& verb, Runs runs, Handler handler);
  // Sets the handler of answers that no caller waits for any more. It runs in the thread that reads the link.
  void when_late(const Verb& verb, Late late);

  // --- the caller's side ---
  std::uint64_t next_id() noexcept { return ids_.fetch_add(1, std::memory_order_relaxed); }
  // Calls, and waits for the answer in this thread. Throws the peer's refusal, kDeadline, kPeerLost, kCancelled, kBusy.
  // `on_sent`: called when the request has been sent.
  Message call(const Verb& verb, std::uint64_t id, Bytes request, const Waiting& waiting,
               const std::function<void()>& on_sent = {});
  // The same without waiting. If this throws, `done` is not called. The host's tick() ends the call at `until_ns`.
  // `always`: however many calls are under way.
  void begin(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns, Done done, bool always = false);
  // Passes answers with this id to `pending`. Throws kPeerLost, kBusy.
  void expect(std::uint64_t id, std::shared_ptr<PendingAnswer> pending, bool always = false);
  void forget(std::uint64_t id) noexcept;
  // Sends the request. `until_ns`: the deadline for the peer; INT64_MAX: none.
  void send(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns);
  // The same for requests that must reach the peer: if this one cannot be sent, the link ends. An answer need not be
  // expected.
  void post(const Verb& verb, std::uint64_t id, std::span<const std::byte> request = {}) noexcept;
  // Tells the peer that no caller waits for this call any more.
  void cancel(const Verb& verb, std::uint64_t id) noexcept;
  std::uint32_t pending() const;
  // For what else ends with the link: the session's link and routes.
  std::mutex& mutex() const noexcept { return mutex_; }
  // Whether the link has ended, or is about to: no call is made or begins to be served any more.
  bool ended() const noexcept { return ended_.load(); }
  // Whether a caller may have been told kPeerLost. Beside ended(): the link takes no message any more, and end() has
  // not been called yet; or the peer has refused a call with this, since its content is gone.
  bool told_lost() const noexcept { return ended() || told_lost_.load(); }

  // --- what arrives ---
  // As LinkHandler::body_bytes_max. A call that nobody serves may be of any length: it is refused, and the link stays.
  std::size_t body_bytes_max(FrameKind kind, std::uint16_t verb) const noexcept;
  // REQUIRES: the message is a call, a cancellation, an answer or a refusal. Throws kProtocol: the link ends.
  void on_message(Message&& message);
  // What a refused call says. REQUIRES: the message is a refusal. Throws kProtocol.
  Error refusal(const Message& answer);
  // Whether the message may free blocks.
  bool frees_blocks(const Message& message) const noexcept;
  // Ends calls of this side whose deadline has passed. Returns when to call it again, INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // The peer is lost: fails all pending answers, and cancels the calls that are served for it. Called once.
  void end(const Error& why) noexcept;
  void close(const Error& why) noexcept;

 private:
  friend class ServedCall;
  static constexpr std::int64_t kRetryAfterUs = 10'000;
  class Awaited;
  class Begun;
  struct Known {
    const Verb* verb;
    Runs runs = Runs::kHere;
    Handler handler;
    Late late;
    // By id: calls that were unanswered when their handler returned. Others need no cancelling.
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
  void note(const Error& error) noexcept;
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
  std::atomic<bool> told_lost_{false};
  std::optional<Error> why_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PendingAnswer>> pending_;
};

}  // namespace kvpool
