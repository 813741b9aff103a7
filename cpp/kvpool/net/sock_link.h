// A link over a Unix or TCP stream socket, from the moment at which both ends have proved that they know the secret.
//
// It lives until it is closed: the reactor keeps it. Once closed it does not touch the reactor any more.
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

// Who handles a link until it is admitted. Called as a LinkHandler is.
class LinkMeeting {
 public:
  virtual ~LinkMeeting() = default;
  // A kDoor or kMetadata frame. Returns who handles the link from now on, null to go on meeting. An Error that it
  // throws is told to the peer and closes the link.
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
  // The link is read from now on. Throws what Reactor::watch throws.
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

  // --- for those who meet. From within on_meeting, or before the peer can send anything that is not a link-level
  // frame.
  FrameWriter& writer() noexcept { return writer_; }
  bool passes_descriptors() const noexcept { return passes_descriptors_; }
  void receive_checksums() noexcept { reader_.use_checksum(); }
  // The descriptors that came with peer metadata whose frame had these flags. Throws kProtocol when they do not fit.
  void keep_descriptors(std::uint8_t flags);
  // Reads what came early, in this thread, and what there is.
  void read_now() { on_ready(/*events=*/0); }
  // Whether the peer has said why it ended the link. From within on_closed.
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
  // Whether this thread handles what a link has brought, this one or another.
  static bool handling() noexcept;

  // FrameSink: called by the thread that reads.
  void on_frame(const FrameHeader& header, Bytes&& body) override;
  Placement on_data_frame(const FrameHeader& header, std::span<const std::byte> body) override;
  void on_placed_frame(std::uint64_t token, bool intact) override;
  void on_link_frame(const FrameHeader& header, Bytes&& body);

  // Reading.
  void on_ready(std::uint32_t events) noexcept;
  bool take_role_for_reactor() noexcept;
  void give_up_role() noexcept;
  void settle() noexcept;
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

  // Invariants. The role of the reader is what makes callbacks of one link never overlap:
  //   1. `reading_`: one thread has the role, the reactor's or a driver. It alone uses reader_, told_why_, handler_ and
  //   meeting_. The
  //      role is taken and given up under mutex_, so what one reader left is what the next one finds.
  //   2. While a driver reads, the reactor does not ask for input, so that the two do not wake each other.
  //   3. When nobody has the role and the link has not ended, then the reactor asks for input, or a driver that waits
  //      has been notified and has not returned yet (it takes the role, or settles who does).
  //   4. The role is given up only when no whole frame is buffered: nothing would tell of it.
  //   5. Who gives up the role while closing_ is set finishes the link instead, and keeps the role for ever. close()
  //      shuts the socket down after it has set closing_, which brings whoever waits for input.
  // Locks: the writer's, then mutex_, then the reactor's. Nothing of others is called with mutex_ held.
  std::mutex mutex_;
  std::condition_variable role_free_;
  bool reading_ = false;
  bool driven_ = false;          // the reader is a driver
  std::atomic<int> waiting_{0};  // drivers that wait for the role; changed under mutex_
  bool room_wanted_ = false;     // the writer asks to be told of room
  std::uint32_t interest_ = 0;   // what the reactor was asked for
  bool ended_ = false;           // on_closed has come
  std::atomic<bool> closing_{false};
  Error why_;  // set before closing_
  std::uint64_t watch_ = 0;

  std::atomic<std::uint64_t> wakes_{0};
  std::atomic<bool> sleeping_{false};  // the driver that reads sleeps
  std::atomic<std::int64_t> heard_ns_;

  FrameReader reader_;
  bool told_why_ = false;
  std::shared_ptr<LinkMeeting> meeting_;
  std::shared_ptr<LinkHandler> handler_;
  std::shared_ptr<void> attachment_;
};

}  // namespace kvpool
