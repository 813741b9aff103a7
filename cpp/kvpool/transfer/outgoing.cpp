#include "kvpool/transfer/outgoing.h"

#include <limits>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

double microseconds(std::int64_t ns) noexcept { return static_cast<double>(ns) / 1e3; }

Error deadline_error(const std::string& peer, const char* phase) {
  return Error(ErrorCode::kDeadline, "the transfer to " + peer + " was not done by its deadline; it was " + phase);
}

}  // namespace

Outgoing::Outgoing(std::shared_ptr<Session> session, std::uint64_t id, TransferRequest&& request,
                   std::shared_ptr<Route> route)
    : AwaitedTransfer(std::move(session), id, request.deadline_ns),
      request_(std::move(request)),
      route_(std::move(route)),
      strategy_(strategy_used(request_.strategy, request_.streamed)),
      one_sided_(route_->traits().one_sided),
      named_(!request_.to.empty()) {
  check_request();
  BlockHost& blocks = session_->host().blocks();
  bytes_total_.store(request_.from.size() * blocks.layout().block_bytes(), std::memory_order_relaxed);
  blocks.hold_for_reading(request_.from, /*for_incarnation=*/0);
  reading_ = true;
  try {
    if (request_.after == nullptr && !request_.streamed) request_.after = blocks.device_order();
    if (!named_) return;
    write_to_ = request_.to;
    addresses_ = std::move(request_.to);
    session_->borrowed().begin_write(write_to_);
    lent_ = true;
    if (one_sided_) session_->borrowed().check_nothing_overdue();
  } catch (...) {
    if (lent_) session_->unmark(write_to_);
    blocks.release_reading(request_.from);
    throw;
  }
}

// A handle that was never started, because something threw on the way.
Outgoing::~Outgoing() {
  if (lent_) session_->end_named(id_, write_to_, /*still_borrowed=*/true);
  if (reading_) session_->host().blocks().release_reading(request_.from);
}

void Outgoing::check_request() const {
  const auto fail = [](const std::string& what, std::initializer_list<ErrorField> fields) {
    throw Error(ErrorCode::kArgument, what, fields);
  };
  const auto n = static_cast<std::int64_t>(request_.from.size());
  const auto limit = static_cast<std::int64_t>(kAddressesMax);
  if (n == 0 && !is_message()) {
    fail("a transfer needs blocks, or private bytes without a prompt: the list of addresses is empty", {{"given", 0}});
  }
  if (n > limit) {
    fail(std::to_string(n) + " blocks in one transfer; at most " + std::to_string(limit),
         {{"blocks", n}, {"blocks_max", limit}});
  }
  if (named_ && request_.to.size() != request_.from.size()) {
    fail(std::to_string(n) + " blocks to send, and " + std::to_string(request_.to.size()) + " destinations",
         {{"needed", n}, {"given", static_cast<std::int64_t>(request_.to.size())}});
  }
  if (request_.private_bytes && request_.private_bytes->size() > kPrivateBytesMax) {
    fail("private has " + std::to_string(request_.private_bytes->size()) + " bytes; at most " +
             std::to_string(kPrivateBytesMax),
         {{"value", static_cast<std::int64_t>(request_.private_bytes->size())},
          {"maximum", static_cast<std::int64_t>(kPrivateBytesMax)}});
  }
  if (!request_.insert) return;
  const std::size_t page = session_->host().blocks().layout().block_tokens;
  if (request_.tokens.size() != request_.from.size() * page) {
    fail(std::to_string(request_.tokens.size()) + " tokens and " + std::to_string(n) + " blocks of " +
             std::to_string(page) + " tokens: an insertion needs whole blocks, one address for each",
         {{"needed", static_cast<std::int64_t>(request_.from.size() * page)},
          {"given", static_cast<std::int64_t>(request_.tokens.size())}});
  }
  check_prompt(request_.tokens.size(), request_.name_space, "transfer");
}

// No blocks: the application gets the private bytes alone.
bool Outgoing::is_message() const noexcept {
  return request_.from.empty() && request_.private_bytes && !request_.insert && !request_.streamed;
}

