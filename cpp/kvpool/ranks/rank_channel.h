// A connection between a rank here and a rank of a peer. It carries block content only; the protocol runs between the
// two schedulers, to whose meeting the channel belongs. docs/adr/0008-logical-instances.md.
//
// Invariants
//   N1  write() returns, or throws anything but kPeerLost, only when all that it has written is in place and nothing
//       more of it is on its way. To know that, it sends a flush behind content that the receiver places from the link,
//       and waits for the answer to content that the receiver takes beside the link (route_receiver.h). After kPeerLost
//       the channel is closed, and never says that this side writes no more. Losing this side's GPU in a write has the
//       same effect, because what it still had under way is unknown.
//   N2  over() is true only when neither side writes any more. For this side: it has said so, or its link has ended.
//       For the peer: it has said so; or its link has ended and its access does not let it write any more; or it is
//       proved to be gone. In addition, this side must no longer be receiving anything that the peer had announced,
//       even if the peer has since said that it writes no more.
//
// The channel places content in any block of this rank that the peer names, because a rank knows no owners. The peer's
// scheduler is responsible for its ranks, as it is for ranks that write here by themselves.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/base/segment.h"
#include "kvpool/base/wait.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/route_receiver.h"
#include "kvpool/transfer/block_host.h"
#include "kvpool/transfer/departing_peer.h"
#include "kvpool/transfer/parting.h"

namespace kvpool {

class RankChannel final : public LinkHandler, public DepartingPeer, public std::enable_shared_from_this<RankChannel> {
 public:
  // Called from any thread, without a lock held: when the link has ended, when the last write has ended, or when the
  // channel may be over.
  struct Events {
    std::function<void(const std::shared_ptr<RankChannel>& channel, const std::shared_ptr<Link>& link)> on_ended;
    std::function<void(const RankChannel& channel)> on_changed;
    std::function<void(const RankChannel& channel)> on_heard;  // the peer's first word: it has admitted this side
    std::function<void(const Error& why)> on_device_lost;      // the GPU of this side, and all that is on it
    // Soon runs work that waits only for other work of the same `key`. Throws std::bad_alloc; then it does not run.
    std::function<void(const void* key, std::function<void()> work)> run_aside;
  };
  // The blocks of this side. `staging buffer`: as BlockHost::staging_buffer.
  struct Memory {
    MediaSpans spans;
    std::function<std::unique_ptr<StagingBuffer>(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                 std::uint64_t bytes)>
        staging_buffer;
  };
  // `peer_writes_directly`: the peer has the access that it needs to write here by itself.
  RankChannel(Memory local, PeerMetadata peer, bool peer_writes_directly, Events events);
  // Before anything else.
  void start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes);

  // By the cheapest route. Throws what Route::write throws.
  WriteOutcome write(const WriteRequest& request);
  // Sends a message and waits for the peer's answer. Throws kPeerLost, kDeadline, kCancelled.
  void greet(const Waiting& waiting);
  // Begins no new write, ends those under way soon, and tells the peer when they have ended. Idempotent, never blocks.
  void depart(const Error& why) noexcept;
  bool over() const noexcept;
  // Ends the link.
  void abandon() noexcept;
  // Bytes of one block at the peer, of a medium.
  std::uint64_t peer_block_bytes() const noexcept { return peer_block_bytes_; }

  // --- LinkHandler ---
  void on_message(Message&& message) override;
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override;
  void on_placed(std::uint64_t token, bool intact) override;
  void on_closed(const Error& why) override;

  // --- DepartingPeer ---
  const PeerMetadata& peer() const noexcept override { return peer_; }
  bool awaits_proof() const override;
  bool said_over() const noexcept override;
  bool link_ended() const noexcept override;
  void on_writer_gone() override;
  std::uint32_t writes_under_way() const noexcept override { return writes_.load(); }

 private:
  using Routes = std::vector<std::shared_ptr<Route>>;
  void begin_route_receiver();
  DataBody admit(std::span<const std::byte> body, std::uint64_t payload_bytes) const;
  void await_quiet();
  void on_quiet(Parting& whose) noexcept;
  Routes begin_write();
  void end_write() noexcept;
  void flush(const Waiting& waiting);
  bool say_over(Link& link) noexcept;
  // Called after a route failed whose content the receiver places from the link. Throws kPeerLost if it cannot be known
  // whether content is still on its way.
  void flush_or_break(const Error& why);
  [[noreturn]] void break_off(const Error& why);
  void drop_aside(std::shared_ptr<void> open) noexcept;
  void part_if_idle() noexcept;
  bool over_locked() const noexcept;
  bool is_quiet() const noexcept;
  bool is_departing() const noexcept { return parting_.reached(PartingState::kStopping); }
  bool has_peer_left() const noexcept { return peer_parting_.reached(PartingState::kDrained); }
  void depart(const Error& why, PartingState to) noexcept;

  const Memory local_;
  const PeerMetadata peer_;
  const bool peer_writes_directly_;
  const Events events_;
  std::uint64_t peer_block_bytes_ = 0;
  bool heard_ = false;  // the first frame has arrived; only the thread that handles frames uses it
  std::unique_ptr<StagingBuffer>
      staging_buffer_;  // of the frame that is being placed; only the thread that handles frames uses it
  std::shared_ptr<RouteReceiver> route_receiver_;  // of a route that has one; from start() on
  std::atomic<std::uint32_t> writes_{0};
  std::atomic<std::uint64_t> flushes_{0};  // asked for
  std::atomic<std::uint64_t> flushed_{0};  // answered: all up to this one
  Parting parting_;                        // of this side's writes, and of the link
  // Of the peer's writes here. kDrained: it has said that it writes no more. kSettled: and nothing that it had
  // announced is being received any more.
  Parting peer_parting_;

  mutable std::mutex mutex_;
  std::shared_ptr<Link> link_;  // until it has ended
  Routes routes_;
  std::optional<Error> why_departing_;  // once parting_ has reached kStopping
  bool broken_ = false;                 // a write of this side may never be known to have ended
  bool proved_ = false;                 // that the peer is gone
};

}  // namespace kvpool
