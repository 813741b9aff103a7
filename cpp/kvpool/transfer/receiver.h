// The receiving half of a session: serves one peer that borrows blocks, reserves them, writes them and completes.
//
// Invariants
//   D1  A block that was promised to the peer is in exactly one of: a reservation, the lent set, the quarantine.
//   D2  A reservation ends once: delivered, released, or quarantined and then released. It is released only when
//       nothing writes it: this process places its bytes, or the peer has said that it is done, or is proved to be
//       gone.
//   D3  Every call is answered once: Y1 of served_call.h. The application is told of a delivery once.
//   D4  Content is placed only in blocks that are in a reservation, in the lent set, or reserved for a fetch of this
//       side. Such a block is free, or somebody else's, only when nothing is being placed in it.
//   D5  A transfer whose content this process places completes only if all of it was placed, intact.
//   D6  A lent block that is taken back at the deadline of a recall is free only when nothing writes it: this process
//       places its bytes and is not doing so now, or the peer has said so, or is proved to be gone.
//
// Thread-safety: all of it. Sends answers without holding the lock. Lives on while its work runs on other threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/transfer/held_blocks.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/placements.h"
#include "kvpool/transfer/recall_result.h"
#include "kvpool/transfer/request_bytes.h"
#include "kvpool/transfer/served_call.h"
#include "kvpool/transfer/session_host.h"

namespace kvpool {

struct DataBody;

struct ReceiverCounts {
  std::uint32_t lent = 0;
  std::uint32_t reserved = 0;
  std::uint32_t quarantined = 0;
  std::uint32_t transfers = 0;
  std::uint32_t promised = 0;  // counts for the limit: all of these, and requests that are being answered
  std::uint64_t received_bytes = 0;
};

// The content of a transfer that this process has placed or is placing.
struct ArrivedContent {
  std::uint64_t number = 0;   // unlike the id of a transfer, never given twice by this receiver
  bool damaged = false;       // a payload arrived broken, was given up, or was not for the peer's blocks
  std::uint32_t placing = 0;  // payloads that are being placed now: at most one from a well-behaved peer
  std::uint64_t placing_bytes = 0;
  std::uint64_t placed_bytes = 0;

  void begin(std::uint64_t bytes) noexcept {
    ++placing;
    placing_bytes += bytes;
  }
  // True: no payload is being placed any longer.
  bool end_placing(bool intact) noexcept {
    damaged = damaged || !intact;
    if (--placing > 0) return false;
    placed_bytes += std::exchange(placing_bytes, 0);
    return true;
  }
};

class Receiver : public std::enable_shared_from_this<Receiver> {
 public:
  // `writes_directly`: the peer has access to write without this process's help; `beyond_files`: also where no file
  // contains the blocks.
  Receiver(SessionHost& host, const PeerMetadata& peer, bool writes_directly, bool beyond_files = true);
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // Calls of the peer; invalid ones are refused.
  void on_lend(const CallPointer& call, const LendBody& body);
  void on_return(const CallPointer& call, const std::vector<Address>& addresses);
  // This and the next two are about the transfer with the id of the call.
  void on_reserve(const CallPointer& call, ReserveBody&& body);
  void on_complete(const CallPointer& call, CompleteBody&& body);
  // The peer no longer writes for this transfer.
  void on_abandon(const CallPointer& call);
  // The peer leaves, and no longer writes anything, for any transfer or to any lent block.
  void on_drained();
  // The owner has answered a fetch that was given up here: it no longer writes.
  void on_fetch_over(std::uint64_t id);

  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes);
  // Throws errors of the GPU to which the content goes; then the link ends.
  void on_placed(std::uint64_t token, bool intact);
  // The same for content that arrives beside the link, directly in the blocks: called from any thread.
  Placement on_pass(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes);
  void on_passed(std::uint64_t token, bool intact);

  // Ends reservations that are too old. Returns when to call it again; INT64_MAX for never.
  std::int64_t tick(std::int64_t now_ns);

