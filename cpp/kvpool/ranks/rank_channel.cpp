#include "kvpool/ranks/rank_channel.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route_choice.h"

namespace kvpool {
namespace {

// What a cancelled write had begun is in place, or the channel is given up, so long after its end at the latest.
constexpr std::int64_t kFlushNs = 1'000'000'000;

std::uint64_t block_bytes(const PeerMetadata& peer) noexcept {
  std::uint64_t bytes = 0;
  for (const std::uint64_t piece : peer.piece_bytes) bytes += piece;
  return bytes;
}

}  // namespace

RankChannel::RankChannel(Memory local, PeerMetadata peer, bool peer_writes_directly, Events events)
    : local_(std::move(local)),
      peer_(std::move(peer)),
      peer_writes_directly_(peer_writes_directly),
      events_(std::move(events)),
      peer_block_bytes_(block_bytes(peer_)) {}

void RankChannel::start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes) {
  for (const auto& route : routes) {
    if (route_receiver_ == nullptr) route_receiver_ = route->route_receiver();
  }
  if (route_receiver_ != nullptr) begin_route_receiver();
  const std::lock_guard lock(mutex_);
  link_ = std::move(link);
  routes_ = std::move(routes);
}

// The route receiver does not keep the channel, which has it; but the link does, as long as there is something to
// admit.
void RankChannel::begin_route_receiver() {
  route_receiver_->begin(
      [self = weak_from_this()](std::uint64_t, std::span<const std::byte> body, std::uint64_t bytes) {
        const auto channel = self.lock();
        if (channel == nullptr) return Placement{};
        return Placement{data_placement(channel->admit(body, bytes), channel->local_.spans)};
      },
      [](std::uint64_t, bool) {},  // the sender hears which
      [self = weak_from_this()](const Error& why) {
        if (const auto channel = self.lock()) channel->events_.on_device_lost(why);
      });
}

// --- writing ---

RankChannel::Routes RankChannel::begin_write() {
  const std::lock_guard lock(mutex_);
  if (why_departing_) throw Error(*why_departing_);
  writes_.fetch_add(1);
  return routes_;
}

// Whether there is nothing more to hear on the link, either.
bool RankChannel::say_over(Link& link) noexcept {
  try {
    link.send(Message{FrameKind::kLeave, 0, 0, {}});
  } catch (const std::exception& failure) {
    link.close(Error(ErrorCode::kPeerLost, failure.what()));  // it tells less, and nothing wrong
  }
  parting_.advance(PartingState::kDrained);
  return has_peer_left() || !peer_writes_directly_;
}

void RankChannel::end_write() noexcept {
  writes_.fetch_sub(1);
  part_if_idle();
}

WriteOutcome RankChannel::write(const WriteRequest& request) {
  const Routes routes = begin_write();
  struct End {
    RankChannel& channel;
    ~End() { channel.end_write(); }
  } const end{*this};

  const WriteSize size{request.from.size() * request.strips.size(), request.from.size() * strip_bytes(request.strips),
                       request.gather};
  const auto route =
      cheapest_route(routes, "", size, media_set_of(request.from), media_set_of(request.to), monotonic_ns());
  if (route == nullptr) {
    throw Error(ErrorCode::kUnsupported, "there is no route to these blocks of " + peer_.name);
  }
  // By a route receiver it is in place when the write returns, and left when it throws.
  const bool placed_from_link = !route->traits().one_sided && route->route_receiver() == nullptr;
  try {
    const WriteOutcome outcome = write_by(*route, request);
    if (placed_from_link) flush(request.deadline_ns);
    return outcome;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) {
      events_.on_device_lost(error);
      break_off(error);
    }
    // When this side is departing, a route ends its writes so; what they had begun is over, or flushed below, or the
    // peer does not say that its channel is over before it has given up what was announced to it.
    if (error.code() == ErrorCode::kPeerLost && !is_departing()) break_off(error);
    if (placed_from_link && error.code() != ErrorCode::kArgument) flush_or_break(error);
    throw;
  } catch (const std::exception& failure) {  // no memory, and frames may have gone before
    if (placed_from_link) flush_or_break(Error(ErrorCode::kOutOfMemory, failure.what()));
    throw;
  }
}

