// The server's side of a handshake, from the accepted socket to the admitted link. It runs in the reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/net/connect/endpoint_state.h"
#include "kvpool/net/connect/handshake.h"
#include "kvpool/net/connect/listener.h"

namespace kvpool {

class ServerHandshake final : public LinkMeeting, public std::enable_shared_from_this<ServerHandshake> {
 public:
  ServerHandshake(std::shared_ptr<EndpointState> endpoint_state, std::shared_ptr<Listener> listener, std::uint64_t id,
                  Descriptor socket, bool tcp);
  // In the reactor's thread. Throws what the reactor throws; then the server handshake has ended.
  void start();

  // Ends it, from any thread; waits for a call that is under way, unless within it.
  void abandon(const Error& why) noexcept;
  // Disconnects a caller that has not proved that it knows the secret, because another caller needs its place. Call it
  // in the reactor's thread.
  void send_away() noexcept;

  std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) override;
  void on_closed(const Error& why) noexcept override;

 private:
  void on_ready();
  void shake_hands();
  void advance(std::span<const std::byte> arrived);
  void answer(const Bytes& out);
  void make_link(Bytes&& early);
  void drop() noexcept;
  void over() noexcept;

  const std::shared_ptr<EndpointState> endpoint_state_;
  const std::shared_ptr<Listener> listener_;
  const std::uint64_t id_;  // at the listener
  const bool tcp_;
  const Channel channel_;
  Descriptor socket_;                   // until there is a link
  std::optional<Handshake> handshake_;  // made when the caller says something: most strangers say nothing
  std::vector<Descriptor> descriptors_;
  bool wants_checksum_ = false;
  std::mutex mutex_;
  std::shared_ptr<SockLink> link_;  // under mutex_
  std::uint64_t watch_ = 0;
  std::uint64_t timer_ = 0;
};

}  // namespace kvpool
