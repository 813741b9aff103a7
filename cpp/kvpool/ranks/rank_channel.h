// A connection between a rank here and a rank of a peer. It carries block content only; the protocol runs between the
// two schedulers, to whose meeting the channel belongs. docs/adr/0008-logical-instances.md.
//
// Invariants
//   N1  write() returns, or throws anything but kPeerLost, only when everything it wrote is in place and nothing is
//       still on its way. To know that, it sends a flush after content that the receiver places from the link, and
//       waits for the answer to content that the receiver takes outside the link (route_receiver.h). After kPeerLost
//       the channel is closed, and never reports that this side has stopped writing. The same holds when this side
//       loses its GPU during a write, because nobody knows how much of the write took place.
//   N2  over() is true only when both sides have stopped writing, and this side is receiving nothing that the peer had
//       announced. This side has stopped when it has said so or its link has ended. The peer has stopped when it has
//       said so; or its link has ended, and it has no other access to this memory; or it is proved to be gone.
//       Receiving may go on after the peer has said that it has stopped.
//
// The channel places content in any block that the peer names, because a rank does not know who owns its blocks. The
// peer's scheduler answers for its ranks, as it does for ranks that write here by themselves.
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
    std::function<void(const RankChannel& channel)> on_heard;  // the peer's first frame: it has admitted this side
    std::function<void(const Error& why)> on_device_lost;      // this side has lost its GPU and the blocks on it
    // Runs work on another thread; it waits only for earlier work of the same `key`. Throws std::bad_alloc: not run.
    std::function<void(const void* key, std::function<void()> work)> run_aside;
  };
  // The blocks of this side. `staging_buffer`: as BlockHost::staging_buffer.
  struct Memory {
    MediaSpans spans;
    std::function<std::unique_ptr<StagingBuffer>(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                 std::uint64_t bytes)>
        staging_buffer;
  };
  // `peer_writes_directly`: the peer can write to this side's memory by itself.
  RankChannel(Memory local, PeerMetadata peer, bool peer_writes_directly, Events events);
  // Call it once, before any other method.
  void start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes);

  // By the cheapest route. Throws what Route::write throws.
  WriteOutcome write(const WriteRequest& request);
  // Sends a message and waits for the peer's answer. Throws kPeerLost, kDeadline, kCancelled.
  void greet(const Waiting& waiting);
  // Refuses new writes, cancels those under way, and tells the peer when they have ended. Idempotent, never blocks.
  void depart(const Error& why) noexcept;
  bool over() const noexcept;
  // Ends the link.
  void abandon() noexcept;
  // The size of a block at the peer.
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
  // Call it when a route has failed whose content the receiver places from the link. Throws kPeerLost if content may
  // still be on its way.
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
  // Of the peer's writes here. kDrained: the peer has said that it has stopped writing. kSettled: in addition, this
  // side has received everything that the peer had announced.
  Parting peer_parting_;

  mutable std::mutex mutex_;
  std::shared_ptr<Link> link_;  // until it has ended
  Routes routes_;
  std::optional<Error> why_departing_;  // once parting_ has reached kStopping
  bool broken_ = false;                 // a write of this side may never be known to have ended
  bool proved_ = false;                 // that the peer is gone
};

}  // namespace kvpool