// What was sent before is in place when the answer is here: a link handles one frame after the other.
void RankChannel::flush(const Waiting& waiting) {
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    link = link_;
  }
  if (link == nullptr) throw Error(ErrorCode::kPeerLost, "the channel to " + peer_.name + " has ended");
  const std::uint64_t own = flushes_.fetch_add(1) + 1;
  link->send(Message{FrameKind::kFlush, 0, own, {}});
  const auto done = [&] { return flushed_.load(std::memory_order_acquire) >= own; };
  while (!done()) {
    if (parting_.reached(PartingState::kLinkEnded)) {
      throw Error(ErrorCode::kPeerLost, "the channel to " + peer_.name + " has ended");
    }
    const std::int64_t now = monotonic_ns();
    if (now >= waiting.until_ns) {
      throw Error(ErrorCode::kDeadline, peer_.name + " did not place in time what was sent to it");
    }
    static_cast<void>(link->drive(waiting.slice_ns(now), done));
    waiting.check();
  }
}

void RankChannel::flush_or_break(const Error& why) {
  try {
    flush(monotonic_ns() + kFlushNs);
  } catch (const std::exception&) {
    break_off(why);
  }
}

// REQUIRES: a write is under way here.
void RankChannel::break_off(const Error& why) {
  std::shared_ptr<Link> link;
  const Error lost(ErrorCode::kPeerLost, "the channel to " + peer_.name + " is broken: " + why.what());
  {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    link = link_;
  }
  depart(lost);
  if (link != nullptr) link->close(lost);
  throw Error(lost);
}

// --- parting ---

void RankChannel::depart(const Error& why) noexcept { depart(why, PartingState::kStopping); }

// The routes are taken in the same step: as soon as the state has changed, another thread may drop them.
void RankChannel::depart(const Error& why, PartingState to) noexcept {
  Routes routes;
  {
    const std::lock_guard lock(mutex_);
    if (!why_departing_)
      why_departing_ = Error(why.code() == ErrorCode::kClosed ? why.code() : ErrorCode::kPeerLost, why.what());
    parting_.advance(to);
    routes = routes_;
  }
  for (const auto& route : routes) route->close();
  std::vector<std::shared_ptr<void>> open_there;
  for (const auto& route : routes) {
    if (auto one = route->let_go()) open_there.push_back(std::move(one));
  }
  writes_.fetch_add(static_cast<std::uint32_t>(open_there.size()));  // of all, before the first has ended
  for (auto& one : open_there) drop_aside(std::move(one));
  part_if_idle();
}

// As of a session: it may wait for the GPU, and counts as a write meanwhile. REQUIRES: it is counted.
void RankChannel::drop_aside(std::shared_ptr<void> open) noexcept {
  const void* const key = open.get();
  const auto failure = failure_of([&] {
    events_.run_aside(key, [self = shared_from_this(), dropped = std::move(open)]() mutable {
      dropped.reset();
      self->end_write();
    });
  });
  if (failure) end_write();  // it was dropped here
}

// Says that this side writes no more, once that is so, and lets go of the link when there is nothing more to hear on
// it.
void RankChannel::part_if_idle() noexcept {
  std::shared_ptr<Link> link;
  bool say = false;
  bool leave = false;
  Routes gone;
  {
    const std::lock_guard lock(mutex_);
    if (!is_departing() || writes_.load() > 0) return;
    gone.swap(routes_);
    link = link_;
    say = link != nullptr && !broken_ && parting_.advance(PartingState::kSaying);
    leave = parting_.reached(PartingState::kDrained) && (has_peer_left() || !peer_writes_directly_);
  }
  // Do not close the link before this message is sent: the peer would wait for the end of this process instead.
  if (say) leave = say_over(*link);
  if (link != nullptr && leave) link->close(Error(ErrorCode::kPeerLost, "the meeting is over"));
  events_.on_changed(*this);
}

void RankChannel::greet(const Waiting& waiting) { flush(waiting); }

// Nothing of the peer's is being received any more. Only a route receiver receives what a link has announced, and goes
// on when the link has ended.
bool RankChannel::is_quiet() const noexcept {
  return peer_parting_.reached(PartingState::kSettled) || parting_.reached(PartingState::kSettled);
}

// REQUIRES: mutex_ is held.
bool RankChannel::over_locked() const noexcept {
  const bool own_over = parting_.reached(PartingState::kDrained) && writes_.load() == 0;
  const bool link_ended = parting_.reached(PartingState::kLinkEnded);
  return own_over && is_quiet() && (has_peer_left() || (link_ended && (!peer_writes_directly_ || proved_)));
}

void RankChannel::abandon() noexcept {
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    link = link_;
  }
  if (link != nullptr) link->close(Error(ErrorCode::kClosed, "this side is closed"));
}

