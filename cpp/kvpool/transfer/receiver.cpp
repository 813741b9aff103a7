// Reserving, and how it ends. Lending stands in receiver_lend.cpp, placing in receiver_place.cpp, what completes in
// receiver_complete.cpp.
#include "kvpool/transfer/receiver.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/failure.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/transfer_id.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kLifetimeMsMax = 1U << 30;
constexpr std::int64_t kRetryAfterUs = 10'000;
constexpr std::uint32_t kMarkMask = (1U << 31) - 1;  // the upper half is for fetches

}  // namespace

// What waits for the end of a peer may live longer than the host.
Receiver::~Receiver() {
  for (const auto& [id, quarantined] : quarantined_) {
    if (quarantined.held != nullptr) quarantined.held->disown();
  }
}

Receiver::Receiver(SessionHost& host, const PeerMetadata& peer, bool writes_directly, bool beyond_files)
    : host_(host),
      peer_(peer.name),
      incarnation_(peer.incarnation),
      writes_directly_(writes_directly),
      beyond_files_(beyond_files) {}

// The caller waits for the answer, perhaps with blocks that only the answer frees.
void Receiver::answer(ServedCall& call, std::span<const Address> addresses) {
  Bytes body;
  if (const auto failure = failure_of([&] { body = write_addresses(addresses); })) return call.fail(*failure);
  call.answer(std::move(body));
}

// --- limits ---

// Of a transfer that the peer begins. Ids of fetches are this side's to give, and 0 stands for all transfers.
void Receiver::check_id(std::uint64_t id) const {
  if (id == 0 || (id & (kFetchBit | kRecallBit)) != 0)
    throw Error(ErrorCode::kProtocol, "this is no number of a transfer");
}

// REQUIRES: mutex_ is held.
void Receiver::check_quota(std::size_t blocks) const {
  const SessionLimits& limits = host_.limits();
  if (incoming_.size() >= limits.transfers_max) {
    throw Error(ErrorCode::kBusy, std::to_string(incoming_.size()) + " transfers of this peer are under way here",
                {{"limit", limits.transfers_max}, {"retry_after_us", kRetryAfterUs}});
  }
  if (promised_ + blocks > limits.reserved_max) {
    throw Error(ErrorCode::kBusy,
                std::to_string(promised_) + " blocks are promised to this peer, and " + std::to_string(blocks) +
                    " more would exceed its limit of " + std::to_string(limits.reserved_max),
                {{"requested", static_cast<std::int64_t>(blocks)},
                 {"limit", limits.reserved_max},
                 {"retry_after_us", kRetryAfterUs}});
  }
}

// What the thread that reads the link may do for blocks: nothing that takes long.
Room Receiver::first_room(bool may_evict) const noexcept {
  return may_evict || host_.blocks().fills_with_zeros() ? Room::kTry : Room::kFree;
}

// --- reserving ---

// A sender that lives ends its transfer when the time that it asks for is over; what it sent later would find nobody
// who waits for it. One that does not is lost soon. So the limit is for those that do neither.
void Receiver::on_reserve(const CallPointer& call, ReserveBody&& body) {
  const std::uint64_t id = call->id();
  const std::int64_t lifetime = std::min<std::int64_t>(
      host_.limits().reserve_max_ns, static_cast<std::int64_t>(std::min(body.lifetime_ms, kLifetimeMsMax)) * kNsPerMs);
  const std::int64_t deadline = host_.now_ns() + lifetime;
  std::shared_ptr<ReserveSpec> spec;
  std::uint32_t mark = 0;
  const auto refused = failure_of([&] {
    check_id(id);
    spec = std::make_shared<ReserveSpec>(
        ReserveSpec{body.blocks, body.medium, body.insert, std::move(body.name_space), std::move(body.tokens)});
    Incoming incoming;
    incoming.spec = spec;
    incoming.room = quarantine_room(id, {});
    incoming.one_sided = body.one_sided;
    incoming.deadline_ns = deadline;
    incoming.prompt = hold_request(spec->name_space.size() + spec->tokens.size() * sizeof(Token));
    const std::lock_guard lock(mutex_);
    check_quota(body.blocks);
    mark = incoming.mark = ++marks_ & kMarkMask;
    incoming.content.number = ++contents_;
    if (quarantined_.contains(id) || arrived_.contains(id) || !incoming_.try_emplace(id, std::move(incoming)).second) {
      throw Error(ErrorCode::kProtocol, "transfer " + std::to_string(id) + " was reserved or written before");
    }
    promised_ += body.blocks;
  });
  if (refused) return call->refuse(*refused);
  const auto attempt = [self = shared_from_this(), this, call, spec, mark](Room room) {
    std::optional<Reservation> reservation;
    auto error = failure_of([&] { reservation = host_.blocks().reserve(*spec, {incarnation_, mark}, room); });
    if (!error && !reservation) return false;
    finish_reserve(*call, std::move(reservation), std::move(error));
    return true;
  };
  auto failure = failure_of([&] { host_.tick_by(deadline); });
  if (!failure && attempt(first_room(body.may_evict))) return;
  if (!failure) {
    const Room room = body.may_evict ? Room::kEvict : Room::kFree;
    failure = failure_of([&] { host_.run(this, [attempt, room] { static_cast<void>(attempt(room)); }); });
  }
  if (failure) finish_reserve(*call, std::nullopt, std::move(failure));
}

