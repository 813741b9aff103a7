// Peers that come and go.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/service_impl.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDrainNs = 2'000'000'000;
constexpr std::int64_t kRetryAfterUs = 10'000;
constexpr int kInstanceDraws = 8;

}  // namespace

// Between a link and its session: tells the service when the link has ended.
class ServiceImpl::LinkWatcher final : public LinkHandler {
 public:
  LinkWatcher(ServiceImpl& service, std::shared_ptr<Session> session, std::shared_ptr<Link> link)
      : service_(service), session_(std::move(session)), link_(std::move(link)) {}
  void on_message(Message&& message) override { session_->on_message(std::move(message)); }
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override {
    return session_->on_data(id, body, payload_bytes);
  }
  void on_placed(std::uint64_t token, bool intact) override { session_->on_placed(token, intact); }
  void on_closed(const Error& why) override {
    session_->on_closed(why);
    service_.on_session_lost(session_, link_);
    link_.reset();
  }

 private:
  ServiceImpl& service_;
  const std::shared_ptr<Session> session_;
  std::shared_ptr<Link> link_;
};

// --- meeting ---

std::string ServiceImpl::listen(const std::string& address) {
  settle_instance();
  return endpoint_->listen(address);
}

// From now on the pool's addresses carry its id, and the id stays.
void ServiceImpl::settle_instance() {
  const std::lock_guard lock(mutex_);
  if (pool_.instance() == 0) pool_.set_instance(proposed_instance_);
}

std::string ServiceImpl::connect(const std::string& address, std::int64_t deadline_ns) {
  for (int draw = 1;; ++draw) {
    try {
      const std::shared_ptr<Link> link = endpoint_->connect(address, deadline_ns);
      const std::lock_guard lock(mutex_);
      for (const auto& [name, peer] : peers_) {
        if (peer.link == link) return name;
      }
      throw Error(ErrorCode::kPeerLost, "the peer at " + address + " left as soon as it was met");
    } catch (const Error& error) {
      // Another peer has our id by chance. As long as nobody has seen an address of ours, another will do.
      const bool taken = error.code() == ErrorCode::kState && !error.fields().empty() &&
                         std::string(error.fields().front().first) == "instance";
      if (!taken || pool_.instance() != 0 || draw == kInstanceDraws) throw;
      const std::lock_guard lock(mutex_);
      proposed_instance_ = random_instance();
    }
  }
}

Introduction ServiceImpl::introduce() {
  Introduction introduction;
  introduction.attachment = routes_.introduce(introduction.card);
  introduction.card.name = options_.name;
  introduction.card.epoch = epoch_;
  introduction.card.model = options_.model;
  introduction.descriptors = routes_.descriptors();
  const std::lock_guard lock(mutex_);
  introduction.card.instance = pool_.instance() != 0 ? pool_.instance() : proposed_instance_;
  return introduction;
}

void ServiceImpl::check_peer(const PeerCard& card) const {
  const Layout& layout = blocks_.layout();
  std::uint64_t offered = 0;
  for (const std::uint64_t bytes : card.piece_bytes) offered += bytes;
  const bool same_pieces = std::equal(card.piece_bytes.begin(), card.piece_bytes.end(), layout.piece_bytes.begin(),
                                      layout.piece_bytes.end());
  if (!same_pieces || card.block_tokens != layout.block_tokens) {
    throw Error(ErrorCode::kLayoutMismatch,
                "the layouts differ: " + card.name + " has blocks of " + std::to_string(card.block_tokens) +
                    " tokens, " + std::to_string(card.piece_bytes.size()) + " pieces and " + std::to_string(offered) +
                    " bytes, " + options_.name + " has " + std::to_string(layout.block_tokens) + " tokens, " +
                    std::to_string(layout.piece_bytes.size()) + " pieces and " + std::to_string(layout.block_bytes()) +
                    " bytes",
                {{"offered_bytes", static_cast<std::int64_t>(offered)},
                 {"layout_bytes", static_cast<std::int64_t>(layout.block_bytes())}});
  }
  if (card.model != options_.model) {
    throw Error(ErrorCode::kLayoutMismatch, "the models differ: " + card.name + " has '" + card.model + "', " +
                                                options_.name + " has '" + options_.model + "'");
  }
  if (card.epoch == epoch_) throw Error(ErrorCode::kArgument, "a pool cannot be its own peer");
  if (card.name == options_.name) {
    throw Error(ErrorCode::kArgument, "both pools are called '" + card.name + "': give one of them another name");
  }
}

// REQUIRES: mutex_ is held.
void ServiceImpl::check_instance(const PeerCard& card) const {
  const std::uint32_t own = pool_.instance() != 0 ? pool_.instance() : proposed_instance_;
  bool taken = card.instance == own;
  for (const auto& [name, peer] : peers_) {
    const PeerCard& other = peer.session->peer();
    // Blocks are known by their owner's epoch: nobody gets another one's.
    taken = taken || (name != card.name && (other.instance == card.instance || other.epoch == card.epoch));
  }
  if (taken) {
    throw Error(ErrorCode::kState, "instance id " + std::to_string(card.instance) + " is taken by another peer",
                {{"instance", card.instance}});
  }
}

