#include "kvpool/transfer/fetch.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/strategy.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLifetimeNsMax = 1'000'000LL << 30;  // of a fetch whose caller says none

}  // namespace

// --- the one who asks ---

Fetch::Fetch(std::shared_ptr<Session> session, std::uint64_t id, const FetchRequest& request, bool frees_on_failure,
             std::shared_ptr<FetchTaker> taker)
    : AwaitedTransfer(std::move(session), id, request.deadline_ns),
      from_(request.from),
      to_(request.to),
      priority_(request.priority),
      route_(request.route),
      checksum_(request.checksum),
      frees_on_failure_(frees_on_failure || taker != nullptr),
      taker_(std::move(taker)) {
  const auto n = static_cast<std::int64_t>(from_.size());
  if (from_.empty() || from_.size() > kAddressesMax || to_.size() != from_.size()) {
    throw Error(ErrorCode::kArgument,
                "a fetch takes 1 to " + std::to_string(kAddressesMax) + " blocks and as many destinations; there are " +
                    std::to_string(n) + " and " + std::to_string(to_.size()),
                {{"needed", n}, {"given", static_cast<std::int64_t>(to_.size())}});
  }
  if (route_.size() > kRouteNameBytesMax) {
    throw Error(ErrorCode::kArgument, "a route's name has " + std::to_string(kRouteNameBytesMax) + " bytes at most");
  }
  for (std::size_t i = 0; i < from_.size(); ++i) {
    if (instance_of(from_[i]) == session_->peer().instance) continue;
    const bool early = instance_of(from_[i]) == 0;
    throw Error(
        ErrorCode::kNotOwner,
        "address " + std::to_string(from_[i]) + " (position " + std::to_string(i) + ") is not of peer " +
            session_->peer().name +
            (early ? ": it names no instance, because its pool gave it out before it had peers; Peers.addresses "
                     "of that pool gives the one that others may use"
                   : ""),
        {{"address", static_cast<std::int64_t>(from_[i])},
         {"position", static_cast<std::int64_t>(i)},
         {"instance", instance_of(from_[i])}});
  }
  room_ = Receiver::quarantine_room(id_, to_);
  if (taker_ == nullptr) {
    session_->host().blocks().expect_writes(to_, {session_->peer().incarnation, mark_of(id_)});
  }
  placed_here_ = !session_->peer_writes_directly(to_) && std::ranges::none_of(to_, [&](Address address) {
    return session_->host().blocks().in_file(medium_of(address));
  });
  room_.mapped().placed_here = placed_here_;
  expecting_ = true;
}

// Of a fetch that could not be asked for. A peer that keeps to the protocol writes nothing for it; for one that does
// not, this process may be placing content all the same, and then the destinations are free only when it lies there.
Fetch::~Fetch() {
  if (expecting_) end_unasked();
}

void Fetch::end_unasked() noexcept {
  expecting_ = false;
  Receiver& receiver = session_->receiver();
  BlockHost& blocks = session_->host().blocks();
  if (receiver.end_fetch(to_, [&] { taker_ == nullptr ? blocks.end_writes(to_) : blocks.release(to_); })) return;
  receiver.quarantine(std::move(room_));
  receiver.on_fetch_over(id_);
}

void Fetch::start() {
  start_clock();
  const std::uint32_t instance = session_->host().blocks().instance();
  FetchBody body{priority_, from_, to_, checksum_, route_};
  for (Address& address : body.to) {
    if (instance_of(address) == 0) address |= Address{instance} << kInstanceShift;
  }
  Bytes message = write_body(body);
  ask([&] { session_->calls().send(kFetchVerb, id_, std::move(message), deadline_ns_); });
}

// Now, and not when it is destroyed: the thread that ends all calls may still have it, and the caller gives the
// destinations back at once.
bool Fetch::withdraw() noexcept {
  const Lock lock(mutex_);
  if (std::exchange(phase_, Phase::kDone) == Phase::kDone) return false;
  end_unasked();
  return true;
}

