// A link over a Unix or TCP stream socket. It begins when both ends have proved that they know the secret.
//
// The reactor keeps the link alive until it is closed. A closed link no longer uses the reactor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/net/connect/handshake.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "kvpool/net/descriptor.h"
#include "kvpool/net/frame_reader.h"
#include "kvpool/net/frame_writer.h"
#include "kvpool/net/link.h"
#include "kvpool/net/reactor.h"

namespace kvpool {

class SockLink;

// Handles a link until the peer is admitted. Called by the same threads, and under the same rules, as a LinkHandler.
class LinkMeeting {
 public:
  virtual ~LinkMeeting() = default;
  // Handles a kCapabilities or kMetadata frame. Returns the handler of the link from now on, or null to stay in the
  // meeting. If it throws an Error, the link sends that error to the peer and closes.
  virtual std::shared_ptr<LinkHandler> on_meeting(SockLink& link, const FrameHeader& header, Bytes&& body) = 0;
  virtual void on_closed(const Error& why) noexcept = 0;  // before it was admitted
};

struct SockLinkParts {
  Descriptor socket;  // nonblocking
  Descriptor pidfd;
  std::int64_t process = 0;
  SessionKeys keys{};
  TagKind tag = TagKind::kNone;
  bool passes_descriptors = false;  // a Unix socket
  std::size_t queue_bytes_max = 0;
  std::string description;
  Bytes early;  // read from the socket before
  std::vector<Descriptor> early_descriptors;
};

class SockLink final : public Link, public std::enable_shared_from_this<SockLink>, private FrameSink {
 public:
  // The reactor reads the link from now on. Throws what Reactor::watch throws.
  static std::shared_ptr<SockLink> make(Reactor& reactor, SockLinkParts&& parts, std::shared_ptr<LinkMeeting> meeting);
  ~SockLink() override;
  SockLink(const SockLink&) = delete;
  SockLink& operator=(const SockLink&) = delete;