void Receiver::finish_reserve(ServedCall& call, std::optional<Reservation> reservation, std::optional<Error> error) {
  Bytes body;
  if (!error) {
    error = failure_of([&] {
      body = write_body(ReservedBody{static_cast<std::uint32_t>(reservation->held.size()), reservation->addresses});
    });
  }
  bool wanted = false;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = incoming_.find(call.id());
    KVPOOL_CHECK(entry != incoming_.end() && entry->second.phase == Phase::kReserving);
    wanted = !error && !entry->second.ended;
    if (wanted) {
      entry->second.phase = Phase::kReserved;
      // Quotas count blocks that are really promised.
      promised_ -= static_cast<std::uint32_t>(reservation->held.size());
      entry->second.reservation = std::move(*reservation);
    } else {
      promised_ -= static_cast<std::uint32_t>(entry->second.spec->blocks);
      incoming_.erase(entry);
    }
  }
  if (wanted) return call.answer(std::move(body));
  if (reservation) host_.blocks().release(reservation->addresses);
  if (!error) error = Error(ErrorCode::kCancelled, "the transfer was given up before it had blocks");
  call.refuse(*error);
}

// --- endings ---

// REQUIRES: mutex_ is held. The pool's lock comes below this one.
void Receiver::end(IncomingMap::iterator entry, bool writers_gone) {
  Incoming& incoming = entry->second;
  incoming.ended = true;
  if (incoming.phase != Phase::kReserved || incoming.content.placing > 0) return;
  std::vector<Address>& addresses = incoming.reservation.addresses;
  if (writers_gone || !incoming.one_sided || drained_) {
    promised_ -= static_cast<std::uint32_t>(addresses.size());
    host_.blocks().release(addresses);
  } else {
    host_.blocks().quarantine(addresses);
    incoming.room.mapped().addresses = std::move(addresses);
    quarantined_.insert(std::move(incoming.room));
  }
  incoming_.erase(entry);
}

// The peer writes nothing of this transfer any more.
void Receiver::forfeit(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  arrived_.erase(id);
  release_quarantined(id);
  if (const auto entry = incoming_.find(id); entry != incoming_.end()) end(entry, /*writers_gone=*/true);
}

// REQUIRES: mutex_ is held.
void Receiver::release_quarantined(std::uint64_t id) {
  if (const auto late = quarantined_.find(id); late != quarantined_.end()) release_quarantined(late);
}

// The peer writes them no more, but this process may: a frame that the peer sent before is being placed in them. Then
// they stay in quarantine until it lies there. REQUIRES: mutex_ is held.
void Receiver::release_quarantined(Quarantine::iterator late) {
  late->second.being_placed = placements_.is_placed_now(late->second.addresses);
  if (late->second.being_placed) return;
  give_back(late->second);
  if ((late->first & kFetchBit) == 0) promised_ -= static_cast<std::uint32_t>(late->second.addresses.size());
  quarantined_.erase(late);
}

