#include "kvpool/net/connect/client_handshake.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "kvpool/base/clock.h"
#include "kvpool/net/connection_error.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

constexpr std::int64_t kCancelPollNs = 50'000'000;
constexpr std::size_t kReadBytes = 4096;
constexpr std::int64_t kPauseNs = 2'000'000;  // before it calls again; twice as long each time
constexpr std::int64_t kPauseNsMax = 50'000'000;
constexpr int kUnheardTries = 8;

void send_whole(const Descriptor& socket, const Bytes& out, const Patience& patience) {
  for (std::size_t sent = 0; sent < out.size();) {
    const ssize_t bytes = send(socket.get(), out.data() + sent, out.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (bytes > 0) {
      sent += static_cast<std::size_t>(bytes);
    } else if (bytes == 0 || errno == EAGAIN || errno == EWOULDBLOCK) {
      patience.wait(socket.get(), POLLOUT);
    } else if (errno != EINTR) {
      throw connection_error("the connection broke during the handshake", errno);
    }
  }
}

}  // namespace

// How far a handshake has come, and what is left of it.
struct ClientHandshake::Shaken {
  enum class Heard : std::uint8_t { kNotConnected, kNothing, kHello, kProof };

  void shake_hands(const Descriptor& socket, const SockAddress& address, Channel channel, const std::string& secret,
                   const Patience& patience);

  Heard heard = Heard::kNotConnected;
  SessionKeys keys{};
  Bytes early;  // what came behind the handshake
  std::vector<Descriptor> descriptors;
};

// Proves and is proved to.
void ClientHandshake::Shaken::shake_hands(const Descriptor& socket, const SockAddress& address, Channel channel,
                                          const std::string& secret, const Patience& patience) {
  heard = Heard::kNothing;
  Handshake handshake(Handshake::Role::kClient, secret, channel);
  Bytes out = handshake.start();
  while (!handshake.done()) {
    send_whole(socket, out, patience);
    out.clear();
    std::byte bytes[kReadBytes];
    const ssize_t got = receive_now(socket.get(), bytes, channel == Channel::kNetwork ? nullptr : &descriptors);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      patience.wait(socket.get(), POLLIN);
      continue;
    }
    if (got <= 0) {
      throw Error(ErrorCode::kPeerLost, format_address(address) + " closed the connection during the handshake" +
                                            (got < 0 ? ": " + std::generic_category().message(errno) : ""));
    }
    const std::span<const std::byte> arrived(bytes, static_cast<std::size_t>(got));
    const std::size_t taken = handshake.advance(arrived, out);
    if (handshake.version() != 0) heard = Heard::kHello;
    early.assign(arrived.begin() + static_cast<std::ptrdiff_t>(taken), arrived.end());
    if (!descriptors.empty() && !handshake.done()) {
      throw Error(ErrorCode::kProtocol, "descriptors came before it was known who sends them");
    }
  }
  heard = Heard::kProof;
  send_whole(socket, out, patience);
  keys = handshake.keys();
}

void ClientTimeouts::check() const {
  if (endpoint_state_.closed()) throw Error(ErrorCode::kClosed, "the pool was closed while it called " + address_);
  waiting_.check();
  if (monotonic_ns() >= waiting_.until_ns) throw Error(ErrorCode::kDeadline, address_ + " did not answer in time");
}

// A listener that strangers crowd disconnects the oldest callers that have proved nothing, and this one may be among
// them. A kvpool that has said hello closes for no other reason but its own end. What has said nothing may be no kvpool
// at all: that gets a few tries.
std::shared_ptr<ClientHandshake> ClientHandshake::begin(const std::shared_ptr<EndpointState>& endpoint_state,
                                                        const SockAddress& address, const ClientTimeouts& patience) {
  int tries_left = kUnheardTries;
  for (std::int64_t pause_ns = kPauseNs;; pause_ns = std::min(2 * pause_ns, kPauseNsMax)) {
    Shaken shaken;
    try {
      return call(endpoint_state, address, patience, shaken);
    } catch (const Error& error) {
      // It may be reset even before connect() has returned.
      const bool silence = shaken.heard == Shaken::Heard::kNothing || error.cause() == ErrorCause::kReset;
      const bool unheard = silence && --tries_left > 0;
      const bool sent_away = unheard || shaken.heard == Shaken::Heard::kHello;
      if (error.code() != ErrorCode::kPeerLost || !sent_away) throw;
    }
    patience.pause(pause_ns);
  }
}

