#include "kvpool/net/connect/server_handshake.h"

#include <cerrno>
#include <new>
#include <system_error>

#include "kvpool/base/clock.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

constexpr std::size_t kReadBytes = 4096;

}  // namespace

ServerHandshake::ServerHandshake(std::shared_ptr<EndpointState> endpoint_state, std::shared_ptr<Listener> listener,
                                 std::uint64_t id, Descriptor socket, bool tcp)
    : endpoint_state_(std::move(endpoint_state)),
      listener_(std::move(listener)),
      id_(id),
      tcp_(tcp),
      channel_(channel_of(socket, tcp)),
      socket_(std::move(socket)) {}

void ServerHandshake::start() {
  const auto self = shared_from_this();
  try {
    // No call comes before this one has returned: it is in the reactor's thread.
    watch_ = endpoint_state_->reactor.watch(socket_.get(), [self](std::uint32_t) { self->on_ready(); });
    timer_ = endpoint_state_->reactor.at(monotonic_ns() + endpoint_state_->options.handshake_ns, [self] {
      self->abandon(Error(ErrorCode::kDeadline, "the peer did not introduce itself in time"));
    });
  } catch (...) {
    drop();
    throw;
  }
  on_ready();  // a peer that waited in the backlog has said hello by now: it does not count as silent
}

void ServerHandshake::abandon(const Error& why) noexcept {
  endpoint_state_->reactor.unwatch(watch_);
  endpoint_state_->reactor.cancel(timer_);
  // Nothing of the handshake runs from here on.
  std::shared_ptr<SockLink> link;
  {
    const std::lock_guard lock(mutex_);
    link = link_;
  }
  link ? link->reject(why) : drop();
}

// The other end sees a reset. Closed in the usual way, each stranger would leave a connection in TIME_WAIT behind.
void ServerHandshake::send_away() noexcept {
  endpoint_state_->reactor.unwatch(watch_);
  const linger at_once{1, 0};
  if (tcp_) setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  socket_.reset();
  drop();
}

// ---- the handshake

void ServerHandshake::on_ready() {
  try {
    shake_hands();
  } catch (...) {
    drop();  // a stranger, or one with a wrong secret, is not worth a word more
  }
}

void ServerHandshake::shake_hands() {
  std::byte bytes[kReadBytes];
  const ssize_t got = receive_now(socket_.get(), bytes, channel_ == Channel::kNetwork ? nullptr : &descriptors_);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) return drop();
  advance({bytes, static_cast<std::size_t>(got)});
}

void ServerHandshake::advance(std::span<const std::byte> arrived) {
  if (!handshake_) handshake_.emplace(Handshake::Role::kServer, endpoint_state_->options.secret, channel_);
  Bytes out;
  std::size_t taken = 0;
  try {
    taken = handshake_->advance(arrived, out);
  } catch (...) {
    answer(out);
    throw;
  }
  if (!descriptors_.empty() && !handshake_->done()) {
    throw Error(ErrorCode::kProtocol, "descriptors came before it was known who sends them");
  }
  if (handshake_->done()) {
    listener_->heard_proof(id_);
  } else if (handshake_->version() != 0) {
    listener_->heard_hello(id_);
  }
  answer(out);
  if (handshake_->done()) make_link(Bytes(arrived.begin() + static_cast<std::ptrdiff_t>(taken), arrived.end()));
}

// A socket that has carried nothing yet takes an answer at once, or is of no use.
void ServerHandshake::answer(const Bytes& out) {
  if (out.empty()) return;
  if (send(socket_.get(), out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(out.size())) {
    throw Error(ErrorCode::kPeerLost, "the connection takes no answer");
  }
}

void ServerHandshake::make_link(Bytes&& early) {
  endpoint_state_->reactor.unwatch(watch_);  // the link watches the socket from now on
  tune_socket(socket_, tcp_, endpoint_state_->options.lease_ns);
  wants_checksum_ = endpoint_state_->trusts_network(tcp_);
  const ServerCapabilities capabilities = endpoint_state_->capabilities(tcp_);
  SockLinkParts parts = endpoint_state_->parts(std::move(socket_), channel_, handshake_->keys());
  parts.early = std::move(early);
  parts.early_descriptors = std::move(descriptors_);
  const auto link = SockLink::make(endpoint_state_->reactor, std::move(parts), shared_from_this());
  {
    const std::lock_guard lock(mutex_);
    link_ = link;
  }
  try {
    endpoint_state_->keepalive->add(link);
    FrameHeader header{};
    header.kind = static_cast<std::uint8_t>(FrameKind::kCapabilities);
    link->writer().hold();
    link->writer().release(header, write_body(capabilities), {}, /*checksum_from_then_on=*/false);
  } catch (const Error& error) {
    return link->close(error);
  } catch (const std::bad_alloc&) {
    return link->close(Error(ErrorCode::kOutOfMemory, "no memory to meet a peer"));
  }
  link->read_now();
}

// ---- the metadata

std::shared_ptr<LinkHandler> ServerHandshake::on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) {
  if (header.kind != static_cast<std::uint8_t>(FrameKind::kMetadata)) {
    throw Error(ErrorCode::kProtocol, "a client must not send capabilities");
  }
  if (endpoint_state_->closed()) throw Error(ErrorCode::kClosed, "the pool is being closed");
  link.keep_descriptors(header.flags);
  const PeerMetadata metadata = take_metadata(link, body);
  const bool checksum = wants_checksum_ && (header.flags & kChecksumFlag) != 0;
  if (checksum) link.receive_checksums();
  const Introduction own = endpoint_state_->introduction();
  MetadataFrame own_metadata = make_metadata_frame(link, own, wants_checksum_);
  link.attach(own.attachment);
  // What the pool sends on its new link must come behind the metadata: it is queued until then.
  if (!link.writer().hold()) throw Error(ErrorCode::kPeerLost, "the connection takes no metadata");
  std::shared_ptr<LinkHandler> handler;
  try {
    handler = endpoint_state_->admit(link.shared_from_this(), metadata, /*initiated_here=*/false);
  } catch (const Error& error) {  // the writer is given back with the refusal
    FrameHeader refusal{};
    refusal.kind = static_cast<std::uint8_t>(FrameKind::kReject);
    link.writer().release(refusal, write_reject(error), {}, /*checksum_from_then_on=*/false);
    throw;
  }
  over();
  try {
    send_metadata(link, std::move(own_metadata), checksum);
  } catch (const Error& error) {
    link.close(error);  // and the handler learns of it
  }
  return handler;
}

void ServerHandshake::on_closed(const Error& /*why*/) noexcept { over(); }

// ---- the end

// Without a link.
void ServerHandshake::drop() noexcept {
  endpoint_state_->reactor.unwatch(watch_);
  if (socket_) shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  descriptors_.clear();
  over();
}

void ServerHandshake::over() noexcept {
  endpoint_state_->reactor.cancel(timer_);
  {
    const std::lock_guard lock(mutex_);
    link_.reset();
  }
  listener_->end(id_);
}

}  // namespace kvpool
