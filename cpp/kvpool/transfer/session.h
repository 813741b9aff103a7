// One peer incarnation, as long as the link to it lives: what each side asks of the other.
//
// A session has neither thread nor clock: see session_host.h. All that is asked goes through peer_calls.h. The
// receiving half is receiver.h, a transfer from here is outgoing.h, one that is asked of the peer is fetch.h.
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

#include "kvpool/base/wait.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/route_receiver.h"
#include "kvpool/transfer/borrowed.h"
#include "kvpool/transfer/departing_peer.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/parting.h"
#include "kvpool/transfer/peer_calls.h"
#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/request_bytes.h"
#include "kvpool/transfer/session_host.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {

class Outgoing;

class Session final : public LinkHandler, public DepartingPeer, public std::enable_shared_from_this<Session> {
 public:
  // `peer_writes_directly`: the peer was given what it needs to write into this pool's memory by itself. `by_ranks`:
  // not the peer, but its ranks write, into those of this instance. Then only on_writer_gone() says that they have
  // ended: a scheduler that takes its leave may have lost a rank in the middle of a write.
  Session(SessionHost& host, const PeerMetadata& peer, bool peer_writes_directly, bool by_ranks = false);
  // Before the first message. The cheapest route is chosen for each transfer.
  void start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes);

  // A word that changes nothing: the peer learns by it that this side has admitted it.
  void greet() noexcept { calls_->cancel(kLendVerb, 0); }
  // Throw Error; see service.h.
  std::vector<Address> borrow(std::size_t n, MediumChoice medium, bool may_evict, const Waiting& waiting);
  void give_back(std::span<const Address> addresses, const Waiting& waiting);
  // The second half of it. REQUIRES: borrowed().begin_write() has marked them; they are borrowed no more afterwards,
  // or, when the request could not be sent, marked no more.
  void give_back_marked(std::span<const Address> addresses, const Waiting& waiting);
  // Asks for blocks back that are lent to the peer, and takes at the deadline what has not come. Throws kNotOwner,
  // kArgument, kBusy, and nothing has happened then; kPeerLost: what was lent is treated as a lost peer's; kCancelled:
  // the caller has given up, and the recall goes on.
  RecallResult recall(std::vector<Address> addresses, const Waiting& waiting);
  // The same of any so many, or of all if there are not so many.
  RecallResult recall_some(std::size_t count, const Waiting& waiting);
  // The same of blocks that were lent a moment ago, without waiting. `done`: as that of a call.
  using RecallDone = std::function<void(const RecallResult* result, const Error* error)>;
  void begin_recall(std::vector<Address> addresses, std::int64_t until_ns, RecallDone done);
  std::shared_ptr<Transfer> transfer(TransferRequest&& request);
  // Checks everything and holds the blocks, but does not begin.
  std::shared_ptr<Outgoing> prepare(TransferRequest&& request);
  // `frees_on_failure`: the destinations are nobody's when it fails.
  std::shared_ptr<Transfer> fetch(const FetchRequest& request, bool frees_on_failure);
  // Measures the routes between all media where it is a question, has not been done, and the limits want it: returns
  // when that is over, after a short time. What fails leaves guesses. Throws kCancelled when the caller has given up.
  void measure_routes(const Waiting& waiting);

  const PeerMetadata& peer() const noexcept override { return peer_; }
  bool lost() const noexcept { return parting_.reached(PartingState::kStopping); }
  // Whether the peer has said anything. A side that was called does not know before that it has been admitted.
  bool heard() const noexcept { return heard_.load(std::memory_order_relaxed); }
  bool peer_writes_directly() const noexcept { return peer_writes_directly_; }
  bool by_ranks() const noexcept { return by_ranks_; }
  std::vector<std::string> route_names() const;
  // What they are taken to cost, of those that are reckoned so.
  std::vector<RoutePrice> route_prices() const;
  // Of the routes that have failed, and not worked since.
  std::vector<RouteFailure> route_failures() const;
  ReceiverCounts counts() const { return receiver_->counts(); }
  std::uint32_t borrowed_blocks() const noexcept { return borrowed_.count(); }
  // What this side has asked of the peer, and what it sends because the peer has asked, and has not ended.
  std::uint32_t under_way() const;

  // Ends what is too late. Returns when to call it again, INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // Proof that this incarnation of the peer writes nothing here any more: its process has exited, or it says so when it
  // comes back.
  void on_writer_gone() override;
  bool awaits_proof() const override {
    return !peer_drained() && (!parting_.reached(PartingState::kSettled) || receiver_->counts().quarantined > 0);
  }

  bool said_over() const noexcept override { return peer_drained(); }

  // --- LinkHandler ---
  void on_message(Message&& message) override;
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override;
  void on_placed(std::uint64_t token, bool intact) override;
  void on_closed(const Error& why) override;

  // No new write begins, those under way end soon; transfers fail with this.
  void stop_writing(const Error& why);
  // Writes of this side that are under way; after stop_writing() or on_closed() they fall to zero.
  std::uint32_t writes_under_way() const noexcept override { return writes_.load(); }
  // Tells the peer, once, that this side writes nothing any more; never, when a write of it may be on its way for ever.
  // REQUIRES: no write is under way, and none begins.
  void say_drained() noexcept;
  // A route says that its peer is lost, or the GPU that was copying is. What it had begun may be on its way, so the
  // session ends, and does not say that it is drained.
  void on_route_broken(const Error& why) noexcept;
  // Whether the peer has said the same.
  bool peer_drained() const noexcept { return peer_parting_.reached(PartingState::kDrained); }

  // --- for the transfers of this session ---
  // Throws std::bad_alloc; then nothing is written, and job.done is not called.
  void write(WriteJob&& job);
  // The same in this thread: it has ended when this returns.
  void write_here(WriteJob&& job);
  PeerCalls& calls() noexcept { return *calls_; }
  SessionHost& host() noexcept { return host_; }
  // Null once the link has ended and nothing of this side is under way: see let_go().
  std::shared_ptr<Link> link() const;
  BorrowedBlocks& borrowed() noexcept { return borrowed_; }
  // A transfer that writes borrowed blocks begins, and lets go of them. Throws kStaleAddress: they were recalled.
  void begin_named(std::uint64_t id, const std::shared_ptr<Outgoing>& transfer, std::span<const Address> to);
  void end_named(std::uint64_t id, std::span<const Address> to, bool still_borrowed) noexcept;
  // Of blocks that were marked, and are not given back after all.
  void unmark(std::span<const Address> addresses) noexcept;
  Receiver& receiver() noexcept { return *receiver_; }
  // The link itself has ended: nothing more arrives, and nothing is being placed.
  bool link_ended() const noexcept override {
    return parting_.reached(route_receiver_ == nullptr ? PartingState::kLinkEnded : PartingState::kSettled);
  }
  // Checks addresses that the peer gave for its blocks. Throws kProtocol.
  void check_of_peer(std::span<const Address> addresses) const;
  [[noreturn]] void throw_lost() const;

 private:
  struct Question {  // which route to take between two media
    Medium from;
    Medium to;
    std::vector<std::shared_ptr<Route>> routes;
  };
  // For a write. Unmeasured pairs of media are measured afterwards, on another thread.
  std::shared_ptr<Route> choose_route(const std::string& name, std::uint64_t pieces, std::uint64_t bytes,
                                      const MediaSet& from, const MediaSet& to, bool whole = false);
  std::shared_ptr<Route> cheapest(const std::string& name, std::uint64_t pieces, std::uint64_t bytes,
                                  const MediaSet& from, const MediaSet& to, bool whole) const;
  void want_measured(const MediaSet& from, const MediaSet& to) noexcept;
  void measure_wanted() noexcept;
  std::vector<Question> claim_questions(const MediaSet& from, const MediaSet& to);
  void measure(const std::vector<Question>& questions, const Waiting& waiting);
  void stop_writing(const Error& why, PartingState to);
  void after_write() noexcept;
  void note_broken(const Error& error) noexcept;
  void handle(Message&& message);
  bool handle_later(Message& message);
  struct Recalled;
  RecallResult wait_for_recall(std::vector<Address> addresses, const Waiting& waiting);
  void serve_verbs();
  void on_recall(const CallPointer& call, const std::vector<Address>& addresses);  // session_recall.cpp
  void end_recall(const std::shared_ptr<Recalled>& recalled) noexcept;
  std::int64_t tick_recalls(std::int64_t now_ns) noexcept;
  void settle_recalls() noexcept;
  void begin_return() noexcept;
  void end_return() noexcept;
  void settle();
  void on_leave();
  void close_link(const Error& why) noexcept;
  void let_go() noexcept;
  void drop_aside(std::shared_ptr<void> open) noexcept;
  void on_fetch(const CallPointer& call, FetchBody&& body);  // fetch.cpp
  void begin_push(const CallPointer& call, const std::shared_ptr<FetchBody>& body);
  void finish_push(ServedCall& call, std::span<const Address> held, const Error* error) noexcept;

  SessionHost& host_;
  const PeerMetadata peer_;
  const bool peer_writes_directly_;
  const bool by_ranks_;
  BorrowedBlocks borrowed_;
  std::shared_ptr<PeerCalls> calls_;
  std::shared_ptr<Receiver> receiver_;
  std::shared_ptr<RouteReceiver> route_receiver_;  // of a route that has one; as receiver_, from start() on
  const std::shared_ptr<RequestBytes> deferred_ = std::make_shared<RequestBytes>();  // what waits for it
  std::atomic<std::uint32_t> pushes_{0};  // fetches of the peer that are under way
  std::atomic<bool> heard_{false};
  Parting parting_;                  // of this side's writes, and of the link
  Parting peer_parting_;             // of the peer's writes here
  std::atomic<bool> broken_{false};  // a write of this side may never be known to have ended: see on_route_broken()
  std::atomic<std::uint32_t> writes_{0};
  // By pair of media, from and to: it has been measured, is being, or is no question.
  MediumPairMap<std::atomic<bool>> claimed_{};
  std::atomic<std::uint32_t> wanted_{0};  // to be measured when no write is under way

  std::mutex recalls_mutex_;  // a leaf, but for the borrowed blocks' own
  std::vector<std::shared_ptr<Recalled>> recalls_;
  std::unordered_map<std::uint64_t, std::weak_ptr<Outgoing>> named_;  // that write borrowed blocks
  std::uint32_t returning_ = 0;  // blocks are given back, and the peer has not been told: no recall is answered before

  mutable std::mutex mutex_;
  std::shared_ptr<Link> link_;
  std::vector<std::shared_ptr<Route>> routes_;  // none once it is lost
  std::optional<Error> why_lost_;               // once parting_ has reached kStopping
};

}  // namespace kvpool
