#include "kvpool/peers/peer_table.h"

#include <algorithm>
#include <new>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr const char* kNotJoined = "this pool is not in its cluster yet";

}  // namespace

PeerTable::PeerTable(Pool& pool, PeerEvents& events, const AddressBook& book, std::string name,
                     std::uint64_t incarnation, bool joins)
    : pool_(pool),
      events_(events),
      book_(book),
      name_(std::move(name)),
      incarnation_(incarnation),
      joining_(joins),
      proposed_instance_(InstanceId::draw()) {
  if (joins) fenced_.emplace(ErrorCode::kFenced, kNotJoined);
}

// --- who is there ---

std::shared_ptr<Session> PeerTable::find(const std::string& name) const {
  pool_.guard();  // when the content of all blocks is lost, that is what to say
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  if (fenced_) throw Error(*fenced_);
  const auto entry = peers_.find(name);
  return entry == peers_.end() ? nullptr : entry->second.session;
}

PeerTable::Peer PeerTable::at(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto entry = peers_.find(name);
  if (entry == peers_.end()) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'");
  return entry->second;
}

std::shared_ptr<Link> PeerTable::link_to(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto entry = peers_.find(name);
  return entry == peers_.end() ? nullptr : entry->second.link;
}

std::vector<PeerTable::Peer> PeerTable::all() const {
  std::vector<Peer> all;
  const std::lock_guard lock(mutex_);
  all.reserve(peers_.size());
  for (const auto& [name, peer] : peers_) all.push_back(peer);
  return all;
}

bool PeerTable::may_write_to(std::uint64_t incarnation) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const auto& entry) {
    const Session& session = *entry.second.session;
    return session.peer().incarnation == incarnation && !(session.lost() && session.writes_under_way() == 0);
  });
}

bool PeerTable::is_met_again(const Session& session) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const auto& entry) {
    const Session& other = *entry.second.session;
    return &other != &session && other.peer().incarnation == session.peer().incarnation;
  });
}

std::string PeerTable::name_of(std::uint64_t incarnation, bool confirmed) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->peer().incarnation != incarnation || peer.session->lost()) continue;
    if (!confirmed || peer.initiator == incarnation_ || peer.session->heard()) return name;
  }
  return {};
}

std::string PeerTable::name_of_instance(std::uint32_t instance) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->peer().instance == instance) return name;
  }
  return {};
}

std::string PeerTable::names() const {
  std::string names;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) names += (names.empty() ? "" : ", ") + name;
  return names;
}

std::shared_ptr<GroupConnection> PeerTable::group_by(const std::shared_ptr<Link>& link) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.link == link) return peer.group;
  }
  return nullptr;
}

std::optional<std::shared_ptr<Session>> PeerTable::lender(std::uint32_t instance) const {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  for (const auto& [name, peer] : peers_) {
    if (peer.session->peer().instance != instance) continue;
    return peer.session->lost() ? nullptr : peer.session;  // departed, or about to be
  }
  if (instances_.contains(instance)) return std::shared_ptr<Session>();
  return std::nullopt;
}

std::vector<PeerInfo> PeerTable::list() const {
  std::vector<PeerInfo> list;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->lost()) continue;
    const PeerMetadata& metadata = peer.session->peer();
    const ReceiverCounts counts = peer.session->counts();
    list.push_back({name, metadata.instance, metadata.incarnation, peer.link->describe(), peer.session->route_names(),
                    metadata.pid, counts.lent, peer.session->borrowed_blocks(), counts.reserved,
                    peer.session->under_way(), peer.session->route_failures(), peer.session->route_prices(),
                    peer.session->sent_bytes().by_route(), counts.received_bytes});
  }
  std::sort(list.begin(), list.end(), [](const PeerInfo& a, const PeerInfo& b) { return a.name < b.name; });
  return list;
}

int PeerTable::begin_events() {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  const int descriptor = events_.begin();
  for (const auto& [name, peer] : peers_) tell_joined(peer.session->peer());
  return descriptor;
}

// An event for which there is no memory is not told, as PeerEvents::push() has it: what it tells has happened all the
// same. REQUIRES: mutex_ is held, as for the next, so that events come in the order of what they tell.
void PeerTable::tell_joined(const PeerMetadata& metadata) noexcept {
  try {
    events_.push({metadata.name, metadata.instance, metadata.incarnation, PeerEvent::Kind::kJoined, {}});
  } catch (const std::bad_alloc&) {
  }
}

