#include "kvpool/net/sock_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "kvpool/base/clock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/net/connect/handshake_messages.h"

namespace kvpool {
namespace {

Descriptor make_eventfd() {
  Descriptor made = Descriptor::open([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!made) {
    throw Error(ErrorCode::kState, "the kernel gives no eventfd: " + std::generic_category().message(errno),
                {{"errno", errno}});
  }
  return made;
}

bool of_link(FrameKind kind) noexcept { return kind < FrameKind::kCall; }

}  // namespace

std::shared_ptr<SockLink> SockLink::make(Reactor& reactor, SockLinkParts&& parts,
                                         std::shared_ptr<LinkMeeting> meeting) {
  // In a forked child a link is left as it is: its locks may be held for ever, its lists half changed.
  const std::shared_ptr<SockLink> link(new SockLink(reactor, std::move(parts), std::move(meeting)), [](SockLink* made) {
    if (!made->forked()) delete made;
  });
  const std::lock_guard lock(link->mutex_);  // watch_ is there when the first call comes
  link->interest_ = EPOLLIN | EPOLLRDHUP;
  link->watch_ = reactor.watch(link->socket_.get(), [link](std::uint32_t events) { link->on_ready(events); });
  return link;
}

SockLink::SockLink(Reactor& reactor, SockLinkParts&& parts, std::shared_ptr<LinkMeeting> meeting)
    : reactor_(reactor),
      born_(fork_generation()),
      description_(std::move(parts.description)),
      passes_descriptors_(parts.passes_descriptors),
      process_(parts.process),
      socket_(std::move(parts.socket)),
      pidfd_(std::move(parts.pidfd)),
      wake_(make_eventfd()),
      writer_(socket_.get(), parts.tag, parts.keys.send, parts.queue_bytes_max,
              [this](bool wanted) {
                const std::lock_guard lock(mutex_);
                room_wanted_ = wanted;
                set_interest();
              }),
      why_(ErrorCode::kPeerLost, "the link was closed"),
      heard_ns_(monotonic_ns()),
      reader_(socket_.get(), parts.tag, parts.keys.receive, parts.passes_descriptors, *this),
      meeting_(std::move(meeting)) {
  reader_.put_early(parts.early, std::move(parts.early_descriptors));
}

SockLink::~SockLink() = default;

bool SockLink::forked() const noexcept { return fork_generation() != born_; }

// ---- sending

void SockLink::send(Message&& message) {
  if (forked()) throw Error(ErrorCode::kFork, "a link belongs to the process that made it");
  if (of_link(message.kind) || message.kind == FrameKind::kData || message.body.size() > kBodyBytesMax) {
    throw Error(ErrorCode::kArgument, "no message that a link sends: " + std::to_string(message.body.size()) + " bytes",
                {{"maximum", static_cast<std::int64_t>(kBodyBytesMax)}});
  }
  FrameHeader header{};
  header.kind = static_cast<std::uint8_t>(message.kind);
  header.verb = message.verb;
  header.id = message.id;
  header.lifetime_ms = message.lifetime_ms;
  writer_.send(header, std::move(message.body));
}

void SockLink::send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                         std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  if (forked()) throw Error(ErrorCode::kFork, "a link belongs to the process that made it");
  std::uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += std::min<std::size_t>(piece.iov_len, kPayloadBytesMax + 1);
  if (bytes == 0 || bytes > kPayloadBytesMax || body.size() > kBodyBytesMax) {
    throw Error(ErrorCode::kArgument,
                "no data frame that a link sends: " + std::to_string(bytes) + " bytes, and a body of " +
                    std::to_string(body.size()),
                {{"value", static_cast<std::int64_t>(bytes)},
                 {"minimum", 1},
                 {"maximum", static_cast<std::int64_t>(kPayloadBytesMax)}});
  }
  FrameHeader header{};
  header.kind = static_cast<std::uint8_t>(FrameKind::kData);
  header.id = id;
  header.payload_bytes = static_cast<std::uint32_t>(bytes);
  if (handling()) return writer_.send_copy(header, body, pieces);
  writer_.send_data(header, body, pieces, deadline_ns, cancelled);
}

void SockLink::send_control(FrameKind kind, Bytes&& body) noexcept {
  FrameHeader header{};
  header.kind = static_cast<std::uint8_t>(kind);
  try {
    writer_.send(header, std::move(body));
  } catch (...) {
    // Full: then the peer does not read, and what is queued will tell it that we live. Closed: no use.
  }
}

// ---- closing

void SockLink::close(const Error& why) noexcept { close_with(why, Farewell::kBye); }
void SockLink::reject(const Error& why) noexcept { close_with(why, Farewell::kReject); }

void SockLink::close_with(const Error& why, Farewell farewell) noexcept {
  if (forked()) return;
  {
    const std::lock_guard lock(mutex_);
    if (closing_.load(std::memory_order_relaxed)) return;
    try {
      why_ = why;
    } catch (...) {
      // No memory for its fields: the error of the constructor stays.
    }
    closing_.store(true, std::memory_order_release);
  }
  try {
    if (farewell == Farewell::kBye) send_control(FrameKind::kBye, write_bye(why));
    if (farewell == Farewell::kReject) send_control(FrameKind::kReject, write_reject(why));
  } catch (...) {
    // It learns of the end without the reason.
  }
  writer_.end(why.what());
  shutdown(socket_.get(), SHUT_RDWR);
  wake();
  if (reactor_.running()) return;  // the end of the socket wakes the reactor, or the driver
  // Nobody else brings on_closed any more. A reactor that stops after this was asked closes its links itself.
  std::unique_lock lock(mutex_);
  if (reading_ || ended_) return;
  reading_ = true;
  lock.unlock();
  finish();
}

// The end: called by the reader, which keeps the role.
void SockLink::finish() noexcept {
  reader_.end();
  reactor_.unwatch(watch_);
  const std::shared_ptr<LinkHandler> handler = std::move(handler_);
  const std::shared_ptr<LinkMeeting> meeting = std::move(meeting_);
  try {
    if (handler) handler->on_closed(why_);
  } catch (...) {
    // The link has ended all the same.
  }
  if (meeting) meeting->on_closed(why_);
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    role_free_.notify_all();
  }
  wake();
}

