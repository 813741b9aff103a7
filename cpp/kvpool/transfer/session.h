// One peer incarnation, as long as the link to it lives: what each side asks of the other.
//
// A session has neither thread nor clock: see session_host.h. All that is asked goes through peer_calls.h. The
// receiving half is receiver.h, a transfer from here is outgoing.h, one that is asked of the peer is fetch.h.
//
// Locks: a transfer's or the receiver's, then the session's or the pool's; none is held while a message is sent or a
// route writes. The session's is that of its calls, too: what both guard lasts as long as the link.
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

#include "kvpool/base/check.h"
#include "kvpool/base/pace.h"
#include "kvpool/base/wait.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/route_receiver.h"
#include "kvpool/transfer/borrowed.h"
#include "kvpool/transfer/departing_peer.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/held_matches.h"
#include "kvpool/transfer/parting.h"
#include "kvpool/transfer/peer_calls.h"
#include "kvpool/transfer/peer_reads.h"
#include "kvpool/transfer/receiver.h"
#include "kvpool/transfer/request_bytes.h"
#include "kvpool/transfer/sent_bytes.h"
#include "kvpool/transfer/session_host.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {

class Outgoing;
class LoanWatch;

class Session final : public LinkHandler, public DepartingPeer, public std::enable_shared_from_this<Session> {
 public:
  // `peer_writes_directly`: the peer was given what it needs to write into this pool's memory by itself. `by_ranks`:
  // the peer's ranks write into the ranks of this instance. Then only on_writer_gone() proves that their writes have
  // ended: a scheduler that says goodbye may have lost a rank in the middle of a write. `beyond_files`: the peer may
  // write also where peers cannot map this pool's memory.
  Session(SessionHost& host, const PeerMetadata& peer, bool peer_writes_directly, bool by_ranks = false,
          bool beyond_files = true);
  // REQUIRES: no message has arrived yet. Each transfer takes the cheapest of `routes`.
  void start(std::shared_ptr<Link> link, std::vector<std::shared_ptr<Route>> routes);

  // Sends a message that changes nothing: it tells the peer that this side has admitted it.
  void greet() noexcept { calls_->cancel(kLendVerb, 0); }
  // Throw Error; see service.h.
  std::vector<Address> borrow(std::size_t n, MediumChoice medium, bool may_evict, const Waiting& waiting);
  void give_back(std::span<const Address> addresses, const Waiting& waiting);
  // The second half of give_back(). REQUIRES: borrowed().begin_write() has marked them. Afterwards they are no longer
  // borrowed; when the request could not be sent, they stay borrowed and are unmarked.
  void give_back_marked(std::span<const Address> addresses, const Waiting& waiting);
  // Asks the peer to return blocks that it borrowed; at the deadline takes those that it has not returned. Throws
  // kNotOwner, kArgument, kBusy: nothing has happened; kPeerLost: the blocks are treated as lent to a lost peer;
  // kCancelled: the caller has given up, and the recall goes on.
  RecallResult recall(std::vector<Address> addresses, const Waiting& waiting);
  // Lends these blocks of an engine to the peer, which has accepted them when this returns. When it throws, they are no
  // longer lent, or soon will not be: kState, kStaleAddress, kArgument, kNotOwner; kBusy, kPeerLost, kDeadline,
  // kCancelled, and what the peer refuses them with.
  void lend(std::vector<Address> addresses, const Waiting& waiting);
  // Recalls any `count` blocks, or all if fewer are lent.
  RecallResult recall_some(std::size_t count, const Waiting& waiting);
  // Recalls blocks that were lent a moment ago, without waiting. `done` is called as a call's is.
  using RecallDone = std::function<void(const RecallResult* result, const Error* error)>;
  // `always`: also beyond the limit of calls under way.
  void begin_recall(std::vector<Address> addresses, std::int64_t until_ns, RecallDone done, bool always = false);
  std::shared_ptr<Transfer> transfer(TransferRequest&& request);
  // Checks everything and holds the blocks, but does not begin.
  std::shared_ptr<Outgoing> prepare(TransferRequest&& request);
  // `frees_on_failure`: a failure frees the destinations.
  std::shared_ptr<Transfer> fetch(const FetchRequest& request, bool frees_on_failure);
  // Brings what the peer has cached of a prompt, and this pool has not, into the index here.
  std::shared_ptr<Transfer> fetch_prompt(PromptFetchRequest&& request);
  // If the limits ask for it, measures the routes between each pair of media that has several and is unmeasured, and
  // returns when it has, after a short time. A measurement that fails leaves the guess. Throws kCancelled when the
  // caller has given up.
  void measure_routes(const Waiting& waiting);