// Nobody needs to be told: the destinations are the sender's, and it has written them itself.
bool Outgoing::is_quiet() const noexcept {
  return named_ && !request_.private_bytes && !request_.insert && !request_.checksum && !request_.streamed &&
         one_sided_;
}

void Outgoing::start() {
  start_clock();
  phase_ns_ = started_ns_;
  stats_.blocks = request_.from.size();
  stats_.route = route_->name();
  stats_.strategy = strategy_name(strategy_);
  if (request_.streamed) {
    sent_layers_.resize(layer_count(session_->host().blocks().layout()));
    layers_left_ = sent_layers_.size();
    finished_ = false;
  }
  if (named_) session_->begin_named(id_, std::static_pointer_cast<Outgoing>(shared_from_this()), write_to_);
  if (is_quiet()) return begin();
  ask([this] { begin(); });
}

bool Outgoing::withdraw() noexcept {
  const Lock lock(mutex_);
  return std::exchange(phase_, Phase::kDone) != Phase::kDone;
}

void Outgoing::start_or_fail() noexcept {
  const auto failure = failure_of([&] { start(); });
  if (!failure) return;
  Lock lock(mutex_);
  end(lock, failure);
}

void Outgoing::begin() {
  if (!named_) return reserve();
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) return;  // its deadline passed, or the link ended, since the session learned of it
  plan_writes();
  advance(lock);
}

void Outgoing::reserve() {
  ReserveBody body;
  body.blocks = static_cast<std::uint32_t>(request_.from.size());
  body.medium = request_.medium;
  body.may_evict = request_.may_evict;
  body.insert = request_.insert;
  body.one_sided = one_sided_;
  body.lifetime_ms = lifetime_ms();
  if (request_.insert) {
    body.name_space = request_.name_space;
    body.tokens = request_.tokens;
  }
  session_->calls().send(kReserveVerb, id_, write_body(body), deadline_ns_);
  // Another thread may have given it up before this was sent: the peer was told then of a transfer that it did not
  // know.
  Lock lock(mutex_);
  const bool abandoned = abandoned_;
  lock.unlock();
  if (abandoned) session_->calls().post(kAbandonVerb, id_);
}

// --- answers ---

void Outgoing::on_answer(Message&& message) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) return on_late_answer(lock, message);
  if (phase_ == Phase::kCancelling) {
    if (message.verb != kAbandonVerb.number) return;  // what it had answered before it heard
    cancel_told_ = false;
    return end(lock, why_);
  }
  if (message.kind == FrameKind::kRefused) {
    const Error error = session_->calls().refusal(message);
    if (phase_ == Phase::kWriting) {  // no session of ours refuses what it has granted
      why_ = error;
      stop_.store(true, std::memory_order_relaxed);
      return;
    }
    told_ = false;
    return end(lock, error);
  }
  if (message.verb == kReserveVerb.number && phase_ == Phase::kReserving) {
    return on_reserved(lock, read_reserved(message.body));
  }
  if (message.verb == kCompleteVerb.number && phase_ == Phase::kCompleting) {
    std::vector<Address> cached = read_addresses(message.body);
    if (request_.insert) {
      session_->check_of_peer(cached);
      if (cached.size() != request_.from.size()) {
        throw Error(ErrorCode::kProtocol, "the peer cached another number of blocks than it was sent");
      }
      addresses_ = std::move(cached);
    }
    stats_.complete_us = microseconds(session_->host().now_ns() - phase_ns_);
    told_ = false;
    return end(lock, std::nullopt);
  }
  throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
}

// The receiver was told to insert the destinations, and answers after the deadline: only its answer says who owns them.
void Outgoing::on_late_answer(Lock& lock, const Message& message) {
  if (std::exchange(overdue_, false)) {  // the peer handles one frame after the other: what was sent before is over
    lock.unlock();
    session_->calls().forget(id_);
    return session_->borrowed().end_overdue();
  }
  if (!told_ || !lent_ || message.verb != kCompleteVerb.number) return;
  const bool inserted = message.kind == FrameKind::kAnswer;
  told_ = lent_ = false;
  lock.unlock();
  session_->calls().forget(id_);
  session_->end_named(id_, write_to_, /*still_borrowed=*/!inserted);
}