// ---- frames

// Before the peer is admitted nothing is taken but what introduces it.
std::size_t SockLink::body_bytes_max(const FrameHeader& header) const noexcept {
  const auto kind = static_cast<FrameKind>(header.kind);
  if (of_link(kind)) return kBodyBytesMax;
  return handler_ ? handler_->body_bytes_max(kind, header.verb) : 0;
}

void SockLink::on_frame(const FrameHeader& header, Bytes&& body) {
  const auto kind = static_cast<FrameKind>(header.kind);
  if (of_link(kind)) return on_link_frame(header, std::move(body));
  if (!handler_) throw Error(ErrorCode::kProtocol, "the peer sent a message before it was admitted");
  handler_->on_message(Message{kind, header.verb, header.id, std::move(body), header.lifetime_ms});
}

void SockLink::on_link_frame(const FrameHeader& header, Bytes&& body) {
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::kPing:
      return send_control(FrameKind::kPong, {});
    case FrameKind::kBye:
      told_why_ = true;
      return close_with(read_bye(body), Farewell::kNone);
    case FrameKind::kReject:
      told_why_ = true;
      return close_with(read_reject(body), Farewell::kNone);
    case FrameKind::kCapabilities:
    case FrameKind::kMetadata: {
      if (!meeting_) throw Error(ErrorCode::kProtocol, "the peer introduces itself twice");
      try {
        handler_ = meeting_->on_meeting(*this, header, std::move(body));
      } catch (const Error& error) {
        return reject(error);
      }
      if (handler_) meeting_.reset();
      return;
    }
    default:
      return;  // kPong: that it came is what counts
  }
}

Placement SockLink::on_data_frame(const FrameHeader& header, std::span<const std::byte> body) {
  if (!handler_) throw Error(ErrorCode::kProtocol, "the peer sent data before it was admitted");
  return handler_->on_data(header.id, body, header.payload_bytes);
}

void SockLink::on_placed_frame(std::uint64_t token, bool intact) { handler_->on_placed(token, intact); }

void SockLink::keep_descriptors(std::uint8_t flags) {
  std::vector<Descriptor> came = reader_.take_descriptors();
  const auto named = static_cast<unsigned>(flags & kDescriptorFlags);
  if (came.size() != static_cast<std::size_t>(__builtin_popcount(named))) {
    throw Error(ErrorCode::kProtocol, "the peer announces " + std::to_string(__builtin_popcount(named)) +
                                          " descriptors, and " + std::to_string(came.size()) + " came");
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < kDescriptorsMax; ++i) {
    if ((named >> i & 1U) != 0) passed_[i] = std::move(came[next++]);
  }
}

int SockLink::descriptor(std::size_t index) const noexcept {
  return index < kDescriptorsMax && !forked() ? passed_[index].get() : -1;
}

}  // namespace kvpool
