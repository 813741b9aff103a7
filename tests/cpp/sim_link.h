// A link between two simulated processes, with the faults of a network under it.
//
// Below is a network that loses, delays, reorders, repeats and damages frames, on top the same promise as a socket's:
// messages in order, each once, or the end. So a lost frame is sent again, one that came early waits, one that came
// before is dropped, and one whose tag is wrong ends the link. Silence for longer than the lease ends it, too.
//
// Payloads land in chunks, at later times: whatever else happens, happens in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kvpool/net/link.h"
#include "sim_clock.h"

namespace kvpool {

// Chances in a thousand, of each frame unless it says otherwise.
struct SimFaults {
  std::uint32_t lose = 0;
  std::uint32_t reorder = 0;  // delayed by up to delay_max_ns more
  std::uint32_t replay = 0;
  std::uint32_t damage = 0;
  std::uint32_t give_up = 0;  // of each data frame that came too late, or was cancelled: that it had begun
  std::uint32_t busy = 0;     // of each send(): more is queued than may be
  std::uint32_t abort = 0;    // of each end of a link: what is on its way is lost, too
  std::int64_t delay_ns = 50'000;
  std::int64_t delay_max_ns = 5'000'000;
  std::int64_t resend_ns = 20'000'000;
  std::int64_t lease_ns = 500'000'000;
  std::size_t staging_buffer_bytes = 96;  // at most, of a chunk

  // Bugs, planted to see that tests find them.
  bool keep_replays = false;
};

// Told of every chunk before it lands: where, how long, and who writes it.
using SimWatch = std::function<void(const std::byte* at, std::size_t bytes, SimClock::Actor writer)>;

// Thrown by drive() in a process that was killed while it waited.
class SimKilled : public std::exception {};

class SimLink final : public Link, public std::enable_shared_from_this<SimLink> {
 public:
  using Pair = std::pair<std::shared_ptr<SimLink>, std::shared_ptr<SimLink>>;
  // All four outlive both ends.
  static Pair make(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor left,
                   SimClock::Actor right);

  SimLink(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor actor);
  // Before anything is sent to this end.
  void start(std::shared_ptr<LinkHandler> handler);

  void send(Message&& message) override;
  void send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                 std::int64_t deadline_ns, const std::atomic<bool>* cancelled) override;
  bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) override;
  void wake() noexcept override {}
  int descriptor(std::size_t /*index*/) const noexcept override { return -1; }
  int pidfd() const noexcept override { return -1; }
  std::string describe() const override { return "sim"; }
  void close(const Error& why) noexcept override;

  // Nothing gets through in this direction until then.
  void cut(std::int64_t until_ns) noexcept { cut_until_ns_ = until_ns; }
  // What the kernel does for a process that was killed.
  void die();
  bool ended() const noexcept { return ended_; }
  // True when it was a damaged frame that ended it.
  bool damaged() const noexcept { return damaged_; }
  // Nobody is told of anything any more. For the end of a test.
  void detach() noexcept { handler_.reset(); }

 private:
  struct Payload {
    Placement placement;
    Bytes bytes;
    std::size_t landed = 0;
    PayloadEnd end = PayloadEnd::kWhole;
    bool right = true;  // the last tag
  };

  // `head`: all but its body counts.
  Bytes make_frame(const Message& head, std::span<const std::byte> body, std::span<const std::byte> payload,
                   PayloadEnd end);
  void give_up_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces);
  void transmit(std::uint64_t number, std::shared_ptr<const Bytes> frame);
  void arrive(std::uint64_t number, std::shared_ptr<const Bytes> frame);
  void wait_to_read();
  void read();
  void handle(const Bytes& frame);
  void begin_payload(std::uint64_t id, std::span<const std::byte> body, Payload&& payload);
  void land();
  void land_chunk();
  void check_lease();
  void part(bool abort);
  void reset_by_peer();
  void finish() noexcept;

  SimClock& clock_;
  const SimFaults& faults_;
  const SimWatch& watch_;
  const SimClock::Actor actor_;
  std::weak_ptr<SimLink> other_;
  SimClock::Actor writer_ = SimClock::kNobody;  // at the other end
  std::shared_ptr<LinkHandler> handler_;
  bool closing_ = false;
  bool ended_ = false;
  bool damaged_ = false;
  bool reset_ = false;  // nothing arrives any more
  std::optional<Error> why_;
  std::int64_t cut_until_ns_ = 0;

  std::uint64_t sent_ = 0;      // frames
  std::uint64_t received_ = 0;  // frames, in order
  std::uint64_t handled_ = 0;   // frames
  std::map<std::uint64_t, std::shared_ptr<const Bytes>> early_;
  std::deque<std::shared_ptr<const Bytes>> ready_;  // an empty frame is the end
  bool reading_ = false;                            // read() will come
  std::optional<Payload> payload_;
  std::int64_t heard_ns_ = 0;
};

}  // namespace kvpool
