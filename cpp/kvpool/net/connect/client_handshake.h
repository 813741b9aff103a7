// The client's side of a handshake. It runs in the thread that calls connect().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "kvpool/net/connect/endpoint_state.h"
#include "kvpool/net/connect/handshake_messages.h"

namespace kvpool {

// Until a deadline, until the endpoint is closed, or until the caller gives up.
class ClientTimeouts final : public Patience {
 public:
  ClientTimeouts(const EndpointState& endpoint_state, std::string address, Waiting waiting)
      : endpoint_state_(endpoint_state), address_(std::move(address)), waiting_(std::move(waiting)) {}
  void check() const override;  // throws kDeadline, kClosed, kCancelled
  std::int64_t deadline_ns() const noexcept { return waiting_.until_ns; }
  const Waiting& waiting() const noexcept { return waiting_; }

 private:
  const EndpointState& endpoint_state_;
  const std::string address_;
  const Waiting waiting_;
};

class ClientHandshake final : public LinkMeeting {
 public:
  explicit ClientHandshake(std::shared_ptr<EndpointState> endpoint_state)
      : endpoint_state_(std::move(endpoint_state)) {}

  // Connects, proves that it knows the secret, and reads the server's first frame. Connects again if a crowded listener
  // has disconnected it before its proof. Throws what Endpoint::connect throws; then the server has not admitted this
  // side.
  static std::shared_ptr<ClientHandshake> begin(const std::shared_ptr<EndpointState>& endpoint_state,
                                                const SockAddress& address, const ClientTimeouts& patience);
  const ServerCapabilities& capabilities() const noexcept { return capabilities_; }
  // Introduces itself. Returns the link once both sides have admitted each other.
  std::shared_ptr<Link> introduce(const ClientTimeouts& patience, std::uint64_t meeting);
  void leave(const Error& why) noexcept { link_->close(why); }

  std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) override;
  void on_closed(const Error& why) noexcept override;

 private:
  enum class Stage : std::uint8_t { kCalled, kCapabilitiesRead, kMetadataSent, kAdmitted, kOver };

  struct Shaken;

  static std::shared_ptr<ClientHandshake> call(const std::shared_ptr<EndpointState>& endpoint_state,
                                               const SockAddress& address, const ClientTimeouts& patience,
                                               Shaken& shaken);
  void wait_for(Stage stage, const ClientTimeouts& patience);
  void hold_writer(const ClientTimeouts& patience);

  const std::shared_ptr<EndpointState> endpoint_state_;
  bool wants_checksum_ = false;
  std::uint64_t meeting_ = 0;  // written before kMetadataSent
  std::shared_ptr<SockLink> link_;
  std::atomic<Stage> stage_{Stage::kCalled};
  ServerCapabilities capabilities_;  // written before kCapabilitiesRead
  std::optional<Error> why_over_;    // written before kOver
};

}  // namespace kvpool