  // The link has ended: releases blocks that the peer can no longer write, and quarantines the rest.
  void on_lost();
  // This incarnation of the peer no longer writes here.
  void on_writer_gone();
  // Destinations of a fetch that was given up: the peer may still write them. `room` was made by quarantine_room().
  struct Quarantined {
    std::vector<Address> addresses;
    std::shared_ptr<HeldBlocks> held = {};  // its last reference gives them back; null: the receiver does
    bool being_placed = false;              // only this process still writes them; given back after that
    bool placed_here = false;               // the peer has no access to write them by itself
  };
  using QuarantineRoom = std::map<std::uint64_t, Quarantined>::node_type;

  // --- recalls of lent blocks; receiver_recall.cpp ---
  // Throws kNotOwner unless each is lent to the peer, kArgument for duplicates.
  void check_lent(std::span<const Address> addresses) const;
  // At most `most` of the blocks that are lent to the peer.
  std::vector<Address> some_lent(std::size_t most) const;
  // Before a recall with this number is sent, and when it ends without end_recall(). The first throws std::bad_alloc.
  // Until the peer has answered, also after the deadline, these blocks are not lent to it again: nothing would tell a
  // return of the earlier loan, or the end of the recall, from one of the later.
  void expect_recall(std::uint64_t id, std::span<const Address> addresses);
  void forget_recall(std::uint64_t id) noexcept;
  // Takes back those of these blocks that are still lent, which are left in `addresses`. `writer_ended`: the peer has
  // said that it no longer writes any of them. `room`: of the recall, with room for all addresses.
  RecallResult end_recall(QuarantineRoom&& room, std::vector<Address>& addresses, bool writer_ended) noexcept;
  // The peer says so after the deadline.
  void on_recall_over(std::uint64_t id);
  // The peer was never told that these blocks are lent to it. `room`: as for end_recall(), of any number.
  void withdraw_lent(QuarantineRoom&& room, std::vector<Address>& addresses) noexcept {
    static_cast<void>(end_recall(std::move(room), addresses, /*writer_ended=*/true));
  }
  // Gives the destinations of a fetch back, by `give_back`, unless content is being placed in one of them: then it
  // returns false. None is admitted to them meanwhile.
  template <class GiveBack>
  bool end_fetch(std::span<const Address> to, GiveBack&& give_back) const {
    const std::lock_guard lock(mutex_);
    if (placements_.is_placed_now(to)) return false;
    give_back();
    return true;
  }
  static QuarantineRoom quarantine_room(std::uint64_t id, std::vector<Address> addresses);
  void quarantine(QuarantineRoom&& room) noexcept;

  // Whether the destinations of this fetch are in quarantine.
  bool is_quarantined(std::uint64_t id) const;

  // Lends blocks of an engine to the peer: lent_. Throws kBusy, kPeerLost, std::bad_alloc, and as
  // BlockHost::lend_active(); nothing has changed then.
  void lend_active(std::span<const Address> addresses);

