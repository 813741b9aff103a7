// One peer incarnation, as long as the link to it lives: what each side asks of the other.
//
// A session has no thread and no clock of its own: see session_host.h. The receiving half is receiver.h, a transfer
// from here is outgoing.h, one that is asked of the peer is fetch.h.
//
// Locks: a transfer's or the receiver's, then the session's, then the pool's; none is held while a message is sent or a
// route writes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvpool/transfer/borrowed.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/session_host.h"
#include "kvpool/transfer/transfer_id.h"
#include "kvpool/transport/card.h"
#include "kvpool/transport/link.h"

namespace kvpool {

class Outgoing;

// Something that waits for the peer's answer to a request with its id.
class PendingAnswer {
 public:
  virtual ~PendingAnswer() = default;
  virtual void on_answer(Message&& message) = 0;
  virtual void on_lost(const Error& why) = 0;
  // Ends what is too late; returns when to look again, INT64_MAX for never.
  virtual std::int64_t on_tick(std::int64_t now_ns) = 0;
};

class Session final : public LinkHandler, public std::enable_shared_from_this<Session> {
 public:
  // `peer_writes_directly`: the peer was given what it needs to write into this pool's memory by itself.
  Session(SessionHost& host, const PeerCard& peer, bool peer_writes_directly);
  // Before the first message. The cheapest route is chosen for each transfer.
  void start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes);

  // Throw Error; see service.h.
  std::vector<Address> borrow(std::size_t n, Medium medium, bool may_evict, std::int64_t deadline_ns);
  void give_back(std::span<const Address> addresses, std::int64_t deadline_ns);
  std::shared_ptr<Transfer> transfer(TransferRequest&& request);
  // Checks everything and holds the blocks, but does not begin.
  std::shared_ptr<Outgoing> prepare(TransferRequest&& request);
  // `frees_on_failure`: the destinations are nobody's when it fails.
  std::shared_ptr<Transfer> fetch(const FetchRequest& request, bool frees_on_failure);

  const PeerCard& peer() const noexcept { return peer_; }
  bool lost() const noexcept { return lost_.load(); }
  bool peer_writes_directly() const noexcept { return peer_writes_directly_; }
  std::vector<std::string> route_names() const;
  ReceiverCounts counts() const { return receiver_->counts(); }
  std::uint32_t borrowed_blocks() const noexcept { return borrowed_.count(); }

  // Ends what is too late. Returns when to call it again, INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // Proof that this incarnation of the peer writes nothing here any more: its process has exited, or it says so when it
  // comes back.
  void on_writer_gone() { receiver_->on_writer_gone(); }

  // --- LinkHandler ---
  void on_message(Message&& message) override;
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override;
  void on_placed(std::uint64_t token, bool intact) override;
  void on_closed(const Error& why) override;

  // No new write begins, those under way end soon; transfers fail with this.
  void stop_writing(const Error& why);
  // Writes of this side that are under way; after stop_writing() or on_closed() they fall to zero.
  std::uint32_t writes_under_way() const noexcept { return writes_.load(); }
  // Tells the peer, once, that this side writes nothing any more. REQUIRES: that is so, and stays so.
  void say_drained() noexcept;
  // A route says that its peer is lost. What it had begun may be on its way, so the session ends, and does not say that
  // it is drained.
  void on_route_broken(const Error& why) noexcept;
  // Whether the peer has said the same.
  bool peer_drained() const noexcept { return peer_drained_.load(std::memory_order_acquire); }

  // --- for the transfers of this session ---
  // Throws std::bad_alloc; then nothing is written, and job.done is not called.
  void write(WriteJob&& job);
  SessionHost& host() noexcept { return host_; }
  Link& link() noexcept { return *link_; }
  BorrowedBlocks& borrowed() noexcept { return borrowed_; }
  Receiver& receiver() noexcept { return *receiver_; }
  // Throws kPeerLost when the link has ended, kBusy above the limit.
  void expect_answer(std::uint64_t id, std::shared_ptr<PendingAnswer> pending);
  void forget_answer(std::uint64_t id) noexcept;
  void send(FrameKind kind, std::uint64_t id, Bytes body) { link_->send(Message{kind, 0, id, std::move(body)}); }
  // The same for what the peer has to hear: if it cannot be sent, the link ends.
  void tell(FrameKind kind, std::uint64_t id, std::span<const std::byte> body = {}) noexcept;
  // The link itself has ended: nothing more arrives, and nothing is being placed.
  bool link_ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  // Addresses that the peer named of its own blocks. Throws kProtocol.
  void check_of_peer(std::span<const Address> addresses) const;
  [[noreturn]] void throw_lost() const;

 private:
  class Call;
  // Media that a write goes to, by medium_index().
  using Reach = std::array<bool, kMediaCount>;
  static Reach reach_of(std::span<const Address> addresses) noexcept;
  std::shared_ptr<Route> choose_route(const std::string& name, std::uint64_t pieces, std::uint64_t bytes,
                                      const Reach& reach) const;
  Message call(FrameKind kind, Bytes body, std::int64_t deadline_ns, const char* what,
               const std::function<void()>& on_sent = {});
  void on_answer(Message&& message);
  void on_leave();
  void on_unwanted(const Message& answer);
  void on_fetch(std::uint64_t id, FetchBody&& body);  // fetch.cpp
  void begin_push(std::uint64_t id, const std::shared_ptr<FetchBody>& body);
  void finish_push(std::uint64_t id, std::span<const Address> held, const Error* error) noexcept;
  bool stop_push(std::uint64_t id);
  std::uint64_t next_id() noexcept { return ids_.fetch_add(1, std::memory_order_relaxed); }

  SessionHost& host_;
  const PeerCard peer_;
  const bool peer_writes_directly_;
  std::shared_ptr<Link> link_;
  std::vector<std::shared_ptr<Route>> routes_;
  BorrowedBlocks borrowed_;
  std::shared_ptr<Receiver> receiver_;
  std::atomic<std::uint64_t> ids_{1};
  std::atomic<bool> lost_{false};
  std::atomic<bool> said_drained_{false};
  std::atomic<bool> peer_drained_{false};
  std::atomic<bool> ended_{false};
  std::atomic<std::uint32_t> writes_{0};

  mutable std::mutex mutex_;
  std::optional<Error> why_lost_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PendingAnswer>> pending_;
  std::unordered_map<std::uint64_t, std::shared_ptr<std::atomic<bool>>> pushes_;  // by fetch: true stops it
};

}  // namespace kvpool