void Fetch::on_answer(Message&& message) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) {
    session_->receiver().on_fetch_over(id_);
    return;
  }
  if (message.verb != kFetchVerb.number) throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
  if (phase_ == Phase::kVerifying) throw Error(ErrorCode::kProtocol, "the peer answered a fetch twice");
  if (message.kind == FrameKind::kRefused)
    return end(lock, session_->calls().refusal(message), /*may_still_write=*/false);
  if (phase_ == Phase::kCancelling) return end(lock, cancelled(), /*may_still_write=*/false);
  FetchedBody written = read_fetched(message.body);
  if (written.checksum.has_value() != checksum_) {
    throw Error(ErrorCode::kProtocol, "the peer answered another fetch than it was asked for");
  }
  written_ = std::move(written);
  if (!checksum_) return end(lock, outcome(), /*may_still_write=*/false);
  verify(lock, *written_.checksum);
}

// The content is read: that is as much under way as a write, so nothing ends meanwhile. Lets go of the lock.
void Fetch::verify(Lock& lock, std::uint32_t checksum) {
  phase_ = Phase::kVerifying;
  lock.unlock();
  const auto work = [self = std::static_pointer_cast<Fetch>(shared_from_this()), checksum] {
    Lock again(self->mutex_);
    const bool is_over = self->why_.has_value();
    again.unlock();
    const auto failure = is_over ? std::nullopt : failure_of([&] { self->compare(checksum); });
    again.lock();
    self->end(again, self->why_ ? self->why_ : failure ? failure : self->outcome(), /*may_still_write=*/false);
  };
  const void* const key = &session_->peer();  // not the session's: who asks for blocks does not wait for a checksum
  // Without memory to hand it on, it is done here.
  if (failure_of([&] { session_->host().run(key, work); })) work();
}

void Fetch::compare(std::uint32_t checksum) const {
  const std::uint32_t found = session_->host().blocks().checksum(to_);
  if (found == checksum) return;
  throw Error(ErrorCode::kProtocol,
              "the checksum of what " + session_->peer().name + " has written is wrong: content was damaged",
              {{"needed", checksum}, {"given", found}});
}

Error Fetch::cancelled() const {
  return Error(ErrorCode::kCancelled, "the fetch from " + session_->peer().name + " was cancelled");
}

// As long as the link lives, this process may be placing what came before.
void Fetch::on_lost(const Error& why) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) return;
  if (phase_ == Phase::kVerifying) return end_behind_verify(why);
  end(lock, why, (session_->peer_writes_directly() && !placed_here_) || !session_->link_ended());
}

// What this process alone places is dropped from now on, so the destinations are free behind the frame that is being
// placed in them.
std::int64_t Fetch::on_tick(std::int64_t now_ns) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) return kNever;
  if (now_ns < deadline_ns_) return deadline_ns_;
  const Error late(ErrorCode::kDeadline, "the fetch from " + session_->peer().name + " was not done by its deadline");
  if (phase_ == Phase::kVerifying) {
    end_behind_verify(late);
    return kNever;
  }
  end(lock, late, /*may_still_write=*/!placed_here_);
  tell_cancelled();
  return kNever;
}

// REQUIRES: mutex_ is held.
void Fetch::end_behind_verify(const Error& why) noexcept {
  if (!why_) why_ = why;
}

// The owner answers when it writes no more. A quarantine under this id ends then: see Session::serve_verbs().
void Fetch::tell_cancelled() { session_->calls().cancel(kFetchVerb, id_); }