// REQUIRES: mutex_ is held.
void Receiver::release_all_quarantined() {
  for (auto entry = quarantined_.begin(); entry != quarantined_.end();) release_quarantined(entry++);
}

// The peer writes them no more.
void Receiver::give_back(Quarantined& quarantined) noexcept {
  if (quarantined.held == nullptr) {
    host_.blocks().release(quarantined.addresses);
  } else {
    quarantined.held.reset();
  }
}

void Receiver::on_abandon(const CallPointer& call) {
  // What is quarantined under the number of a fetch, or of a recall, is this side's own.
  if ((call->id() & (kFetchBit | kRecallBit)) == 0) forfeit(call->id());
  call->answer({});
}

void Receiver::on_drained() {
  const std::lock_guard lock(mutex_);
  drained_ = true;
}

void Receiver::on_fetch_over(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  release_quarantined(id);
}

std::int64_t Receiver::tick(std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  std::int64_t next = kNever;
  for (auto entry = incoming_.begin(); entry != incoming_.end();) {
    const auto current = entry++;
    if (current->second.deadline_ns <= now_ns) {
      if (!current->second.ended) end(current, /*writers_gone=*/false);
    } else {
      next = std::min(next, current->second.deadline_ns);
    }
  }
  return next;
}

void Receiver::on_lost() {
  const std::lock_guard lock(mutex_);
  lost_ = true;
  const bool safe = drained_ || !writes_directly_;
  for (auto entry = incoming_.begin(); entry != incoming_.end();) {
    const auto current = entry++;
    end(current, /*writers_gone=*/safe);
  }
  arrived_.clear();
  release_lent(/*quarantine=*/!safe);
  for (auto entry = quarantined_.begin(); entry != quarantined_.end();) {
    const auto current = entry++;
    if (safe || current->second.placed_here) release_quarantined(current);
  }
}

// Of each what nobody works on. REQUIRES: mutex_ is held.
void Receiver::release_lent(bool quarantine) noexcept {
  for (auto entry = lent_.begin(); entry != lent_.end();) {
    const auto current = entry++;
    if (current->second != Lent::kHeld) continue;
    const std::span<const Address> address(&current->first, 1);
    if (quarantine && writes_directly(current->first)) {
      host_.blocks().quarantine(address);
    } else {
      host_.blocks().release(address);
      lent_.erase(current);
      --promised_;
    }
  }
}

void Receiver::on_writer_gone() {
  const std::lock_guard lock(mutex_);
  drained_ = true;
  release_all_quarantined();
  if (lost_) release_lent(/*quarantine=*/false);
}

Receiver::QuarantineRoom Receiver::quarantine_room(std::uint64_t id, std::vector<Address> addresses) {
  Quarantine one;
  one.emplace(id, Quarantined{std::move(addresses)});
  return one.extract(one.begin());
}

void Receiver::quarantine(QuarantineRoom&& room) noexcept {
  const std::lock_guard lock(mutex_);
  host_.blocks().quarantine(room.mapped().addresses);
  const bool quiet = drained_ || (lost_ && (!writes_directly_ || room.mapped().placed_here));
  room.mapped().being_placed = quiet && placements_.is_placed_now(room.mapped().addresses);
  if (quiet && !room.mapped().being_placed) return give_back(room.mapped());
  quarantined_.insert(std::move(room));
}

bool Receiver::is_quarantined(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return quarantined_.contains(id);
}

ReceiverCounts Receiver::counts() const {
  const std::lock_guard lock(mutex_);
  ReceiverCounts counts;
  (lost_ ? counts.quarantined : counts.lent) = static_cast<std::uint32_t>(lent_.size());
  for (const auto& [id, incoming] : incoming_) {
    counts.reserved += static_cast<std::uint32_t>(incoming.reservation.addresses.size());
  }
  for (const auto& [id, late] : quarantined_) counts.quarantined += static_cast<std::uint32_t>(late.addresses.size());
  counts.promised = promised_;
  counts.transfers = static_cast<std::uint32_t>(incoming_.size());
  counts.received_bytes = received_bytes_.load(std::memory_order_relaxed);
  return counts;
}

}  // namespace kvpool