// Once.
std::shared_ptr<ClientHandshake> ClientHandshake::call(const std::shared_ptr<EndpointState>& endpoint_state,
                                                       const SockAddress& address, const ClientTimeouts& patience,
                                                       Shaken& shaken) {
  patience.check();
  Descriptor socket = dial(address, patience);
  tune_socket(socket, address.tcp, endpoint_state->options.lease_ns);
  endpoint_state->check_user(socket, address.tcp);
  const Channel channel = channel_of(socket, address.tcp);
  SockLinkParts parts = endpoint_state->parts(std::move(socket), channel, SessionKeys{});
  shaken.shake_hands(parts.socket, address, channel, endpoint_state->options.secret, patience);
  parts.keys = shaken.keys;
  parts.early = std::move(shaken.early);
  parts.early_descriptors = std::move(shaken.descriptors);
  const auto handshake = std::make_shared<ClientHandshake>(endpoint_state);
  handshake->wants_checksum_ = endpoint_state->trusts_network(address.tcp);
  handshake->link_ = SockLink::make(endpoint_state->reactor, std::move(parts), handshake);
  handshake->wait_for(Stage::kCapabilitiesRead, patience);
  return handshake;
}

std::shared_ptr<Link> ClientHandshake::introduce(const ClientTimeouts& patience, std::uint64_t meeting) {
  try {
    Introduction own = endpoint_state_->introduction();
    own.metadata.meeting = meeting_ = meeting;
    MetadataFrame own_metadata = make_metadata_frame(*link_, own, wants_checksum_);
    link_->attach(own.attachment);
    hold_writer(patience);
    stage_.store(Stage::kMetadataSent);
    send_metadata(*link_, std::move(own_metadata), wants_checksum_ && capabilities_.checksum);
  } catch (const Error& error) {
    leave(error);
    throw;
  }
  wait_for(Stage::kAdmitted, patience);
  endpoint_state_->keepalive->add(link_);
  return link_;
}

// Only an answer to a ping can be on its way: a moment.
void ClientHandshake::hold_writer(const ClientTimeouts& patience) {
  while (!link_->writer().hold()) patience.pause(kPauseNs);
}

void ClientHandshake::wait_for(Stage stage, const ClientTimeouts& patience) {
  const auto reached = [&] { return stage_.load() >= stage; };
  try {
    while (!link_->drive(std::min(patience.deadline_ns(), monotonic_ns() + kCancelPollNs), reached)) patience.check();
  } catch (const Error& error) {
    leave(error);
    throw;
  }
  if (stage_.load() == Stage::kOver) throw Error(*why_over_);
}

std::shared_ptr<LinkHandler> ClientHandshake::on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) {
  const bool metadata = header.kind == static_cast<std::uint8_t>(FrameKind::kMetadata);
  if (stage_.load() != (metadata ? Stage::kMetadataSent : Stage::kCalled)) {
    throw Error(ErrorCode::kProtocol, "the peer introduces itself out of turn");
  }
  if (!metadata) {
    capabilities_ = read_capabilities(body);
    stage_.store(Stage::kCapabilitiesRead);
    link.wake();
    return nullptr;
  }
  if (endpoint_state_->closed()) throw Error(ErrorCode::kClosed, "the pool is being closed");
  link.keep_descriptors(header.flags);
  PeerMetadata theirs = take_metadata(link, body);
  theirs.meeting = meeting_;
  if (wants_checksum_ && capabilities_.checksum) link.receive_checksums();
  auto handler = endpoint_state_->admit(link.shared_from_this(), theirs, /*initiated_here=*/true);
  stage_.store(Stage::kAdmitted);
  link.wake();
  return handler;
}

void ClientHandshake::on_closed(const Error& why) noexcept {
  try {
    why_over_ = why;
    // Two that call each other: the peer may have ended this connection for its own before it had answered by this one.
    const bool asked = stage_.load() == Stage::kMetadataSent && !link_->told_why();
    if (asked && why.code() == ErrorCode::kPeerLost) why_over_ = why.because(ErrorCause::kUnanswered);
  } catch (...) {
    why_over_.emplace(ErrorCode::kPeerLost, "");
  }
  stage_.store(Stage::kOver);
}

}  // namespace kvpool
