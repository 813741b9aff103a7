// The server's side of a meeting: from the accepted socket to the admitted link, in the reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/transport/hall.h"
#include "kvpool/transport/handshake.h"

namespace kvpool {

class Greeting final : public LinkMeeting, public std::enable_shared_from_this<Greeting> {
 public:
  // In the reactor's thread. Throws what the reactor throws.
  static void start(const std::shared_ptr<Hall>& hall, std::uint64_t id, Descriptor socket, bool tcp);
  Greeting(std::shared_ptr<Hall> hall, std::uint64_t id, Descriptor socket, bool tcp);

  // Ends it, from any thread; waits for a call that is under way, unless within it.
  void abandon(const Error& why) noexcept;

  std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) override;
  void on_closed(const Error& why) noexcept override;

 private:
  void on_ready();
  void shake_hands();
  void answer(const Bytes& out);
  void make_link(Bytes&& early);
  void drop() noexcept;
  void over() noexcept;

  const std::shared_ptr<Hall> hall_;
  const std::uint64_t id_;
  const bool tcp_;
  const Channel channel_;
  Descriptor socket_;  // until there is a link
  Handshake handshake_;
  std::vector<Descriptor> descriptors_;
  bool wants_checksum_ = false;
  std::mutex mutex_;
  std::shared_ptr<SockLink> link_;  // under mutex_
  std::uint64_t watch_ = 0;
  std::uint64_t timer_ = 0;
};

}  // namespace kvpool