bool RankChannel::over() const noexcept {
  const std::lock_guard lock(mutex_);
  return over_locked();
}

bool RankChannel::awaits_proof() const {
  const std::lock_guard lock(mutex_);
  return !has_peer_left() && !proved_;
}

bool RankChannel::said_over() const noexcept { return has_peer_left(); }

bool RankChannel::link_ended() const noexcept { return parting_.reached(PartingState::kLinkEnded) && is_quiet(); }

void RankChannel::on_writer_gone() {
  {
    const std::lock_guard lock(mutex_);
    proved_ = true;
  }
  part_if_idle();
}

// --- what arrives ---

void RankChannel::on_message(Message&& message) {
  if (!std::exchange(heard_, true)) events_.on_heard(*this);
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    link = link_;
  }
  if (route_receiver_ != nullptr && RouteReceiver::takes(message.kind))
    return route_receiver_->on_message(std::move(message));
  switch (message.kind) {
    case FrameKind::kFlush:
      if (link != nullptr) link->send(Message{FrameKind::kAnswer, 0, message.id, {}});
      return;
    case FrameKind::kAnswer: {
      if (message.id > flushes_.load()) throw Error(ErrorCode::kProtocol, "an answer to no flush");
      std::uint64_t before = flushed_.load();
      while (before < message.id && !flushed_.compare_exchange_weak(before, message.id)) {
      }
      if (link != nullptr) link->wake();
      return;
    }
    case FrameKind::kLeave: {
      const PartingState left = route_receiver_ == nullptr ? PartingState::kSettled : PartingState::kDrained;
      if (!peer_parting_.advance(left)) throw Error(ErrorCode::kProtocol, peer_.name + " leaves twice");
      depart(Error(ErrorCode::kPeerLost, peer_.name + " has left"));
      return await_quiet();
    }
    default:
      break;
  }
  throw Error(ErrorCode::kProtocol,
              "a frame of kind " + std::to_string(static_cast<int>(message.kind)) + " is not known between ranks");
}

// What the peer announced before it said that it writes no more may still be arriving: it is given up.
void RankChannel::await_quiet() {
  if (route_receiver_ == nullptr) return;
  std::function<void()> work = [self = shared_from_this()] { self->on_quiet(self->peer_parting_); };
  if (!route_receiver_->defer(work)) on_quiet(peer_parting_);
}

// Nothing is received any more, and nothing is admitted.
void RankChannel::on_quiet(Parting& whose) noexcept {
  whose.advance(PartingState::kSettled);
  events_.on_changed(*this);
}

// Throws kProtocol.
DataBody RankChannel::admit(std::span<const std::byte> body, std::uint64_t payload_bytes) const {
  DataBody data = read_data_body(body, payload_bytes, local_.spans);
  if (has_peer_left()) throw Error(ErrorCode::kProtocol, "content of a peer that has said it writes no more");
  return data;
}

Placement RankChannel::on_data(std::uint64_t /*id*/, std::span<const std::byte> body, std::uint64_t payload_bytes) {
  if (!std::exchange(heard_, true)) events_.on_heard(*this);
  const DataBody data = admit(body, payload_bytes);
  Placement placement;
  placement.pieces = data_placement(data, local_.spans);
  staging_buffer_ = local_.staging_buffer(data.blocks, placement.pieces, payload_bytes);
  if (staging_buffer_ != nullptr) placement.pieces = {staging_buffer_->room()};
  return placement;
}

// Content that is damaged ends the link, and so does a GPU that does not take it: the flush behind it is never
// answered. Content that its sender gave up is of an order that fails there.
void RankChannel::on_placed(std::uint64_t /*token*/, bool intact) {
  const std::unique_ptr<StagingBuffer> staging_buffer = std::move(staging_buffer_);
  if (staging_buffer == nullptr || !intact) return;
  try {
    staging_buffer->land();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) events_.on_device_lost(error);
    throw;
  }
}

void RankChannel::on_closed(const Error& why) {
  const Error lost(why.code() == ErrorCode::kClosed ? ErrorCode::kClosed : ErrorCode::kPeerLost,
                   peer_.name + " is lost: " + why.what());
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    link = std::move(link_);
  }
  depart(lost, route_receiver_ == nullptr ? PartingState::kSettled : PartingState::kLinkEnded);
  if (route_receiver_ != nullptr) {
    route_receiver_->close([self = shared_from_this()] { self->on_quiet(self->parting_); });
  }
  if (link != nullptr) {
    link->wake();
    events_.on_ended(shared_from_this(), link);
  }
}

}  // namespace kvpool