// Lets go of the lock.
void Fetch::end(Lock& lock, std::optional<Error> error, bool may_still_write) {
  Receiver& receiver = session_->receiver();
  const std::shared_ptr<HeldBlocks> held = held_;
  const bool placing = !may_still_write && !receiver.end_fetch(to_, [&] { give_back(error, held.get()); });
  // A pass that was announced behind the owner's word that it writes no more.
  const bool given_up = error && (error->code() == ErrorCode::kDeadline || error->code() == ErrorCode::kCancelled);
  if (placing && !given_up) {
    error = Error(ErrorCode::kProtocol, session_->peer().name + " writes for a fetch that it has said is over");
  }
  phase_ = Phase::kDone;
  expecting_ = false;
  total_us_ = elapsed_us();
  const std::shared_ptr<WaitWord> word = std::move(word_);
  const std::shared_ptr<FetchTaker> taker = std::move(taker_);
  const OnEnd on_end = std::exchange(on_end_, nullptr);
  // Under the lock: the answer may come at any time, and finds either the fetch or the quarantine.
  if (may_still_write || placing) {
    if (held != nullptr) held->take_over();
    room_.mapped().held = held;
    receiver.quarantine(std::move(room_));
  }
  if (placing) receiver.on_fetch_over(id_);
  lock.unlock();
  session_->calls().forget(id_);
  const std::uint64_t bytes = error ? 0 : bytes_total();
  finish_waiting(TransferKind::kFetch, bytes, error);
  if (word != nullptr) word->set();
  if (taker != nullptr) taker->on_fetched(error);
  if (on_end) on_end(error);
}

// Streams may still use the destinations of a fetch that has failed.
void Fetch::give_back(std::optional<Error>& error, HeldBlocks* held) noexcept {
  BlockHost& blocks = session_->host().blocks();
  if (!error && taker_ != nullptr) {
    error = taker_->take();
    if (!error) return;
  }
  if (!error || !frees_on_failure_) return blocks.end_writes(to_);
  if (held == nullptr) return blocks.release(to_);
  held->take_over();
  blocks.quarantine(to_);
}

TransferStats Fetch::stats() const {
  TransferStats stats;
  stats.strategy = strategy_name(Strategy::kByRequestAgg);
  stats.blocks = from_.size();
  stats.runs = count_runs(from_, to_);
  stats.bytes = bytes_done();
  const Lock lock(mutex_);
  stats.route = written_.route;
  stats.calls = written_.calls;
  stats.write_us = static_cast<double>(written_.write_us);
  stats.total_us = total_us_;
  return stats;
}

bool Fetch::settled() const noexcept { return done() && !session_->receiver().is_quarantined(id_); }

std::uint64_t Fetch::bytes_total() const noexcept {
  return from_.size() * session_->host().blocks().layout().block_bytes();
}

// Where only this process writes, as on_tick(): it waits for no peer.
bool Fetch::cancel() {
  {
    Lock lock(mutex_);
    if (phase_ == Phase::kDone || phase_ == Phase::kCancelling) return phase_ == Phase::kCancelling;
    if (phase_ == Phase::kVerifying) {
      end_behind_verify(cancelled());
      return true;
    }
    if (placed_here_) {
      end(lock, cancelled(), /*may_still_write=*/false);
    } else {
      phase_ = Phase::kCancelling;
    }
  }
  tell_cancelled();
  return true;
}

void Fetch::send_layer(std::uint32_t /*layer*/, std::shared_ptr<const DeviceOrder> /*after*/) { throw_not_streamed(); }
void Fetch::finish() { throw_not_streamed(); }

// --- the owner ---

void Session::on_fetch(const CallPointer& call, FetchBody&& body) {
  const auto refused = failure_of([&] {
    if ((call->id() & kFetchBit) == 0) throw Error(ErrorCode::kProtocol, "this is no number of a fetch");
    if (body.from.empty()) throw Error(ErrorCode::kArgument, "a fetch needs blocks");
    check_of_peer(body.to);
    call->hold(receiver_->hold_request((body.from.size() + body.to.size()) * sizeof(Address)));
    begin_push(call, std::make_shared<FetchBody>(std::move(body)));
  });
  if (refused) call->refuse(*refused);
}

