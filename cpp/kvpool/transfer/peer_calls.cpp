#include "kvpool/transfer/peer_calls.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/failure.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kLifetimeMsMax = 1LL << 30;

}  // namespace

PeerCalls::PeerCalls(SessionHost& host, std::string peer, const std::shared_ptr<Link>& link, std::weak_ptr<void> owner)
    : host_(host), peer_(std::move(peer)), link_(link), owner_(std::move(owner)) {}

// --- verbs ---

PeerCalls::Known* PeerCalls::find(std::uint16_t number) noexcept {
  const auto entry = std::ranges::find_if(known_, [&](const Known& one) { return one.verb->number == number; });
  return entry == known_.end() ? nullptr : &*entry;
}

const PeerCalls::Known* PeerCalls::find(std::uint16_t number) const noexcept {
  return const_cast<PeerCalls*>(this)->find(number);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

PeerCalls::Known& PeerCalls::known(const Verb& verb) {
  KVPOOL_CHECK(verb.number != 0);
  if (Known* const before = find(verb.number)) {
    KVPOOL_CHECK(before->verb == &verb);  // two verbs with one number
    return *before;
  }
  return known_.emplace_back(Known{.verb = &verb, .handler = {}, .late = {}});
}

void PeerCalls::serve(const Verb& verb, Runs runs, Handler handler) {
  Known& one = known(verb);
  KVPOOL_CHECK(!one.handler);
  one.runs = runs;
  one.handler = std::move(handler);
}

void PeerCalls::when_late(const Verb& verb, Late late) { known(verb).late = std::move(late); }

bool PeerCalls::frees_blocks(const Message& message) const noexcept {
  const Known* const one = find(message.verb);
  if (one == nullptr) return false;
  if (message.kind == FrameKind::kCall) return one->verb->frees_blocks;
  return message.kind != FrameKind::kCancel && one->verb->answer_frees_blocks;
}

// --- what is sent ---

void PeerCalls::transmit(Message&& message) {
  const auto open = link_.lock();
  if (open == nullptr) throw_lost();
  try {
    open->send(std::move(message));
  } catch (const Error& error) {
    note(error);
    throw;
  }
}

void PeerCalls::note(const Error& error) noexcept {
  if (error.code() == ErrorCode::kPeerLost) told_lost_.store(true);
}

Error PeerCalls::refusal(const Message& answer) {
  Error refused = read_error(answer.body);
  note(refused);
  return refused;
}

void PeerCalls::close(const Error& why) noexcept {
  told_lost_.store(true);
  if (const auto open = link_.lock()) open->close(why);
}

void PeerCalls::throw_lost() const {
  const std::lock_guard lock(mutex_);
  throw why_ ? Error(*why_) : Error(ErrorCode::kPeerLost, "peer " + peer_ + " was lost");
}

std::uint32_t PeerCalls::lifetime_ms(std::int64_t until_ns) const noexcept {
  if (until_ns == kNever) return 0;
  const std::int64_t left_ms = std::max<std::int64_t>(until_ns - host_.now_ns(), 0) / kNsPerMs + 1;
  return static_cast<std::uint32_t>(std::min(left_ms, kLifetimeMsMax));
}

void PeerCalls::send(const Verb& verb, std::uint64_t id, Bytes request, std::int64_t until_ns) {
  transmit(Message{FrameKind::kCall, verb.number, id, std::move(request), lifetime_ms(until_ns)});
}

void PeerCalls::post(const Verb& verb, std::uint64_t id, std::span<const std::byte> request) noexcept {
  const auto failure = failure_of([&] { send(verb, id, Bytes(request.begin(), request.end()), kNever); });
  if (failure && failure->code() != ErrorCode::kPeerLost) close(*failure);
}

// If it cannot be sent (the peer does not read), the call is answered as if nobody had cancelled it.
void PeerCalls::cancel(const Verb& verb, std::uint64_t id) noexcept {
  static_cast<void>(failure_of([&] { transmit(Message{FrameKind::kCancel, verb.number, id, {}}); }));
}

void PeerCalls::send_answer(ServedCall& call, FrameKind kind, Bytes&& body) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (call.kept_) find(call.verb().number)->served.erase(call.id());  // else another one may have its number
    call.kept_ = false;
  }
  const auto failure = failure_of([&] { transmit(Message{kind, call.verb().number, call.id(), std::move(body)}); });
  if (failure && failure->code() != ErrorCode::kPeerLost) close(*failure);
}

// --- what arrives ---

std::size_t PeerCalls::body_bytes_max(FrameKind kind, std::uint16_t verb) const noexcept {
  const Known* const one = find(verb);
  switch (kind) {
    case FrameKind::kCall:
      return one != nullptr && one->handler ? one->verb->request_bytes_max : kBodyBytesMax;
    case FrameKind::kAnswer:
      return one != nullptr ? one->verb->answer_bytes_max : 0;
    case FrameKind::kRefused:
      return kErrorBytesMax;
    default:
      return kBodyBytesMax;
  }
}

void PeerCalls::on_message(Message&& message) {
  if (message.kind == FrameKind::kCall) return on_call(std::move(message));
  if (message.kind == FrameKind::kCancel) return on_cancel(message);
  on_answer(std::move(message));
}

void PeerCalls::on_answer(Message&& message) {
  const Known* const one = find(message.verb);
  if (one == nullptr) throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
  if (message.kind == FrameKind::kAnswer && message.body.size() > one->verb->answer_bytes_max) {
    throw Error(ErrorCode::kProtocol, "an answer of " + std::to_string(message.body.size()) + " bytes to " +
                                          one->verb->name + "; at most " + std::to_string(one->verb->answer_bytes_max));
  }
  std::shared_ptr<PendingAnswer> pending;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = pending_.find(message.id);
    if (entry != pending_.end()) pending = entry->second;
  }
  if (pending == nullptr) return on_late(std::move(message));
  pending->on_answer(std::move(message));
}

