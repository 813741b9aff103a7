#include "kvpool/transfer/prompt_fetch.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

}  // namespace

PromptFetch::PromptFetch(std::shared_ptr<Session> session, std::uint64_t id, PromptFetchRequest&& request)
    : AwaitedTransfer(std::move(session), id, request.deadline_ns),
      request_(std::move(request)),
      fetch_id_(session_->calls().next_id() | kFetchBit) {
  const std::size_t page = session_->host().blocks().layout().block_tokens;
  request_.tokens.resize(request_.tokens.size() / page * page);
  check_prompt(request_.tokens.size(), request_.name_space, "fetch");
}

// What is cached here is pinned from now on, so that it is not evicted for what comes behind it.
void PromptFetch::start() {
  start_clock();
  BlockHost& blocks = session_->host().blocks();
  here_ = blocks.match(request_.name_space, request_.tokens);
  if (here_.addresses.size() * blocks.layout().block_tokens == request_.tokens.size()) {
    Lock lock(mutex_);
    return end_cached(lock, std::move(here_.addresses));
  }
  // The peer holds what it finds for as long as this may take. Its own limit is longer than it takes to ask for it.
  const MatchBody body{static_cast<std::uint32_t>(std::min<std::uint64_t>(lifetime_ms(), UINT32_MAX)), request_.tokens,
                       request_.name_space};
  Bytes message = write_body(body);
  ask([&] { session_->calls().send(kMatchVerb, id_, std::move(message), deadline_ns_); });
}

bool PromptFetch::withdraw() noexcept {
  const Lock lock(mutex_);
  return std::exchange(phase_, Phase::kDone) != Phase::kDone;
}

// --- the match ---

void PromptFetch::on_answer(Message&& message) {
  Lock lock(mutex_);
  if (message.verb == kUnmatchVerb.number) return;  // to let_go(), by a thread that has not forgotten the call yet
  if (message.verb != kMatchVerb.number) throw Error(ErrorCode::kProtocol, "the peer answered what it was not asked");
  if (message.kind == FrameKind::kRefused) {
    if (phase_ == Phase::kMatching) end(lock, session_->calls().refusal(message));
    return;
  }
  MatchedBody matched = read_matched(message.body);
  session_->check_of_peer(matched.addresses);
  const std::size_t page = session_->host().blocks().layout().block_tokens;
  if (matched.addresses.size() > request_.tokens.size() / page) {
    throw Error(ErrorCode::kProtocol, "the peer has found more blocks than the prompt has");
  }
  if (phase_ != Phase::kMatching) {
    lock.unlock();
    return session_->calls().post(kUnmatchVerb, id_);
  }
  found_ = std::move(matched.addresses);
  if (found_.size() <= here_.addresses.size()) {
    end_cached(lock, std::move(here_.addresses));
    return let_go();
  }
  phase_ = Phase::kReserving;
  lock.unlock();
  find_room();  // the call stays known meanwhile: its deadline and the end of the link count here, too
}

// --- the blocks ---

void PromptFetch::find_room() noexcept {
  const auto failure = failure_of([&] {
    const BlockHost& blocks = session_->host().blocks();
    const bool slow = request_.may_evict || blocks.fills_with_zeros();
    if (reserve(slow ? Room::kTry : Room::kFree)) return;
    const Room room = request_.may_evict ? Room::kEvict : Room::kFree;
    session_->host().run(this, [self = std::static_pointer_cast<PromptFetch>(shared_from_this()), room] {
      if (const auto refused = failure_of([&] { static_cast<void>(self->reserve(room)); })) self->fail(*refused);
    });
  });
  if (failure) fail(*failure);
}

// False: there is no room yet. Throws when there will be none. What can fail otherwise comes before the reservation.
bool PromptFetch::reserve(Room room) {
  const std::size_t page = session_->host().blocks().layout().block_tokens;
  const auto tokens = std::span(request_.tokens).first(found_.size() * page);
  delivery_.peer = session_->peer().name;
  delivery_.spec = {
      found_.size(), request_.medium, /*insert=*/true, request_.name_space, {tokens.begin(), tokens.end()}};
  const Writer writer{session_->peer().incarnation, mark_of(fetch_id_)};
  std::optional<Reservation> reservation = session_->host().blocks().reserve(delivery_.spec, writer, room);
  if (!reservation) return false;
  on_reserved(std::move(*reservation));
  return true;
}

void PromptFetch::on_reserved(Reservation&& reservation) {
  Lock lock(mutex_);
  if (phase_ != Phase::kReserving) {  // it was given up meanwhile
    lock.unlock();
    session_->host().blocks().release(reservation.addresses);
    return;
  }
  if (reservation.addresses.empty()) {  // it has come in another way meanwhile
    end_cached(lock, std::move(reservation.held));
    return let_go();
  }
  phase_ = Phase::kStarting;
  reserve_us_ = elapsed_us();
  blocks_ = found_.size();
  skipped_ = reservation.held.size();
  delivery_.reservation = std::move(reservation);
  lock.unlock();
  session_->calls().forget(id_);
  if (const auto failure = failure_of([&] { begin_fetch(); })) {
    lock.lock();
    end(lock, *failure);
  }
  let_go();  // behind the request, which holds the blocks
  lock.lock();
  if (phase_ == Phase::kStarting) phase_ = Phase::kFetching;
  const std::shared_ptr<Fetch> asked = cancelled_ ? fetch_ : nullptr;
  lock.unlock();
  if (asked != nullptr) asked->cancel();
}

