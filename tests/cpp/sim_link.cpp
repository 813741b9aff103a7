#include "sim_link.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kvpool/net/frame_tag.h"

namespace kvpool {
namespace {

constexpr std::int64_t kSoonNs = 2'000;
constexpr std::int64_t kPartNs = 200'000;  // until the other end notices

// The tags of a frame, as FrameTag has them.
struct Tags {
  Tag first;
  Tag last;
};

Tags tags_of(std::span<const std::byte> head, std::span<const std::byte> payload, PayloadEnd end) {
  FrameTag tag(TagKind::kChecksum, Key{});
  tag.begin();
  tag.update(head.data(), head.size());
  Tags tags{tag.finish(), {}};
  tag.update(payload.data(), payload.size());
  tag.update(&end, sizeof(end));
  tags.last = end == PayloadEnd::kGivenUp ? tag.given_up(tags.first) : tag.finish();
  return tags;
}

bool equal(const Tag& tag, std::span<const std::byte> bytes) {
  return std::memcmp(tag.data(), bytes.data(), tag.size()) == 0;
}

Bytes bytes_of(std::span<const iovec> pieces) {
  Bytes bytes;
  for (const iovec& piece : pieces) WireWriter(bytes).raw(piece.iov_base, piece.iov_len);
  return bytes;
}

[[noreturn]] void throw_damaged() { throw Error(ErrorCode::kProtocol, "a frame was damaged on its way"); }

}  // namespace

SimLink::Pair SimLink::make(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor left,
                            SimClock::Actor right) {
  Pair pair{std::make_shared<SimLink>(clock, faults, watch, left),
            std::make_shared<SimLink>(clock, faults, watch, right)};
  pair.first->other_ = pair.second;
  pair.first->writer_ = right;
  pair.second->other_ = pair.first;
  pair.second->writer_ = left;
  return pair;
}

SimLink::SimLink(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor actor)
    : clock_(clock), faults_(faults), watch_(watch), actor_(actor), heard_ns_(clock.now_ns()) {}

void SimLink::start(std::shared_ptr<LinkHandler> handler) {
  handler_ = std::move(handler);
  check_lease();
}

// --- sending ---

Bytes SimLink::make_frame(const Message& head, std::span<const std::byte> body, std::span<const std::byte> payload,
                          PayloadEnd end) {
  FrameHeader header{};
  header.body_bytes = static_cast<std::uint32_t>(body.size());
  header.kind = static_cast<std::uint8_t>(head.kind);
  header.verb = head.verb;
  header.sequence = sent_ + 1;
  header.id = head.id;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.lifetime_ms = head.lifetime_ms;
  Bytes frame;
  WireWriter writer(frame);
  writer.raw(&header, sizeof(header)).raw(body.data(), body.size());
  const Tags tags = tags_of(frame, payload, end);
  writer.raw(tags.first.data(), kTagBytes);
  if (payload.empty()) return frame;
  writer.raw(payload.data(), payload.size()).raw(&end, sizeof(end)).raw(tags.last.data(), kTagBytes);
  return frame;
}

void SimLink::send(Message&& message) {
  if (closing_) throw Error(ErrorCode::kPeerLost, "the link is closed");
  if (clock_.dice().chance(faults_.busy)) throw Error(ErrorCode::kBusy, "too much is queued for the peer");
  auto frame = std::make_shared<const Bytes>(make_frame(message, message.body, {}, PayloadEnd::kWhole));
  clock_.log("send", static_cast<std::uint64_t>(message.kind) << 32 | actor_, message.id);
  transmit(++sent_, std::move(frame));
}

void SimLink::send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                        std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  if (closing_) throw Error(ErrorCode::kPeerLost, "the link is closed");
  const bool unwanted = cancelled != nullptr && cancelled->load();
  const bool late = clock_.now_ns() >= deadline_ns;
  if ((unwanted || late) && clock_.dice().chance(faults_.give_up)) give_up_data(id, body, pieces);
  if (unwanted) throw Error(ErrorCode::kCancelled, "the transfer was cancelled");
  if (late) throw Error(ErrorCode::kDeadline, "the transfer was not done by its deadline");
  auto frame = std::make_shared<const Bytes>(
      make_frame(Message{FrameKind::kData, 0, id, {}}, body, bytes_of(pieces), PayloadEnd::kWhole));
  clock_.log("data", actor_, id);
  transmit(++sent_, std::move(frame));
}

// As on a socket: a frame that was begun when its transfer ended goes out to its end, with zeros from some byte on.
void SimLink::give_up_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces) {
  Bytes payload = bytes_of(pieces);
  const auto from = static_cast<std::ptrdiff_t>(clock_.dice().below(payload.size()));
  std::fill(payload.begin() + from, payload.end(), std::byte{0});
  clock_.log("given up", actor_, id);
  transmit(++sent_, std::make_shared<const Bytes>(
                        make_frame(Message{FrameKind::kData, 0, id, {}}, body, payload, PayloadEnd::kGivenUp)));
}