  ReceiverCounts counts() const;
  // Counts content of the peer that has arrived whole, of its transfers and of this side's fetches. What it writes to
  // blocks that it has borrowed counts once it is inserted, or named in a message.
  void note_received(std::uint64_t bytes) noexcept { received_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

  // Counts memory of the peer's requests. Throws kBusy above the limit.
  RequestBytes::Held hold_request(std::size_t bytes) const {
    return request_bytes_->hold(bytes, host_.limits().request_bytes_max);
  }

 private:
  // By transfer, or by fetch of this side. A map, because its nodes can be made beforehand, so that quarantine() cannot
  // fail.
  using Quarantine = std::map<std::uint64_t, Quarantined>;
  enum class Phase : std::uint8_t { kReserving, kReserved, kDelivering };
  struct Incoming {
    std::shared_ptr<ReserveSpec> spec;
    Reservation reservation;
    std::vector<Address> named;  // lent destinations, while they are being inserted
    Quarantine::node_type room;  // for its blocks
    RequestBytes::Held prompt;   // or, for lent blocks, the whole completion while it is verified
    RequestBytes::Held told;     // private bytes, likewise
    Phase phase = Phase::kReserving;
    bool one_sided = false;
    bool ended = false;  // cancelled, too old or lost while another thread works on it; that thread releases it
    ArrivedContent content;
    std::int64_t deadline_ns = 0;
    std::uint32_t mark = 0;
  };
  using IncomingMap = std::unordered_map<std::uint64_t, Incoming>;
  using ArrivedMap = std::unordered_map<std::uint64_t, ArrivedContent>;
  enum class Lent : std::uint8_t {
    kHeld,
    kLeaving,   // is being inserted or given back
    kRecalled,  // the same, but if that fails the block is no longer lent
  };
  struct Recall {
    std::vector<Address> addresses;
    bool is_over = false;   // here
    bool answered = false;  // by the peer, after the deadline
  };
  static void answer(ServedCall& call, std::span<const Address> addresses);
  void check_id(std::uint64_t id) const;
  void check_quota(std::size_t blocks) const;
  Room first_room(bool may_evict) const noexcept;
  void finish_lend(ServedCall& call, std::size_t blocks, std::optional<std::vector<Address>> lent,
                   std::optional<Error> error);
  void add_lent(std::span<const Address> addresses);
  void check_not_recalled(std::span<const Address> addresses) const;
  void mark_leaving(std::span<const Address> addresses);
  std::size_t mark_returned(std::span<const Address> addresses, std::span<Address> held);
  void mark_held(std::span<const Address> addresses) noexcept;
  void finish_reserve(ServedCall& call, std::optional<Reservation> reservation, std::optional<Error> error);
  bool may_place(std::uint64_t id, const std::vector<Address>& blocks, IncomingMap::iterator entry);
  Placement admit(std::uint64_t id, Placement placement, std::vector<Address>&& blocks, std::uint64_t payload_bytes);
  Placement admit_cut(std::uint64_t id, DataBody&& data, std::uint64_t payload_bytes);
  void end_placing(std::uint64_t token, bool intact);
  ArrivedContent* content_to_lent(std::uint64_t id);
  void forget_content(std::uint64_t id) noexcept;
  void check_content(const ArrivedContent& content, std::size_t blocks, std::uint64_t bytes_sent) const;
  void complete_reserved(std::uint64_t id, const CompleteBody& body, Delivery& delivery);
  void complete_named(std::uint64_t id, CompleteBody& body, Delivery& delivery);
  void verify(const CallPointer& call, std::uint32_t checksum, const std::shared_ptr<Delivery>& delivery);
  void deliver(ServedCall& call, Delivery& delivery);
  void finish_delivery(std::uint64_t id, const Delivery& delivery, std::size_t blocks, bool delivered);
  void forfeit(std::uint64_t id);
  void release_quarantined(std::uint64_t id);
  void release_quarantined(Quarantine::iterator late);
  void release_placed();
  void release_all_quarantined();
  void give_back(Quarantined& quarantined) noexcept;
  // Removes the entry and gives its blocks back, or leaves that to the thread that works on it.
  void end(IncomingMap::iterator entry, bool writers_gone);
  void release_lent(bool quarantine) noexcept;
  bool writes_directly(Address address) const noexcept {
    return writes_directly_ && (beyond_files_ || host_.blocks().in_file(medium_of(address)));
  }

  SessionHost& host_;
  const std::string peer_;
  const std::uint64_t incarnation_;
  const bool writes_directly_;
  const bool beyond_files_;
  const std::shared_ptr<RequestBytes> request_bytes_ = std::make_shared<RequestBytes>();
  std::atomic<std::uint64_t> received_bytes_{0};

  std::unique_ptr<StagingBuffer> staging_buffer_;  // of the frame that is being placed; only the link's reader uses it

  mutable std::mutex mutex_;
  bool lost_ = false;
  bool drained_ = false;
  IncomingMap incoming_;
  // By transfer without a reservation whose content was placed in lent blocks, or dropped; until it completes.
  ArrivedMap arrived_;
  Placements placements_;                    // with the blocks of those that were lent, or that a fetch names
  std::map<std::uint64_t, Recall> recalls_;  // until they have ended here and the peer has answered
  std::unordered_map<Address, Lent> lent_;   // quarantined from the loss of the link until the writer is gone
  Quarantine quarantined_;
  // Blocks in reservations, lent or quarantined for the peer, and of requests that are being answered.
  std::uint32_t promised_ = 0;
  std::uint32_t marks_ = 0;
  std::uint64_t contents_ = 0;
  std::uint64_t returns_ = 0;  // whose blocks were quarantined
};

}  // namespace kvpool