  const PeerMetadata& peer() const noexcept override { return peer_; }
  bool lost() const noexcept { return parting_.reached(PartingState::kStopping); }
  // The same, and no later than a call to the peer throws kPeerLost: a link refuses messages before it tells the
  // session why. See PeerCalls::told_lost().
  bool told_lost() const noexcept { return lost() || calls_->told_lost(); }
  // Whether the peer has said anything. A side that was called does not know before that it has been admitted.
  bool heard() const noexcept { return heard_.load(std::memory_order_relaxed); }
  bool peer_writes_directly() const noexcept { return peer_writes_directly_; }
  // The same, to these blocks of this pool.
  bool peer_writes_directly(std::span<const Address> blocks) const noexcept;
  bool by_ranks() const noexcept { return by_ranks_; }
  std::vector<std::string> route_names() const;
  // What each route is estimated to cost, of the routes that have a cost model.
  std::vector<RoutePrice> route_prices() const;
  // The routes that have failed and have not worked since.
  std::vector<RouteFailure> route_failures() const;
  ReceiverCounts counts() const { return receiver_->counts(); }
  MatchCounts match_counts() const { return matches_->counts(); }
  std::uint32_t borrowed_blocks() const noexcept { return borrowed_.count(); }
  // Bytes that this side's transfers, and pushes that the peer has asked for, have written.
  SentBytes& sent_bytes() noexcept { return sent_bytes_; }
  // The number of this side's calls, and of the fetches that it serves, that have not ended.
  std::uint32_t under_way() const;

  // Ends what has passed its deadline. Returns when to call it again, INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);
  // Called with proof that this incarnation of the peer no longer writes here: its process has exited, or has said so
  // when it came back.
  void on_writer_gone() override;
  // Until this side's calls have ended, one of them may be a fetch whose destinations are about to be quarantined. So
  // this looks there before it looks into the quarantine.
  bool awaits_proof() const override {
    return !peer_drained() && (!parting_.reached(PartingState::kSettled) || !calls_ended_.load() ||
                               receiver_->counts().quarantined > 0 || (reads_ != nullptr && reads_->awaits_proof()));
  }

  bool said_over() const noexcept override { return peer_drained(); }

  // --- LinkHandler ---
  std::size_t body_bytes_max(FrameKind kind, std::uint16_t verb) const noexcept override {
    return calls_->body_bytes_max(kind, verb);
  }
  void on_message(Message&& message) override;
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override;
  void on_placed(std::uint64_t token, bool intact) override;
  void on_closed(const Error& why) override;

  // Begins no new write and makes those under way end soon; transfers fail with `why`.
  void stop_writing(const Error& why);
  // The number of this side's writes under way; it falls to zero after stop_writing() or on_closed().
  std::uint32_t writes_under_way() const noexcept override { return writes_.load(); }
  // Tells the peer, once, that this side has stopped writing. After on_route_broken() it tells it nothing: a write may
  // never end. REQUIRES: no write is under way or begins.
  void say_drained() noexcept;
  // A route reports that its peer, or the GPU that was copying, is lost. Writes that it had begun may still be under
  // way, so the session ends without saying that it is drained.
  void on_route_broken(const Error& why) noexcept;
  // Whether the peer has said that it has stopped writing.
  bool peer_drained() const noexcept { return peer_parting_.reached(PartingState::kDrained); }

  // --- for what reads the peer's blocks where they are ---
  // The peer's blocks at addresses of this process; null if they are not mapped.
  std::shared_ptr<const MediaSpans> readable() const;
  // The pool is closed, and its memory kept for those who may still read it: the session holds no block for them.
  void forget_readers() noexcept {
    if (reads_ != nullptr) reads_->on_reader_gone();
  }
  // This side reads them until the result is dropped, and does not say before that it is drained. Throws kPeerLost.
  std::shared_ptr<void> begin_reading();
  // Told of recalls from now on, as long as it exists.
  void watch_loans(const std::shared_ptr<LoanWatch>& watch);
  // Of the calls that ask the peer for attention, by bytes of keys and values.
  Pace& attend_pace() noexcept { return attend_pace_; }