std::shared_ptr<LinkHandler> ServiceImpl::admit(const std::shared_ptr<Link>& link, const PeerCard& card,
                                                bool initiated_here) {
  check_peer(card);
  const auto session =
      std::make_shared<Session>(static_cast<SessionHost&>(*this), card, routes_.exposure(card, *link).any());
  session->start(link, routes_.make(card, link));
  const auto handler = std::make_shared<LinkWatcher>(*this, session, link);

  const std::uint64_t initiator = initiated_here ? epoch_ : card.epoch;
  Peer before;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
    check_instance(card);
    const auto known = peers_.find(card.name);
    const bool connected =
        known != peers_.end() && known->second.session->peer().epoch == card.epoch && !known->second.session->lost();
    // When both connect at the same time, both keep the connection of the one with the lower epoch.
    if (connected && known->second.initiator <= initiator) {
      throw Error(ErrorCode::kState, options_.name + " and " + card.name + " are connected already");
    }
    // A peer that comes back has ended what it wrote before, and so have we: it is met again only then.
    ghosts_->check_return(card.epoch);
    if (known != peers_.end()) before = std::move(known->second);
    if (pool_.instance() == 0) pool_.set_instance(proposed_instance_);
    departed_.erase(card.instance);
    peers_.insert_or_assign(card.name, Peer{session, link, initiator});
  }
  ghosts_->on_writer_gone(card.epoch);
  if (before.link != nullptr) {
    before.link->close(Error(ErrorCode::kPeerLost, "a newer process has come under the name " + card.name));
  }
  return handler;
}

// --- parting ---

// Called when the link has ended: once for each session.
void ServiceImpl::on_session_lost(const SessionPointer& session, const std::shared_ptr<Link>& link) {
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(session->peer().name);
    if (entry != peers_.end() && entry->second.session == session) peers_.erase(entry);
    if (closed_) return;
    departed_.insert(session->peer().instance);
  }
  ghosts_->add(session, link, routes_.exposure(session->peer(), *link));
  // A pool of this process may have told that it writes no more before there was anybody to hear it.
  const PeerCard& peer = session->peer();
  const bool here = peer.pid == static_cast<std::uint64_t>(getpid()) && peer.host == host_id();
  if (here && !LocalServices::may_write(peer.epoch, epoch_)) ghosts_->on_writer_gone(peer.epoch);
}

bool ServiceImpl::may_write_to(std::uint64_t epoch) noexcept {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      const Session& session = *peer.session;
      if (session.peer().epoch == epoch && !(session.lost() && session.writes_under_way() == 0)) return true;
    }
  }
  return ghosts_->is_writing_to(epoch);
}

void ServiceImpl::disconnect(const std::string& name) {
  Peer peer;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(name);
    if (entry == peers_.end()) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'");
    peer = entry->second;
  }
  peer.session->stop_writing(Error(ErrorCode::kPeerLost, "the connection to " + name + " was closed here"));
  const std::int64_t until = monotonic_ns() + kDrainNs;
  while (peer.session->writes_under_way() > 0 && monotonic_ns() < until) usleep(1000);
  if (peer.session->writes_under_way() == 0) peer.session->say_drained();
  // It answers when it writes nothing either; then nothing of it needs to be kept.
  static_cast<void>(peer.link->drive(until, [&] { return peer.session->peer_drained(); }));
  peer.link->close(Error(ErrorCode::kPeerLost, "closed by " + options_.name));
}

void ServiceImpl::drained(Session& session) noexcept {
  // Should the link have ended, peers in other processes learn it from the end of this one, or when they meet us again.
  session.say_drained();
  LocalServices::tell_drained(session.peer().epoch, epoch_);
  ghosts_->on_drained(session);
}

void ServiceImpl::on_peer_drained(std::uint64_t epoch) noexcept {
  std::vector<SessionPointer> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.session->peer().epoch == epoch) sessions.push_back(peer.session);
    }
  }
  for (const SessionPointer& session : sessions) session->on_writer_gone();
  ghosts_->on_writer_gone(epoch);
}

std::vector<PeerInfo> ServiceImpl::peers() {
  std::vector<PeerInfo> list;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->lost()) continue;
    const PeerCard& card = peer.session->peer();
    const ReceiverCounts counts = peer.session->counts();
    list.push_back({name, card.instance, card.epoch, peer.link->describe(), peer.session->route_names(), card.pid,
                    counts.lent, peer.session->borrowed_blocks(), counts.reserved});
  }
  std::sort(list.begin(), list.end(), [](const PeerInfo& a, const PeerInfo& b) { return a.name < b.name; });
  return list;
}

ServiceImpl::SessionPointer ServiceImpl::find(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  const auto entry = peers_.find(name);
  if (entry != peers_.end()) return entry->second.session;
  std::string known;
  for (const auto& [other, peer] : peers_) known += (known.empty() ? "" : ", ") + other;
  throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'" +
                                        (known.empty() ? "; this pool has none" : "; there are: " + known));
}

}  // namespace kvpool