// One try. What is lost is sent again, by the kernel: that goes on while the process stands still.
void SimLink::transmit(std::uint64_t number, std::shared_ptr<const Bytes> frame) {
  SimDice& dice = clock_.dice();
  if (clock_.now_ns() < cut_until_ns_ || dice.chance(faults_.lose)) {
    clock_.after(faults_.resend_ns, SimClock::kNobody, [self = shared_from_this(), number, frame] {
      if (!self->ended_) self->transmit(number, frame);
    });
    return;
  }
  std::int64_t delay = faults_.delay_ns + dice.between(0, faults_.delay_ns);
  if (dice.chance(faults_.reorder)) delay += dice.between(0, faults_.delay_max_ns);
  if (!frame->empty() && dice.chance(faults_.damage)) {
    Bytes damaged = *frame;
    damaged[dice.below(damaged.size())] ^= static_cast<std::byte>(1U << dice.below(8));
    frame = std::make_shared<const Bytes>(std::move(damaged));
  }
  const auto deliver = [other = other_, number, frame] {
    if (const auto link = other.lock()) link->arrive(number, frame);
  };
  clock_.after(delay, SimClock::kNobody, deliver);
  if (!dice.chance(faults_.replay)) return;
  clock_.after(delay + dice.between(0, 4 * faults_.delay_max_ns), SimClock::kNobody, deliver);
}

// --- receiving ---

void SimLink::arrive(std::uint64_t number, std::shared_ptr<const Bytes> frame) {
  if (ended_ || reset_) return;
  if (number <= received_) {
    if (!faults_.keep_replays || frame->empty()) return;
    ready_.push_back(std::move(frame));
    return wait_to_read();
  }
  early_.emplace(number, std::move(frame));
  for (auto next = early_.begin(); next != early_.end() && next->first == received_ + 1; next = early_.begin()) {
    ready_.push_back(std::move(next->second));
    early_.erase(next);
    ++received_;
  }
  wait_to_read();
}

void SimLink::wait_to_read() {
  if (reading_ || ended_ || ready_.empty()) return;
  reading_ = true;
  clock_.after(clock_.dice().between(0, kSoonNs), actor_, [self = shared_from_this()] {
    self->reading_ = false;
    self->read();
  });
}

void SimLink::read() {
  heard_ns_ = clock_.now_ns();
  if (closing_ || payload_ || ready_.empty() || handler_ == nullptr) return;
  const std::shared_ptr<const Bytes> frame = std::move(ready_.front());
  ready_.pop_front();
  if (frame->empty()) return close(Error(ErrorCode::kPeerLost, "the peer closed the connection"));
  try {
    ++handled_;
    handle(*frame);
  } catch (const Error& error) {
    close(error);
  } catch (const std::exception& error) {
    close(Error(ErrorCode::kOutOfMemory, error.what()));
  }
  wait_to_read();
}

void SimLink::handle(const Bytes& frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  FrameHeader expected = header;
  if (faults_.keep_replays) expected.sequence = handled_;
  const std::size_t tail = header.payload_bytes > 0 ? sizeof(PayloadEnd) + kTagBytes : 0;
  const std::size_t head = sizeof(header) + header.body_bytes;
  if (head + kTagBytes + header.payload_bytes + tail != frame.size()) {
    damaged_ = true;
    throw Error(ErrorCode::kProtocol, "a frame of another length than it says");
  }
  const std::span<const std::byte> all(frame);
  const std::span<const std::byte> body = all.subspan(sizeof(header), header.body_bytes);
  const std::span<const std::byte> payload = all.subspan(head + kTagBytes, header.payload_bytes);
  const auto end = tail > 0 ? static_cast<PayloadEnd>(all[all.size() - tail]) : PayloadEnd::kWhole;
  const Tags tags = tags_of(all.first(head), payload, end);
  const bool right = tail == 0 || equal(tags.last, all.last(kTagBytes));
  const bool first_right = equal(tags.first, all.subspan(head, kTagBytes));
  damaged_ = damaged_ || !first_right || !right;
  check_header(expected, handled_);
  if (!first_right) throw_damaged();
  const auto kind = static_cast<FrameKind>(header.kind);
  if (kind == FrameKind::kData) {
    // As on a socket: the last tag comes last, so a payload is placed before it is known to be intact.
    return begin_payload(header.id, body, Payload{{}, Bytes(payload.begin(), payload.end()), 0, end, right});
  }
  if (kind == FrameKind::kPing) return;
  clock_.log("handle", static_cast<std::uint64_t>(kind) << 32 | actor_, header.id);
  handler_->on_message(Message{kind, header.verb, header.id, Bytes(body.begin(), body.end()), header.lifetime_ms});
}