  void send(Message&& message) override;
  void send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                 std::int64_t deadline_ns, const std::atomic<bool>* cancelled) override;
  bool would_queue() noexcept override { return handling() && writer_.occupied(); }
  std::uint64_t payload_bytes_wanted() const noexcept override { return writer_.payload_bytes_wanted(); }
  bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) override;
  void wake() noexcept override;
  std::shared_ptr<void> attachment() const override { return attachment_; }
  // Before the peer is admitted.
  void attach(std::shared_ptr<void> attachment) noexcept { attachment_ = std::move(attachment); }
  int descriptor(std::size_t index) const noexcept override;
  int pidfd() const noexcept override { return pidfd_.get(); }
  std::int64_t process() const noexcept override { return process_; }
  std::string describe() const override { return description_; }
  void close(const Error& why) noexcept override;

  // --- For the handshake. Call these from within on_meeting, or before the peer can send anything but link-level
  // frames.
  FrameWriter& writer() noexcept { return writer_; }
  bool passes_descriptors() const noexcept { return passes_descriptors_; }
  void receive_checksums() noexcept { reader_.use_checksum(); }
  // Keeps the descriptors that came with the peer's metadata. Throws kProtocol unless they match the frame's flags.
  void keep_descriptors(std::uint8_t flags);
  // Handles, in this thread, the bytes that were read early and then what the socket has.
  void read_now() { on_ready(/*events=*/0); }
  // Whether the peer gave a reason for ending the link. Call it from within on_closed.
  bool told_why() const noexcept { return told_why_; }
  // Closes the link and tells the peer, whose connect() throws the same.
  void reject(const Error& why) noexcept;

  // --- for the keepalive
  bool closing() const noexcept { return closing_.load(std::memory_order_acquire); }
  std::int64_t heard_ns() const noexcept { return heard_ns_.load(std::memory_order_relaxed); }
  std::int64_t sent_ns() const noexcept { return writer_.sent_ns(); }
  void ping() noexcept { send_control(FrameKind::kPing, {}); }
  bool half_broken() const noexcept { return writer_.broken(); }

 private:
  class Handling;
  class RoleGuard;
  class Waiter;
  enum class Read : std::uint8_t { kSome, kNothing, kOver };

  SockLink(Reactor& reactor, SockLinkParts&& parts, std::shared_ptr<LinkMeeting> meeting);
  bool forked() const noexcept;
  // Whether this thread is within a handler of any link.
  static bool handling() noexcept;

  // FrameSink: called by the thread that reads.
  std::size_t body_bytes_max(const FrameHeader& header) const noexcept override;
  void on_frame(const FrameHeader& header, Bytes&& body) override;
  Placement on_data_frame(const FrameHeader& header, std::span<const std::byte> body) override;
  void on_placed_frame(std::uint64_t token, bool intact) override;
  void on_link_frame(const FrameHeader& header, Bytes&& body);

  // Reading.
  void on_ready(std::uint32_t events) noexcept;
  bool take_role_for_reactor() noexcept;
  void give_up_role() noexcept;
  void hand_over_role() noexcept;
  void set_interest() noexcept;
  template <class GoOn>
  bool step_while(GoOn&& go_on) noexcept;
  Read fill() noexcept;
  void finish() noexcept;
  bool read_until(std::int64_t deadline_ns, const std::function<bool()>& done);
  void sleep_until(std::int64_t deadline_ns, std::uint64_t seen) noexcept;

  void send_control(FrameKind kind, Bytes&& body) noexcept;
  enum class Farewell : std::uint8_t { kNone, kBye, kReject };
  void close_with(const Error& why, Farewell farewell) noexcept;

  Reactor& reactor_;
  const std::uint32_t born_;
  const std::string description_;
  const bool passes_descriptors_;
  const std::int64_t process_;
  const Descriptor socket_;
  const Descriptor pidfd_;
  const Descriptor wake_;  // eventfd: ends the sleep of the driver
  Descriptor passed_[kDescriptorsMax];
  FrameWriter writer_;

  // Invariants. One thread at a time has the role of the reader, so callbacks of one link never overlap:
  //   1. `reading_`: a thread has the role, either the reactor's or a driver. Only this thread uses reader_, told_why_,
  //      handler_ and meeting_. It takes the role and gives it up under mutex_, so the next reader sees the state that
  //      the last one left.
  //   2. While a driver has the role, the reactor does not watch for input, so that the two do not wake each other.
  //   3. When no thread has the role and the link has not ended, either the reactor watches for input, or a waiting
  //      driver has been notified and has not returned yet (it takes the role or passes it on).
  //   4. A thread gives up the role only when no complete frame is buffered: nothing would wake a reader for it.
  //   5. A thread that would give up the role or pass it on while closing_ is set finishes the link instead, and keeps
  //      the role for ever. close() sets closing_ and then shuts the socket down, which wakes the thread that waits for
  //      input.
  // Lock order: the writer's, then mutex_, then the reactor's. No handler or callback runs with mutex_ held.
  std::mutex mutex_;
  std::condition_variable role_free_;
  bool reading_ = false;
  bool driven_ = false;          // the reader is a driver
  std::atomic<int> waiting_{0};  // drivers that wait for the role; changed under mutex_
  bool room_wanted_ = false;     // the writer wants to know when the socket has room
  std::uint32_t interest_ = 0;   // the events that the reactor watches for
  bool ended_ = false;           // on_closed was called
  std::atomic<bool> closing_{false};
  Error why_;  // set before closing_
  std::uint64_t watch_ = 0;

  std::atomic<std::uint64_t> wakes_{0};
  std::atomic<bool> sleeping_{false};  // the driver that has the role sleeps
  std::atomic<std::int64_t> heard_ns_;

  FrameReader reader_;
  bool told_why_ = false;
  std::shared_ptr<LinkMeeting> meeting_;
  std::shared_ptr<LinkHandler> handler_;
  std::shared_ptr<void> attachment_;
};

}  // namespace kvpool
