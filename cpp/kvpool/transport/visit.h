// The client's side of a meeting, in the thread of who calls connect().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "kvpool/transport/hall.h"
#include "kvpool/transport/meeting.h"

namespace kvpool {

// Until a deadline, until the endpoint is closed, or until the caller gives up.
class VisitPatience final : public Patience {
 public:
  VisitPatience(const Hall& hall, std::string address, Waiting waiting)
      : hall_(hall), address_(std::move(address)), waiting_(std::move(waiting)) {}
  void check() const override;  // throws kDeadline, kClosed, kCancelled
  std::int64_t deadline_ns() const noexcept { return waiting_.until_ns; }
  const Waiting& waiting() const noexcept { return waiting_; }

 private:
  const Hall& hall_;
  const std::string address_;
  const Waiting waiting_;
};

class Visit final : public LinkMeeting {
 public:
  explicit Visit(std::shared_ptr<Hall> hall) : hall_(std::move(hall)) {}

  // Connects, proves, and listens to what the server says first. Calls again when a crowded listener has disconnected
  // it before its proof. Throws what Endpoint::connect throws; then the server has admitted nobody.
  static std::shared_ptr<Visit> begin(const std::shared_ptr<Hall>& hall, const SockAddress& address,
                                      const VisitPatience& patience);
  const DoorBody& door() const noexcept { return door_; }
  // Introduces itself. Returns the link once both sides have admitted each other.
  std::shared_ptr<Link> introduce(const VisitPatience& patience, std::uint64_t meeting);
  void leave(const Error& why) noexcept { link_->close(why); }

  std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) override;
  void on_closed(const Error& why) noexcept override;

 private:
  enum class Stage : std::uint8_t { kCalled, kDoorSeen, kCardSent, kAdmitted, kOver };

  struct Shaken;

  static std::shared_ptr<Visit> call(const std::shared_ptr<Hall>& hall, const SockAddress& address,
                                     const VisitPatience& patience, Shaken& shaken);
  void wait_for(Stage stage, const VisitPatience& patience);
  void hold_writer(const VisitPatience& patience);

  const std::shared_ptr<Hall> hall_;
  bool wants_checksum_ = false;
  std::uint64_t meeting_ = 0;  // written before kCardSent
  std::shared_ptr<SockLink> link_;
  std::atomic<Stage> stage_{Stage::kCalled};
  DoorBody door_;                  // written before kDoorSeen
  std::optional<Error> why_over_;  // written before kOver
};

}  // namespace kvpool