void Outgoing::on_reserved(Lock& lock, const ReservedBody& body) {
  if (body.held > request_.from.size() || body.addresses.size() != request_.from.size() - body.held ||
      (body.held > 0 && !request_.insert)) {
    throw Error(ErrorCode::kProtocol, "the peer reserved another number of blocks than it was asked for");
  }
  session_->check_of_peer(body.addresses);
  const std::int64_t now = session_->host().now_ns();
  stats_.reserve_us = microseconds(now - phase_ns_);
  stats_.skipped_blocks = held_ = body.held;
  addresses_ = body.addresses;
  write_to_ = body.addresses;
  plan_writes();
  advance(lock);
}

// REQUIRES: the destinations are known.
void Outgoing::plan_writes() {
  const Layout& layout = session_->host().blocks().layout();
  const std::span<const Address> from = std::span(request_.from).subspan(held_);
  stats_.runs = count_runs(from, write_to_);
  bytes_total_.store(from.size() * layout.block_bytes(), std::memory_order_relaxed);
  if (from.empty()) {
    steps_.clear();
    finished_ = true;
  } else if (!request_.streamed) {
    steps_ = plan_steps(layout, strategy_);
  }
}

// --- endings ---

// Tells the peer that this transfer will not be. Nothing writes any more. Lets go of the lock.
void Outgoing::give_up(Lock& lock, const Error& why, bool wait_for_peer) {
  const auto self = shared_from_this();
  // A route that broke may have bytes on their way that nobody calls back: the peer must not hear that all have
  // arrived.
  const bool tell = !is_quiet() && !session_->lost() && !broken_ && why.code() != ErrorCode::kPeerLost;
  why_ = why;
  cancel_told_ = abandoned_ = tell;
  if (!tell || !wait_for_peer) {
    end(lock, why_);
  } else {
    phase_ = Phase::kCancelling;
    const bool reading = std::exchange(reading_, false);  // the peer may take long to answer: the sources do not wait
    lock.unlock();
    if (reading) session_->host().blocks().release_reading(request_.from);
  }
  if (tell) session_->calls().post(kAbandonVerb, id_);  // or the link ends, and on_lost comes
}

// Lets go of the lock.
void Outgoing::end(Lock& lock, std::optional<Error> error) {
  phase_ = Phase::kDone;
  why_ = error;
  // Blocks that the peer may be inserting stay marked until it has answered: see on_late_answer().
  const bool inserting = told_ && request_.insert && lent_ && !session_->lost();
  const bool lent = !inserting && std::exchange(lent_, false);
  // Another route would overtake what the link has not brought yet.
  overdue_ = lent && error && !one_sided_ && next_step_ > 0 && cancel_told_ && !session_->lost();
  if (overdue_) session_->borrowed().begin_overdue();
  const bool answered = !inserting && !overdue_;
  const bool reading = std::exchange(reading_, false);
  stats_.total_us = elapsed_us();
  const std::shared_ptr<Route> route = std::move(route_);  // destroyed without the lock
  lock.unlock();
  if (!is_quiet() && answered) session_->calls().forget(id_);
  // Blocks that the peer has inserted are no longer lent; all others are as they were.
  if (lent) session_->end_named(id_, write_to_, /*still_borrowed=*/!request_.insert || error);
  if (reading) session_->host().blocks().release_reading(request_.from);
  if (route != nullptr) session_->sent_bytes().add(route->name(), bytes_done());
  finish_waiting(TransferKind::kSend, bytes_done(), std::move(error));
}

// One that has told the peer that all is written waits for its answer, which says whose the blocks are.
void Outgoing::stop_recalled() noexcept {
  const auto why = failure_of([&] { session_->borrowed().check_still_borrowed(write_to_); });
  if (!why) return;
  Lock lock(mutex_);
  if (phase_ == Phase::kWriting) {
    if (!why_) why_ = why;
    stop_.store(true, std::memory_order_relaxed);
  } else if (phase_ == Phase::kStreaming) {
    give_up(lock, *why, /*wait_for_peer=*/false);
  }
}