void SimLink::begin_payload(std::uint64_t id, std::span<const std::byte> body, Payload&& payload) {
  payload.placement = handler_->on_data(id, body, payload.bytes.size());
  if (payload.placement.pieces.empty()) {
    clock_.log("dropped", actor_, id);
    if (!payload.right) throw_damaged();
    return;
  }
  payload_.emplace(std::move(payload));
  land();
}

void SimLink::land() {
  clock_.after(clock_.dice().between(0, faults_.delay_ns / 4), actor_, [self = shared_from_this()] {
    if (self->closing_ || !self->payload_) return;
    self->land_chunk();
  });
}

void SimLink::land_chunk() {
  Payload& payload = *payload_;
  std::size_t chunk =
      std::min(payload.bytes.size() - payload.landed, 1 + clock_.dice().below(faults_.staging_buffer_bytes));
  std::size_t skipped = payload.landed;
  for (const iovec& piece : payload.placement.pieces) {
    if (skipped >= piece.iov_len) {
      skipped -= piece.iov_len;
      continue;
    }
    auto* const at = static_cast<std::byte*>(piece.iov_base) + skipped;
    chunk = std::min(chunk, piece.iov_len - skipped);
    watch_(at, chunk, writer_);
    std::memcpy(at, payload.bytes.data() + payload.landed, chunk);
    payload.landed += chunk;
    break;
  }
  if (payload.landed < payload.bytes.size()) return land();
  const std::uint64_t token = payload.placement.token;
  const bool right = payload.right;
  const bool intact = right && payload.end == PayloadEnd::kWhole;
  payload_.reset();
  handler_->on_placed(token, intact);
  if (!right) return close(Error(ErrorCode::kProtocol, "a frame was damaged on its way"));
  wait_to_read();
}

bool SimLink::drive(std::int64_t deadline_ns, const std::function<bool()>& done) {
  const auto self = shared_from_this();
  const auto is_over = [&] { return !clock_.alive(actor_) || (!clock_.paused(actor_) && (done() || ended_)); };
  clock_.run(deadline_ns, is_over);
  // Somebody who is stopped does not see its deadline.
  while (clock_.alive(actor_) && clock_.paused(actor_)) {
    if (!clock_.step(clock_.now_ns() + faults_.lease_ns)) break;
  }
  if (!clock_.alive(actor_)) throw SimKilled{};
  return done();
}

// --- endings ---

// Says that this end lives, and looks whether the other does.
void SimLink::check_lease() {
  if (closing_) return;
  if (clock_.now_ns() - heard_ns_ > faults_.lease_ns) {
    return close(Error(ErrorCode::kPeerLost, "the peer is silent"));
  }
  if (const auto other = other_.lock()) {
    auto frame =
        std::make_shared<const Bytes>(make_frame(Message{FrameKind::kPing, 0, 0, {}}, {}, {}, PayloadEnd::kWhole));
    transmit(++sent_, std::move(frame));
  }
  clock_.after(faults_.lease_ns / 3, actor_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check_lease();
  });
}

// NOLINTNEXTLINE(bugprone-exception-escape): a simulator that is out of memory may end
void SimLink::close(const Error& why) noexcept {
  if (closing_) return;
  closing_ = true;
  why_ = why;
  clock_.log("close", actor_, static_cast<std::uint64_t>(why.code()));
  part(clock_.dice().chance(faults_.abort));
  clock_.after(0, actor_, [self = shared_from_this()] { self->finish(); });
}

void SimLink::die() {
  closing_ = ended_ = true;
  part(clock_.dice().chance(500));
}

// The other end learns of it behind what was sent before, or at once.
void SimLink::part(bool abort) {
  if (!abort) return transmit(++sent_, std::make_shared<const Bytes>());
  clock_.after(kPartNs, SimClock::kNobody, [other = other_] {
    if (const auto link = other.lock()) link->reset_by_peer();
  });
}

void SimLink::reset_by_peer() {
  if (ended_) return;
  reset_ = true;
  ready_.clear();
  early_.clear();
  clock_.after(0, actor_,
               [self = shared_from_this()] { self->close(Error(ErrorCode::kPeerLost, "the connection was reset")); });
}

void SimLink::finish() noexcept {
  ended_ = true;
  const std::shared_ptr<LinkHandler> handler = std::move(handler_);
  if (handler == nullptr) return;
  if (payload_) handler->on_placed(payload_->placement.token, false);
  payload_.reset();
  clock_.log("closed", actor_);
  handler->on_closed(*why_);
}

}  // namespace kvpool