void PeerTable::tell_lost(const Session& session) noexcept {
  const PeerMetadata& metadata = session.peer();
  try {
    Error why(ErrorCode::kPeerLost, "a newer process has come under the name " + metadata.name);
    if (session.lost()) why = *failure_of([&] { session.throw_lost(); });
    events_.push({metadata.name, metadata.instance, metadata.incarnation, PeerEvent::Kind::kLost, std::move(why)});
  } catch (const std::bad_alloc&) {
  }
}

// --- who goes ---

void PeerTable::remove(const std::shared_ptr<Session>& session) noexcept {
  const std::lock_guard lock(mutex_);
  const auto entry = peers_.find(session->peer().name);
  if (entry == peers_.end() || entry->second.session != session) return;
  peers_.erase(entry);
  tell_lost(*session);
}

std::optional<std::vector<PeerTable::Peer>> PeerTable::close() {
  std::vector<Peer> peers;
  const std::lock_guard lock(mutex_);
  if (closed_) return std::nullopt;
  closed_ = true;
  for (const auto& [name, peer] : peers_) peers.push_back(peer);
  return peers;
}

bool PeerTable::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void PeerTable::clear() noexcept {
  std::unordered_map<std::string, Peer> gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  gone.swap(peers_);
}

// --- this pool's instance id ---

std::uint32_t PeerTable::instance() const {
  const std::lock_guard lock(mutex_);
  return instance_locked();
}

std::uint32_t PeerTable::instance_locked() const {
  return pool_.instance() != 0 ? pool_.instance() : proposed_instance_.value();
}

void PeerTable::begin_listen() {
  const std::lock_guard lock(mutex_);
  ++listening_;
}

void PeerTable::end_listen(bool bound) {
  const std::lock_guard lock(mutex_);
  --listening_;
  if (bound && !joining_) show_instance();
}

// Peers may see the id from now on. REQUIRES: mutex_ is held.
void PeerTable::show_instance() {
  if (pool_.instance() != 0) return;
  const std::uint32_t instance = proposed_instance_.value();
  keeps_instance_ ? pool_.set_instance(instance) : pool_.accept_instance(instance);
}

void PeerTable::keep_instance() {
  const std::lock_guard lock(mutex_);
  keeps_instance_ = true;
  if (pool_.instance() != 0) pool_.set_instance(pool_.instance());
}

std::uint32_t PeerTable::begin_call() {
  const std::lock_guard lock(mutex_);
  ++calling_;
  return instance_locked();
}

void PeerTable::end_call() noexcept {
  const std::lock_guard lock(mutex_);
  --calling_;
}

// Were the id changed while another call is under way, the peer that is called would know this pool by the old one.
PeerTable::Proposal PeerTable::propose_instead_of(std::uint32_t refused) {
  const std::lock_guard lock(mutex_);
  if (instance_locked() != refused) return Proposal::kChanged;  // by another call that was refused
  if (pool_.instance() != 0 || listening_ > 0) return Proposal::kNever;
  if (calling_ > 0) return Proposal::kLater;
  proposed_instance_ = InstanceId::draw();
  return Proposal::kChanged;
}

// --- this pool's lease ---

void PeerTable::join(std::uint32_t instance) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  pool_.set_instance(instance);  // which it keeps, as any id that a peer has seen
  if (std::exchange(joining_, false) && !lease_lost_) fenced_.reset();
}

std::vector<PeerTable::Peer> PeerTable::fence(const std::string& why) {
  std::vector<Peer> peers;
  const std::lock_guard lock(mutex_);
  if (closed_) return peers;
  const Error fenced(ErrorCode::kFenced, why);
  for (const auto& [name, peer] : peers_) peers.push_back(peer);
  lease_lost_ = true;
  fenced_ = fenced;
  dropped_by_.clear();
  return peers;
}

void PeerTable::unfence() {
  const std::lock_guard lock(mutex_);
  std::optional<Error> fenced;
  if (joining_) fenced.emplace(ErrorCode::kFenced, kNotJoined);
  dropped_by_.clear();
  lease_lost_ = false;
  fenced_ = fenced;
}

void PeerTable::check_unfenced() const {
  const std::lock_guard lock(mutex_);
  if (fenced_) throw Error(*fenced_);
}

void PeerTable::note_refusal(const Error& why) {
  if (why.code() != ErrorCode::kBusy || why.cause() != ErrorCause::kDropped || why.subject() != incarnation_) return;
  const std::lock_guard lock(mutex_);
  if (!fenced_) dropped_by_ = why.what();
}

std::string PeerTable::dropped_by() const {
  const std::lock_guard lock(mutex_);
  return dropped_by_;
}

}  // namespace kvpool