void PromptFetch::begin_fetch() {
  const std::vector<Address>& to = delivery_.reservation.addresses;
  std::shared_ptr<Fetch> begun;
  try {
    FetchRequest request;
    request.from.assign(found_.end() - static_cast<std::ptrdiff_t>(to.size()), found_.end());
    request.to = to;
    request.priority = request_.priority;
    request.deadline_ns = deadline_ns_;
    auto self = std::static_pointer_cast<PromptFetch>(shared_from_this());
    begun = std::make_shared<Fetch>(session_, fetch_id_, request, /*frees_on_failure=*/true, std::move(self));
  } catch (...) {
    session_->host().blocks().release(to);
    throw;
  }
  {
    const Lock lock(mutex_);
    fetch_ = begun;
  }
  try {
    begun->start();
  } catch (...) {
    const Lock lock(mutex_);
    fetch_ = nullptr;  // with `begun` it goes, and gives the blocks back
    throw;
  }
}

std::optional<Error> PromptFetch::take() noexcept {
  return failure_of([&] { addresses_ = session_->host().blocks().deliver(std::move(delivery_)).cached; });
}

// --- endings ---

void PromptFetch::on_fetched(const std::optional<Error>& error) noexcept {
  Lock lock(mutex_);
  release(lock);
  finish_uncounted(error);
}

// All of it is cached here, or all that the peer has. Lets go of the lock.
void PromptFetch::end_cached(Lock& lock, std::vector<Address>&& addresses) {
  blocks_ = skipped_ = addresses.size();
  addresses_ = std::move(addresses);
  end(lock, std::nullopt);
}

// It is over: unpins what is cached here, without the lock, which it lets go of.
void PromptFetch::release(Lock& lock) noexcept {
  phase_ = Phase::kDone;
  total_us_ = elapsed_us();
  const CachedPrefix here = std::exchange(here_, {});
  const std::shared_ptr<void> held = std::exchange(delivery_.reservation.hold, nullptr);
  lock.unlock();
}

// Without a fetch, which is counted by itself. Lets go of the lock.
void PromptFetch::end(Lock& lock, std::optional<Error> error) {
  release(lock);
  session_->calls().forget(id_);
  finish_waiting(TransferKind::kFetch, 0, std::move(error));
}

// Before the fetch has begun. From then on it ends by itself, and this with it.
bool PromptFetch::fail(const Error& why, bool linked) noexcept {
  Lock lock(mutex_);
  if (phase_ != Phase::kMatching && phase_ != Phase::kReserving) return false;
  const bool holds = phase_ == Phase::kReserving;
  end(lock, why);
  if (holds && linked) let_go();
  return true;
}

void PromptFetch::let_go() const noexcept {
  if (!found_.empty()) session_->calls().post(kUnmatchVerb, id_);
}

void PromptFetch::on_lost(const Error& why) { static_cast<void>(fail(why, /*linked=*/false)); }

std::shared_ptr<Fetch> PromptFetch::fetch() const noexcept {
  const Lock lock(mutex_);
  return phase_ == Phase::kFetching ? fetch_ : nullptr;
}

// A late answer to the match lets go of what it names: see Session::serve_verbs().
std::int64_t PromptFetch::on_tick(std::int64_t now_ns) {
  if (const auto begun = fetch()) return begun->on_tick(now_ns);
  if (now_ns < deadline_ns_) return deadline_ns_;
  fail(Error(ErrorCode::kDeadline, "the fetch from " + session_->peer().name + " was not done by its deadline"));
  return kNever;
}

bool PromptFetch::settled() const noexcept { return done() && !session_->receiver().is_quarantined(fetch_id_); }

bool PromptFetch::cancel() {
  if (fail(Error(ErrorCode::kCancelled, "the fetch from " + session_->peer().name + " was cancelled"))) return true;
  std::shared_ptr<Fetch> begun;
  {
    const Lock lock(mutex_);
    if (phase_ == Phase::kStarting) return cancelled_ = true;
    if (phase_ == Phase::kFetching) begun = fetch_;
  }
  return begun != nullptr && begun->cancel();
}

// --- for the caller ---

TransferStats PromptFetch::stats() const {
  const Lock lock(mutex_);
  TransferStats stats;
  if (fetch_ != nullptr) stats = fetch_->stats();
  stats.blocks = blocks_;
  stats.skipped_blocks = skipped_;
  stats.reserve_us = reserve_us_;
  stats.total_us = total_us_;
  return stats;
}

std::uint64_t PromptFetch::bytes_done() const noexcept {
  const Lock lock(mutex_);
  return fetch_ == nullptr ? 0 : fetch_->bytes_done();
}

std::uint64_t PromptFetch::bytes_total() const noexcept {
  const Lock lock(mutex_);
  return fetch_ == nullptr ? 0 : fetch_->bytes_total();
}

void PromptFetch::wait_on(const std::shared_ptr<const CudaContext>& /*context*/, CuStream /*stream*/) {
  throw Error(ErrorCode::kState,
              "a stream waits for blocks that are known: match at the peer, and fetch what it has found");
}

}  // namespace kvpool
