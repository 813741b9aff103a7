#include "kvpool/transfer/peer_match.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/fork_guard.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kHoldMsMax = 1LL << 30;

std::uint32_t milliseconds(std::int64_t ns) noexcept {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(ns / kNsPerMs, 0, kHoldMsMax));
}

void check_room(std::size_t given, std::size_t most, const char* what) {
  if (given <= most) return;
  throw Error(ErrorCode::kArgument,
              "match of keys at a peer: " + std::to_string(given) + ' ' + what + "; at most " + std::to_string(most),
              {{"given", static_cast<std::int64_t>(given)}, {"maximum", static_cast<std::int64_t>(most)}});
}

}  // namespace

PeerMatch::PeerMatch(const MatchRequest& request, std::size_t block_tokens)
    : peer_(request.peer),
      deadline_ns_(request.deadline_ns),
      verb_(kMatchVerb),
      pages_(request.tokens.size() / block_tokens),
      made_in_(fork_generation()) {
  const std::span<const Token> tokens = request.tokens.first(pages_ * block_tokens);
  check_prompt(tokens.size(), request.name_space, "match at a peer");
  message_ = write_body(MatchBody{milliseconds(request.hold_ns), tokens, request.name_space});
}

PeerMatch::PeerMatch(const KeyMatchRequest& request)
    : peer_(request.peer),
      deadline_ns_(request.deadline_ns),
      verb_(kMatchKeysVerb),
      pages_(request.keys.size() / request.key_bytes),
      made_in_(fork_generation()) {
  check_room(request.keys.size(), kKeyListBytesMax, "bytes of keys");
  check_room(request.cache.size(), kCacheNameBytesMax, "bytes in the name of the cache");
  message_ = write_body(MatchKeysBody{milliseconds(request.hold_ns), request.every,
                                      static_cast<std::uint8_t>(request.key_bytes), request.keys, request.cache});
}

PeerMatch::~PeerMatch() { close(); }

std::shared_ptr<Session> PeerMatch::session() const noexcept {
  const std::lock_guard lock(mutex_);
  return session_;
}

// The answer may come to nobody: then it is this callback that lets go of the blocks.
void PeerMatch::ask(const std::shared_ptr<Session>& session) {
  PeerCalls& calls = session->calls();
  const std::uint64_t id = calls.next_id();
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;  // closed
    session_ = session;
    id_ = id;
    asked_ns_ = session->host().now_ns();
  }
  calls.begin(verb_, id, std::move(message_), deadline_ns_,
              [weak = weak_from_this(), lost = std::weak_ptr(session), id](const Message* answer, const Error* error) {
                if (const auto match = weak.lock()) return match->on_end(answer, error);
                const auto open = lost.lock();
                if (answer != nullptr && open != nullptr) open->calls().post(kUnmatchVerb, id);
              });
}

void PeerMatch::fail(const Error& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(over_, true)) return;
  }
  finish(why);
}

void PeerMatch::on_end(const Message* answer, const Error* error) noexcept {
  std::optional<Error> wrong;
  if (error != nullptr) wrong = *error;
  if (answer != nullptr) wrong = failure_of([&] { take(*answer); });
  bool wanted = false;
  {
    const std::lock_guard lock(mutex_);
    wanted = !std::exchange(over_, true);
    if (!wanted || wrong) held_until_ns_ = 0;
  }
  if (answer != nullptr && (!wanted || wrong)) let_go();
  if (answer != nullptr && wrong && wrong->code() == ErrorCode::kProtocol) session()->calls().close(*wrong);
  if (wanted) finish(std::move(wrong));
}

void PeerMatch::let_go() const noexcept { session()->calls().post(kUnmatchVerb, id_); }

// Throws kProtocol for what no pool of ours answers, and std::bad_alloc.
void PeerMatch::take(const Message& answer) {
  MatchedKeysBody body;
  if (verb_.number == kMatchVerb.number) {
    MatchedBody matched = read_matched(answer.body);
    body.hold_ms = matched.hold_ms;
    body.addresses = std::move(matched.addresses);
  } else {
    body = read_matched_keys(answer.body);
    check_found(body.found);
  }
  session()->check_of_peer(body.addresses);
  if (body.addresses.size() > pages_) {
    throw Error(ErrorCode::kProtocol, "peer " + peer_ + " has found more blocks than the prompt has");
  }
  const std::lock_guard lock(mutex_);
  if (over_) return;
  held_until_ns_ = asked_ns_ + body.hold_ms * kNsPerMs;
  found_ = std::move(body.addresses);
  keys_found_ = std::move(body.found);
}

// A bit for each key, and none beyond them.
void PeerMatch::check_found(std::span<const std::byte> found) const {
  const std::size_t rest = pages_ % 8;
  const bool beyond = rest != 0 && !found.empty() && std::to_integer<unsigned>(found.back()) >> rest != 0;
  if (found.size() == (pages_ + 7) / 8 && !beyond) return;
  throw Error(ErrorCode::kProtocol, "peer " + peer_ + " has answered for other keys than it was asked for");
}

void PeerMatch::finish(std::optional<Error> error) noexcept {
  const std::shared_ptr<Session> asked = session();
  const std::shared_ptr<Link> link = asked == nullptr ? nullptr : asked->link();
  completion_.finish(std::move(error));
  if (link != nullptr) link->wake();  // a thread that drives the link looks whether this is done
}

bool PeerMatch::wait(std::int64_t until_ns) {
  while (!done()) {
    const std::shared_ptr<Session> asked = session();
    const std::shared_ptr<Link> link = asked == nullptr ? nullptr : asked->link();
    if (link == nullptr) {  // another thread connects to the peer, or the link has ended and this is being told
      completion_.sleep_until(until_ns);
      break;
    }
    if (link->drive(until_ns, [this] { return done(); })) return true;
    const std::int64_t now = asked->host().now_ns();
    if (done() || now >= until_ns) break;
    completion_.sleep_until(std::min(until_ns, now + kNsPerMs));
  }
  return done();
}

void PeerMatch::rethrow_if_failed() const {
  if (completion_.done() && completion_.error()) throw Error(*completion_.error());
}

bool PeerMatch::closed() const noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_ || !over_) return closed_;
  return held_until_ns_ == 0 || session_->lost() || session_->host().now_ns() >= held_until_ns_;
}

void PeerMatch::close() noexcept {
  if (made_in_ != fork_generation()) return;  // the link is the parent's
  bool asking = false;
  bool held = false;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    asking = !std::exchange(over_, true);
    held = std::exchange(held_until_ns_, 0) != 0 && !found_.empty();
  }
  if (held) let_go();
  if (asking) finish(Error(ErrorCode::kCancelled, "the match at " + peer_ + " was closed before its answer"));
}

}  // namespace kvpool