// Throws Error, std::bad_alloc; then nothing is under way.
void Session::begin_push(const CallPointer& call, const std::shared_ptr<FetchBody>& body) {
  const Layout& layout = host_.blocks().layout();
  const auto stop = std::make_shared<std::atomic<bool>>(false);
  const auto strip =
      std::make_shared<std::pair<BlockStrip, std::shared_ptr<FetchBody>>>(BlockStrip{0, 0, layout.block_bytes()}, body);
  WriteJob job;
  job.bytes = body->from.size() * layout.block_bytes();
  const WriteSize size{body->from.size() * (layout.aggregated ? 1 : layout.piece_bytes.size()), job.bytes};
  job.route = choose_route(body->route, size, media_set_of(body->from), media_set_of(body->to), body->checksum);
  if (body->checksum) check_whole(*job.route);
  job.request.transfer = call->id();
  job.request.strips = std::span(&strip->first, 1);
  job.request.from = body->from;
  job.request.to = body->to;
  // What is cached here may still be on its way from a kernel.
  const std::shared_ptr<const DeviceOrder> order = host_.blocks().device_order();
  job.request.after = order.get();
  job.request.deadline_ns = std::min(call->deadline_ns(), host_.now_ns() + kLifetimeNsMax);
  job.request.cancelled = stop.get();
  job.keep = std::make_shared<std::tuple<std::shared_ptr<void>, std::shared_ptr<void>, std::shared_ptr<const void>>>(
      strip, stop, order);
  // A peer orders its own fetches by it. None may go before the writes to every other peer.
  job.priority = std::max(body->priority, Priority::kPrefill);
  const std::int64_t began_ns = host_.now_ns();
  const std::string route = job.route->name();
  job.done = [self = shared_from_this(), call, body, route, began_ns](const WriteOutcome& outcome, const Error* error) {
    self->sent_bytes().add(route, outcome.bytes);
    const auto write_us = static_cast<std::uint64_t>(std::max<std::int64_t>(self->host_.now_ns() - began_ns, 0)) / 1000;
    self->finish_push(call, body, FetchedBody{route, outcome.calls, write_us, std::nullopt}, error);
  };
  call->when_cancelled([stop] { stop->store(true, std::memory_order_relaxed); });
  if (lost()) throw Error(ErrorCode::kPeerLost, "the link has ended");
  host_.blocks().hold_for_reading(body->from, peer_.incarnation);
  pushes_.fetch_add(1);
  try {
    write(std::move(job));
  } catch (...) {
    pushes_.fetch_sub(1);
    host_.blocks().release_reading(body->from);
    throw;
  }
}

// What is to be compared is read before the blocks are let go of.
void Session::finish_push(const CallPointer& call, const std::shared_ptr<FetchBody>& body, FetchedBody&& written,
                          const Error* error) noexcept {
  if (error != nullptr || !body->checksum) return end_push(*call, body->from, std::move(written), error);
  const auto work = [self = shared_from_this(), call, body, written] {
    FetchedBody with = written;
    const auto failure = failure_of([&] {
      if (call->cancelled()) throw Error(ErrorCode::kCancelled, "the fetch was cancelled");
      with.checksum = self->host_.blocks().checksum(body->from);
    });
    self->end_push(*call, body->from, std::move(with), failure ? &*failure : nullptr);
  };
  // One after another of a peer, and not before its other steps.
  if (failure_of([&] { host_.run(&pushes_, work); })) work();
}

void Session::end_push(ServedCall& call, std::span<const Address> held, FetchedBody&& written,
                       const Error* error) noexcept {
  host_.blocks().release_reading(held);
  pushes_.fetch_sub(1);
  // What a broken route had begun may be on its way: an answer would say that it is not.
  if (error != nullptr && breaks_route(*error)) {
    call.abstain();
    return on_route_broken(*error);
  }
  if (error == nullptr) {
    const auto failure = failure_of([&] { call.answer(write_body(written)); });
    if (failure) call.refuse(*failure);
    return;
  }
  // Stopped while it waited for the GPU, because the two disconnect: the caller has not cancelled it.
  const bool disconnected = error->code() == ErrorCode::kCancelled && lost();
  call.refuse(disconnected ? Error(ErrorCode::kPeerLost, "the owner of the blocks has left") : *error);
}

}  // namespace kvpool