  // --- for the transfers of this session ---
  // Throws std::bad_alloc; then nothing is written, and job.done is not called.
  void write(WriteJob&& job);
  // Writes in this thread: the write has ended when this returns.
  void write_here(WriteJob&& job);
  PeerCalls& calls() noexcept { return *calls_; }
  SessionHost& host() noexcept { return host_; }
  // Null once the link has ended and nothing of this side is under way: see let_go().
  std::shared_ptr<Link> link() const;
  BorrowedBlocks& borrowed() noexcept { return borrowed_; }
  // Called when a transfer that writes borrowed blocks begins, and when it ends. The first throws kStaleAddress: they
  // were recalled.
  void begin_named(std::uint64_t id, const std::shared_ptr<Outgoing>& transfer, std::span<const Address> to);
  void end_named(std::uint64_t id, std::span<const Address> to, bool still_borrowed) noexcept;
  // Unmarks blocks that were marked to be given back and are not given back after all.
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
  std::shared_ptr<Route> choose_route(const std::string& name, const WriteSize& size, const MediaSet& from,
                                      const MediaSet& to, bool whole = false);
  std::shared_ptr<Route> cheapest(const std::string& name, const WriteSize& size, const MediaSet& from,
                                  const MediaSet& to, bool whole) const;
  // For asking them: that may take locks, which the session's must not be held for.
  std::vector<std::shared_ptr<Route>> routes_now() const;
  void want_measured(const MediaSet& from, const MediaSet& to) noexcept;
  void measure_wanted() noexcept;
  std::vector<Question> claim_questions(const MediaSet& from, const MediaSet& to);
  void measure(const std::vector<Question>& questions, const Waiting& waiting);
  void stop_writing(const Error& why, PartingState to);
  void after_write() noexcept;
  void check_may_write();
  void note_broken(const Error& error) noexcept;
  void handle(Message&& message);
  bool handle_later(Message& message);
  struct Recalled;
  RecallResult wait_for_recall(std::vector<Address> addresses, const Waiting& waiting);
  void serve_verbs();
  void on_offer(const CallPointer& call, const std::vector<Address>& addresses);   // session_borrow.cpp
  void on_recall(const CallPointer& call, const std::vector<Address>& addresses);  // session_recall.cpp
  void end_recall(const std::shared_ptr<Recalled>& recalled) noexcept;
  std::int64_t tick_recalls(std::int64_t now_ns) noexcept;
  void answer_recalls() noexcept;
  void begin_return() noexcept;
  void end_return() noexcept;
  void end_receiving();
  void on_leave();
  void close_link(const Error& why) noexcept;
  void let_go() noexcept;
  void drop_aside(std::shared_ptr<void> open) noexcept;
  void on_fetch(const CallPointer& call, FetchBody&& body);  // fetch.cpp
  void begin_push(const CallPointer& call, const std::shared_ptr<FetchBody>& body);
  void finish_push(const CallPointer& call, const std::shared_ptr<FetchBody>& body, FetchedBody&& written,
                   const Error* error) noexcept;
  void end_push(ServedCall& call, std::span<const Address> held, FetchedBody&& written, const Error* error) noexcept;
  void check_whole(const Route& route) const;

  SessionHost& host_;
  const PeerMetadata peer_;
  const bool peer_writes_directly_;
  const bool by_ranks_;
  const bool beyond_files_;
  BorrowedBlocks borrowed_;
  std::shared_ptr<PeerCalls> calls_;
  std::shared_ptr<Receiver> receiver_;
  std::unique_ptr<HeldMatches> matches_;
  std::shared_ptr<PeerReads> reads_;               // null if the host has none
  std::shared_ptr<RouteReceiver> route_receiver_;  // of a route that has one; as receiver_, from start() on
  const std::shared_ptr<RequestBytes> deferred_ = std::make_shared<RequestBytes>();  // what waits for it
  std::atomic<std::uint32_t> pushes_{0};  // fetches of the peer that are under way
  std::atomic<bool> heard_{false};
  std::atomic<bool> calls_ended_{false};  // by stop_writing(), perhaps in another thread than the end of the link
  Parting parting_;                       // of this side's writes, and of the link
  Parting peer_parting_;                  // of the peer's writes here
  std::atomic<bool> broken_{false};  // a write of this side may never be known to have ended: see on_route_broken()
  std::atomic<std::uint32_t> writes_{0};
  // By pair of media, from and to: it has been or is being measured, or needs no measuring.
  MediumPairMap<std::atomic<bool>> claimed_{};
  Pace attend_pace_;
  SentBytes sent_bytes_;
  std::atomic<std::uint32_t> wanted_{0};  // pairs to measure when no write is under way

  std::mutex recalls_mutex_;  // a leaf, except that the lock of the borrowed blocks is taken under it
  std::vector<std::shared_ptr<Recalled>> recalls_;
  std::unordered_map<std::uint64_t, std::weak_ptr<Outgoing>> named_;  // transfers that write borrowed blocks
  std::vector<std::weak_ptr<LoanWatch>> loan_watches_;
  std::uint32_t returning_ = 0;  // returns that the peer has not been told of: recalls are answered after them

  // Under the session's lock.
  std::mutex& mutex() const noexcept {
    KVPOOL_DCHECK(calls_ != nullptr);  // it is of start()
    return calls_->mutex();
  }
  std::shared_ptr<Link> link_;
  std::vector<std::shared_ptr<Route>> routes_;  // none once it is lost
  std::optional<Error> why_lost_;               // once parting_ has reached kStopping
};

}  // namespace kvpool
