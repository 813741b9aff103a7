// The calls that this side makes: how each waits for its answer, and how it ends.
#include <limits>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/peer_calls.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

}  // namespace

// A call whose caller waits in it. Ends once: answered, lost or given up.
class PeerCalls::Awaited final : public PendingAnswer {
 public:
  Awaited(PeerCalls& calls, const Verb& verb) noexcept : calls_(calls), verb_(verb) {}

  void on_answer(Message&& message) override {
    {
      const std::lock_guard lock(mutex_);
      if (message.verb == verb_.number && !over_) {
        answer_ = std::move(message);
        return finish();
      }
      if (message.verb == verb_.number && !given_up_) return;
    }
    calls_.on_late(std::move(message));
  }
  void on_lost(const Error& why) override {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    lost_ = why;
    finish();
  }
  std::int64_t on_tick(std::int64_t /*now_ns*/) override { return kNever; }  // the caller looks at the clock

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Nobody waits any more. False: it was answered, or lost, just now.
  bool give_up() noexcept {
    const std::lock_guard lock(mutex_);
    if (over_) return false;
    return given_up_ = over_ = true;
  }
  // REQUIRES: done(). Throws what ended it.
  Message take() {
    if (lost_) throw Error(*lost_);
    return std::move(answer_);
  }

 private:
  void finish() noexcept {
    over_ = true;
    done_.store(true, std::memory_order_release);
  }

  PeerCalls& calls_;  // calls it
  const Verb& verb_;
  std::mutex mutex_;
  bool over_ = false;
  bool given_up_ = false;
  std::atomic<bool> done_{false};
  Message answer_;
  std::optional<Error> lost_;
};

// A call whose caller is told of the end.
class PeerCalls::Begun final : public PendingAnswer {
 public:
  Begun(PeerCalls& calls, const Verb& verb, std::uint64_t id, std::int64_t until_ns, Done done)
      : calls_(calls), verb_(verb), id_(id), until_ns_(until_ns), done_(std::move(done)) {}

  void on_answer(Message&& message) override {
    if (message.verb != verb_.number) return calls_.on_late(std::move(message));
    if (!claim()) return calls_.on_late(std::move(message));
    calls_.forget(id_);
    if (message.kind == FrameKind::kAnswer) return done_(&message, nullptr);
    const Error refused = calls_.refusal(message);
    done_(nullptr, &refused);
  }
  void on_lost(const Error& why) override {
    if (claim()) done_(nullptr, &why);
  }
  std::int64_t on_tick(std::int64_t now_ns) override {
    if (now_ns < until_ns_) return until_ns_;
    const Error late = calls_.too_late(verb_);  // first: memory may run out, and the next tick tries again
    if (!claim()) return kNever;
    calls_.forget(id_);
    calls_.cancel(verb_, id_);
    done_(nullptr, &late);
    return kNever;
  }
  bool claim() noexcept { return !over_.exchange(true); }

 private:
  PeerCalls& calls_;  // calls it
  const Verb& verb_;
  const std::uint64_t id_;
  const std::int64_t until_ns_;
  const Done done_;
  std::atomic<bool> over_{false};
};

Error PeerCalls::too_late(const Verb& verb) const {
  return Error(ErrorCode::kDeadline, "peer " + peer_ + " did not answer in time: " + verb.name);
}

Message PeerCalls::call(const Verb& verb, std::uint64_t id, Bytes request, const Waiting& waiting,
                        const std::function<void()>& on_sent) {
  const auto open = link_.lock();
  if (open == nullptr) throw_lost();
  const auto pending = std::make_shared<Awaited>(*this, verb);
  expect(id, pending);
  bool sent = false;
  try {
    send(verb, id, std::move(request), waiting.until_ns);
    sent = true;
    if (on_sent) on_sent();
    while (!pending->done() && host_.now_ns() < waiting.until_ns && !ended_.load()) {
      if (open->drive(waiting.slice_ns(host_.now_ns()), [&] { return pending->done(); })) break;
      waiting.check();
    }
  } catch (...) {
    const bool unanswered = pending->give_up();
    forget(id);
    if (sent && unanswered) cancel(verb, id);
    throw;
  }
  const bool late = pending->give_up();
  forget(id);
  if (late) {
    if (ended_.load()) throw_lost();
    cancel(verb, id);
    throw too_late(verb);
  }
  Message answer = pending->take();
  if (answer.kind == FrameKind::kRefused) throw refusal(answer);
  return answer;
}

void PeerCalls::begin(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns, Done done,
                      bool always) {
  const auto begun = std::make_shared<Begun>(*this, verb, id, until_ns, std::move(done));
  expect(id, begun, always);
  try {
    host_.tick_by(until_ns);
    send(verb, id, std::move(request), until_ns);
  } catch (...) {
    forget(id);
    if (begun->claim()) throw;
  }
}

void PeerCalls::expect(std::uint64_t id, std::shared_ptr<PendingAnswer> pending, bool always) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.load()) {
      if (pending_.size() >= host_.limits().transfers_max && !always) {
        throw Error(ErrorCode::kBusy, std::to_string(pending_.size()) + " requests to peer " + peer_ + " are under way",
                    {{"limit", host_.limits().transfers_max}, {"retry_after_us", kRetryAfterUs}});
      }
      pending_.emplace(id, std::move(pending));
      return;
    }
  }
  throw_lost();
}

void PeerCalls::forget(std::uint64_t id) noexcept {
  std::shared_ptr<PendingAnswer> forgotten;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto entry = pending_.find(id);
  if (entry == pending_.end()) return;
  forgotten = std::move(entry->second);
  pending_.erase(entry);
}

std::uint32_t PeerCalls::pending() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint32_t>(pending_.size());
}

}  // namespace kvpool