void PeerCalls::on_late(Message&& message) {
  const Known* const one = find(message.verb);
  if (one != nullptr && one->late) one->late(std::move(message));
}

void PeerCalls::on_cancel(const Message& message) {
  CallPointer call;
  {
    const std::lock_guard lock(mutex_);
    Known* const one = find(message.verb);
    if (one == nullptr) return;
    if (const auto entry = one->served.find(message.id); entry != one->served.end()) call = entry->second.lock();
  }
  if (call != nullptr) call->cancel();  // else it was answered, and the answer is on its way
}

// REQUIRES: mutex_ is held. Throws what the call is refused with.
void PeerCalls::admit(const Known& known, std::uint64_t id) const {
  if (known.served.contains(id)) {
    throw Error(ErrorCode::kProtocol, std::string("this ") + known.verb->name + " is under way");
  }
  if (known.served.size() >= host_.limits().transfers_max && !known.verb->frees_blocks && !known.verb->never_busy) {
    throw Error(ErrorCode::kBusy,
                std::to_string(known.served.size()) + " calls of this peer are under way here: " + known.verb->name,
                {{"limit", host_.limits().transfers_max}, {"retry_after_us", kRetryAfterUs}});
  }
}

void PeerCalls::on_call(Message&& message) {
  Known* const one = find(message.verb);
  if (one == nullptr || !one->handler) {
    const Error unknown(ErrorCode::kUnsupported, "nobody here knows verb " + std::to_string(message.verb));
    return transmit(Message{FrameKind::kRefused, message.verb, message.id, write_error(unknown)});
  }
  if (message.body.size() > one->verb->request_bytes_max) {
    throw Error(ErrorCode::kProtocol, std::to_string(message.body.size()) + " bytes of a call of " + one->verb->name +
                                          "; at most " + std::to_string(one->verb->request_bytes_max));
  }
  const std::int64_t lifetime_ms = std::min<std::int64_t>(message.lifetime_ms, kLifetimeMsMax);
  const auto call = std::make_shared<ServedCall>(shared_from_this(), *one->verb, message.id,
                                                 lifetime_ms == 0 ? kNever : host_.now_ns() + lifetime_ms * kNsPerMs);
  const auto refused = failure_of([&] {
    const std::lock_guard lock(mutex_);
    admit(*one, message.id);
  });
  if (refused) return call->refuse(*refused);
  if (one->runs == Runs::kHere) {
    run(*one, call, std::move(message.body));
  } else {
    run_later(*one, call, std::move(message.body));
  }
  if (call->answered()) return;
  if (failure_of([&] { keep(*one, call); })) call->cancel();  // without memory to note it nobody could do so later
}

// What its handler throws refuses the call; unless it is what no pool of ours would ask: that ends the link.
void PeerCalls::run(const Known& known, const CallPointer& call, Bytes&& request) {
  try {
    known.handler(call, std::move(request));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kProtocol && call->claim()) throw;
    call->refuse(error);
  } catch (const std::exception& error) {
    const Error full(ErrorCode::kOutOfMemory, std::string("memory ran out: ") + error.what());
    call->refuse(full);
    if (known.verb->never_busy) close(full);
  }
}

void PeerCalls::run_later(const Known& known, const CallPointer& call, Bytes&& request) {
  const auto refused = failure_of([&] {
    call->hold(request_bytes_->hold(request.size(), host_.limits().request_bytes_max));
    host_.run(this, [this, &known, call, request = std::make_shared<Bytes>(std::move(request)), owner = owner_.lock()] {
      if (call->cancelled()) return call->refuse(Error(ErrorCode::kCancelled, "nobody waits for it any more"));
      if (host_.now_ns() >= call->deadline_ns()) return call->refuse(Error(ErrorCode::kDeadline, "its time was over"));
      if (const auto wrong = failure_of([&] { run(known, call, std::move(*request)); })) close(*wrong);
    });
  });
  if (!refused) return;
  call->refuse(*refused);
  if (known.verb->never_busy) close(*refused);
}

void PeerCalls::keep(Known& known, const CallPointer& call) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.load()) {
      if (!call->answered()) call->kept_ = known.served.emplace(call->id(), call).second;
      return;
    }
  }
  call->cancel();
}

// --- endings ---

std::int64_t PeerCalls::tick(std::int64_t now_ns) {
  std::vector<std::shared_ptr<PendingAnswer>> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.reserve(pending_.size());
    for (const auto& [id, waiting] : pending_) pending.push_back(waiting);
  }
  std::int64_t next = kNever;
  for (const auto& waiting : pending) next = std::min(next, waiting->on_tick(now_ns));
  return next;
}

void PeerCalls::end(const Error& why) noexcept {
  std::unordered_map<std::uint64_t, std::shared_ptr<PendingAnswer>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (ended_.exchange(true)) return;
    why_ = why;
    pending.swap(pending_);
  }
  for (const auto& [id, waiting] : pending) waiting->on_lost(why);
  for (Known& one : known_) {
    std::unordered_map<std::uint64_t, std::weak_ptr<ServedCall>> served;
    {
      const std::lock_guard lock(mutex_);
      served.swap(one.served);
    }
    for (const auto& [id, weak] : served) {
      if (const auto call = weak.lock()) call->cancel();
    }
  }
}

}  // namespace kvpool