void Outgoing::on_lost(const Error& why) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) {
    if (std::exchange(overdue_, false)) session_->borrowed().end_overdue();
    if (std::exchange(lent_, false)) session_->end_named(id_, write_to_, /*still_borrowed=*/true);
    return;
  }
  if (phase_ == Phase::kWriting) {
    if (!why_) why_ = why;
    stop_.store(true, std::memory_order_relaxed);
    return;
  }
  end(lock, why_ ? why_ : why);
}

std::int64_t Outgoing::on_tick(std::int64_t now_ns) {
  Lock lock(mutex_);
  if (phase_ == Phase::kDone) return kNever;
  if (now_ns < deadline_ns_) return deadline_ns_;
  switch (phase_) {
    case Phase::kWriting:  // the route looks at the deadline itself
      if (!why_) why_ = deadline_error(request_.peer, "writing");
      stop_.store(true, std::memory_order_relaxed);
      break;
    case Phase::kReserving:
      give_up(lock, deadline_error(request_.peer, "waiting for blocks at the receiver"), false);
      break;
    case Phase::kStreaming:
      give_up(lock, deadline_error(request_.peer, "waiting for the next layer"), false);
      break;
    case Phase::kCompleting:
      give_up(lock, deadline_error(request_.peer, "waiting for the receiver to confirm"), false);
      break;
    default:
      end(lock, why_);
      break;
  }
  return kNever;
}

// --- for the caller ---

TransferStats Outgoing::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

bool Outgoing::cancel() {
  Lock lock(mutex_);
  if (phase_ == Phase::kCancelling) return true;
  if (phase_ == Phase::kDone || phase_ == Phase::kCompleting) return false;
  Error why(ErrorCode::kCancelled, "the transfer to " + request_.peer + " was cancelled");
  if (phase_ == Phase::kWriting) {
    if (!why_) why_ = std::move(why);
    stop_.store(true, std::memory_order_relaxed);
    return why_->code() == ErrorCode::kCancelled;
  }
  give_up(lock, why, /*wait_for_peer=*/true);
  return true;
}

void Outgoing::send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after) {
  Lock lock(mutex_);
  if (!request_.streamed) throw_not_streamed();
  if (layer >= sent_layers_.size()) {
    throw Error(
        ErrorCode::kArgument,
        "there is no layer " + std::to_string(layer) + "; the layout has " + std::to_string(sent_layers_.size()),
        {{"value", layer}, {"maximum", static_cast<std::int64_t>(sent_layers_.size()) - 1}});
  }
  if (why_) throw Error(*why_);  // it has failed, or is about to
  if (sent_layers_[layer]) {
    throw Error(ErrorCode::kArgument, "layer " + std::to_string(layer) + " was sent before", {{"value", layer}});
  }
  if (phase_ == Phase::kDone) return;
  if (!finished_) {  // else the receiver has all of it
    if (after == nullptr) after = session_->host().blocks().device_order();
    layer_orders_.reserve(steps_.size() + 1);
    steps_.push_back(layer_step(session_->host().blocks().layout(), strategy_, layer));
    layer_orders_.push_back(std::move(after));
  }
  sent_layers_[layer] = true;
  --layers_left_;
  if (phase_ == Phase::kStreaming) advance(lock);
}

void Outgoing::finish() {
  Lock lock(mutex_);
  if (!request_.streamed) throw_not_streamed();
  if (layers_left_ > 0 && phase_ != Phase::kDone) {
    throw Error(ErrorCode::kState, std::to_string(layers_left_) + " layers were not sent",
                {{"needed", static_cast<std::int64_t>(layers_left_)}});
  }
  if (finished_) return;
  finished_ = true;
  if (phase_ == Phase::kStreaming) advance(lock);
}

}  // namespace kvpool
