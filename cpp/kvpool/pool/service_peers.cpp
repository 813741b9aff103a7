// Peers that come and go.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/service_impl.h"
#include "kvpool/transfer/failure.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDrainNs = 2'000'000'000;
constexpr std::int64_t kRetryAfterUs = 10'000;
constexpr int kInstanceDraws = 8;
constexpr std::int64_t kPauseNs = 1'000'000;  // before connect() tries again; twice as long each time
constexpr std::int64_t kPauseNsMax = 50'000'000;

std::optional<std::int64_t> field_of(const Error& error, std::string_view name) {
  for (const auto& [field, value] : error.fields()) {
    if (field == name) return value;
  }
  return std::nullopt;
}

// The listener has not been started yet, perhaps: the port is closed, the socket not there.
bool nobody_listens(const Error& error) {
  const auto number = field_of(error, "errno");
  return error.code() == ErrorCode::kPeerLost && (number == ECONNREFUSED || number == ENOENT);
}

[[noreturn]] void throw_nobody_listened(const std::string& address, const Error& error, std::int64_t ns) {
  char seconds[32];
  snprintf(seconds, sizeof(seconds), "%.1f", static_cast<double>(ns) / 1e9);
  throw Error(ErrorCode::kPeerLost,
              "nobody listened at " + address + " during " + seconds +
                  " s; is the other process running, and is this the address that its listen() returned?",
              {{"errno", *field_of(error, "errno")}});
}

class CountedCall {
 public:
  explicit CountedCall(std::atomic<int>& calls) noexcept : calls_(calls) { calls_.fetch_add(1); }
  ~CountedCall() { calls_.fetch_sub(1); }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;

 private:
  std::atomic<int>& calls_;
};

}  // namespace

// Between a link and its session: tells the service when the link has ended.
class ServiceImpl::LinkWatcher final : public LinkHandler {
 public:
  LinkWatcher(ServiceImpl& service, std::shared_ptr<Session> session, std::shared_ptr<Link> link,
              std::shared_ptr<const GroupMeeting> group)
      : service_(service), session_(std::move(session)), group_(std::move(group)), link_(std::move(link)) {}
  void on_message(Message&& message) override {
    hear();
    session_->on_message(std::move(message));
  }
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override {
    hear();
    return session_->on_data(id, body, payload_bytes);
  }
  void on_placed(std::uint64_t token, bool intact) override { session_->on_placed(token, intact); }
  void on_closed(const Error& why) override {
    session_->on_closed(why);
    service_.on_session_lost(session_, link_, group_);
    link_.reset();
  }

  // An earlier connection to the same incarnation.
  void replaces(SessionPointer before) { before_ = std::move(before); }
  // The peer has admitted this side, which it does only when it has ended what it wrote before. The one who was called
  // knows it from the first word.
  void hear() {
    if (std::exchange(heard_, true)) return;
    service_.ghosts_->on_writer_gone(session_->peer().epoch);
    if (before_ != nullptr) before_->on_writer_gone();
    before_.reset();
  }

 private:
  ServiceImpl& service_;
  bool heard_ = false;  // by whoever handles what arrives, or admits
  SessionPointer before_;
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<const GroupMeeting> group_;
  std::shared_ptr<Link> link_;
};

// --- meeting ---

std::string ServiceImpl::listen(const std::string& address) {
  pool_.guard();
  settle_instance();
  return endpoint_->listen(address);
}

// From now on the pool's addresses carry its id, and the id stays.
void ServiceImpl::settle_instance() {
  const std::lock_guard lock(mutex_);
  if (!joining_ && pool_.instance() == 0) pool_.set_instance(proposed_instance_.value());
}

std::string ServiceImpl::connect(const std::string& address, const Waiting& waiting, bool wait_for_listener) {
  const CountedCall call(connecting_);
  std::string name = visit(address, waiting, wait_for_listener);
  measure_routes(name, waiting);
  return name;
}

// Before the first transfer. Whatever has happened meanwhile is heard when one is asked for.
void ServiceImpl::measure_routes(const std::string& peer, const Waiting& waiting) {
  SessionPointer session;
  if (failure_of([&] { session = find(peer); }) || session == nullptr) return;
  session->measure_routes(waiting);
}

std::string ServiceImpl::visit(const std::string& address, const Waiting& waiting, bool wait_for_listener) {
  const std::int64_t began_ns = monotonic_ns();
  int draws = 1;
  std::optional<Error> refused;
  for (std::int64_t pause_ns = kPauseNs;; pause_ns = std::min(2 * pause_ns, kPauseNsMax)) {
    try {
      pool_.guard();  // whose GPU may be lost
      check_unfenced();
      if (hub_ != nullptr) hub_->check_complete();
      return meet(address, waiting);
    } catch (const Error& error) {
      const bool late = monotonic_ns() + pause_ns >= waiting.until_ns;
      if (const auto epoch = field_of(error, "epoch"); error.code() == ErrorCode::kState && epoch) {
        // It calls us at this moment, or has not noticed yet that it has lost us. Until it has been heard, it may drop
        // the connection that it made, for another of the two or for none: then it is ours to call again.
        const std::string name = name_of(static_cast<std::uint64_t>(*epoch), /*settled=*/!late);
        if (!name.empty()) return name;
        if (late) throw;
      } else if (error.code() == ErrorCode::kState && field_of(error, "instance")) {
        // Another peer has our id by chance. As long as nobody has seen an address of ours, another will do.
        if (pool_.instance() != 0 || draws++ == kInstanceDraws) throw;
        const std::lock_guard lock(mutex_);
        proposed_instance_ = InstanceId::draw();
      } else if (wait_for_listener && nobody_listens(error)) {
        refused = error;
        if (late) throw_nobody_listened(address, *refused, monotonic_ns() - began_ns);
      } else if (refused && error.code() == ErrorCode::kDeadline) {
        throw_nobody_listened(address, *refused, monotonic_ns() - began_ns);  // it overslept
      } else if (late || (error.code() != ErrorCode::kBusy && !field_of(error, "unanswered"))) {
        throw;  // else its own call to us may have come in between
      }
    }
    waiting.check();
    usleep(static_cast<useconds_t>(pause_ns / 1000));
  }
}

// One visit. Throws what Endpoint::connect throws, and kPeerLost.
std::string ServiceImpl::meet(const std::string& address, const Waiting& waiting) {
  const std::uint64_t meeting = random_epoch();
  const std::shared_ptr<Link> link = endpoint_->connect(address, waiting, meeting);
  std::uint64_t epoch = 0;
  {
    const std::lock_guard lock(mutex_);
    if (const auto noted = met_.extract(link)) epoch = noted.mapped();
  }
  if (epoch == 0) {
    // It has taken this pool for a rank, and has made a lane of the link.
    const Error why(ErrorCode::kPeerLost, "it was another that was looked for");
    lanes_ != nullptr ? lanes_->depart(meeting, why, {}) : link->close(why);
    throw Error(ErrorCode::kArgument, "at " + address + " is a rank of a logical instance: connect to its scheduler");
  }
  meet_ranks(link, address, waiting);
  // Not only by this link: the peer may have called at the same time, and its connection be the one that stays.
  std::string name = name_of(epoch);
  const SessionPointer session = name.empty() ? nullptr : find(name);
  if (session == nullptr) throw Error(ErrorCode::kPeerLost, "the peer at " + address + " left as soon as it was met");
  session->greet();
  return name;
}

// Of a peer that is connected; "" for none. `settled`: by a connection that both sides are known to have admitted.
std::string ServiceImpl::name_of(std::uint64_t epoch, bool settled) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, peer] : peers_) {
    if (peer.session->peer().epoch != epoch || peer.session->lost()) continue;
    if (!settled || peer.initiator == epoch_ || peer.session->heard()) return name;
  }
  return {};
}

Introduction ServiceImpl::introduce() {
  Introduction introduction;
  introduction.attachment = routes_.introduce(introduction.card);
  introduction.card.name = options_.name;
  introduction.card.epoch = epoch_;
  introduction.card.model = options_.model;
  introduction.descriptors = routes_.descriptors();
  if (hub_ != nullptr) hub_->introduce(introduction.card);
  const std::lock_guard lock(mutex_);
  introduction.card.instance = pool_.instance() != 0 ? pool_.instance() : proposed_instance_.value();
  return introduction;
}

void ServiceImpl::check_layout(const PeerCard& card) const {
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
  // Raw bytes have no such order: whoever moves them knows what they are.
  if (card.kv_heads == 0 || layout.kv_heads == 0 || card.tokens_first == layout.tokens_first) return;
  const auto order = [](bool tokens_first) { return std::string(tokens_first ? "NHD" : "HND"); };
  throw Error(ErrorCode::kLayoutMismatch, "the layouts differ: heads and tokens are " + order(card.tokens_first) +
                                              " at " + card.name + " and " + order(layout.tokens_first) + " at " +
                                              options_.name);
}

void ServiceImpl::check_name(const PeerCard& card) const {
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
  const std::uint32_t own = pool_.instance() != 0 ? pool_.instance() : proposed_instance_.value();
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
  if (card.rank_of != 0) return admit_rank(link, card);
  if (const auto lost = failure_of([&] { pool_.guard(); })) throw for_peer(*lost);
  check_name(card);
  const auto group = plan_group(card);
  if (group == nullptr) check_layout(card);
  const bool writes_directly = group != nullptr || routes_.exposure(card, *link).any();
  const auto session =
      std::make_shared<Session>(static_cast<SessionHost&>(*this), card, writes_directly, group != nullptr);
  session->start(link, group != nullptr ? group_routes(*group) : routes_.make(card, link));
  const auto handler = std::make_shared<LinkWatcher>(*this, session, link, group);

  const std::uint64_t initiator = initiated_here ? epoch_ : card.epoch;
  if (initiated_here) end_half_open(card);
  Peer before;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(initiated_here ? ErrorCode::kClosed : ErrorCode::kPeerLost, "the pool is closed");
    check_membership(card, initiated_here);
    check_instance(card);
    const auto known = peers_.find(card.name);
    if (known != peers_.end() && known->second.session->peer().epoch == card.epoch) {
      check_rival(known->second, card, initiated_here);
    }
    // A peer that comes back has ended what it wrote before, and so have we: it is met again only then.
    ghosts_->check_return(card.epoch);
    if (known != peers_.end()) before = std::move(known->second);
    if (initiated_here) {
      std::erase_if(met_, [](const auto& entry) { return entry.first.expired(); });
      met_[link] = card.epoch;
    }
    if (pool_.instance() == 0) pool_.set_instance(proposed_instance_.value());
    departed_.erase(card.instance);
    const bool goes_on =
        before.session != nullptr && before.session->peer().epoch == card.epoch && !before.session->lost();
    if (before.session != nullptr && !goes_on) tell_lost(*before.session);
    peers_.insert_or_assign(card.name, Peer{session, link, initiator, group});
    if (!goes_on) tell_joined(card);
  }
  if (before.link != nullptr) {
    const bool same = before.session->peer().epoch == card.epoch;
    // That it meets us again says something of a connection, too, whose end has not been noticed here.
    if (same && !before.session->by_ranks()) handler->replaces(before.session);
    before.link->close(Error(ErrorCode::kPeerLost, same ? card.name + " has connected again"
                                                        : "a newer process has come under the name " + card.name));
  }
  if (initiated_here) handler->hear();  // it has admitted this side before
  return handler;
}

// The peer has just admitted a connection of this side. So it has lost the one that this side made before, and which
// still looks alive here: the peer's goodbye is late, as after a partition. It ends now, and with it what is written by
// it; the next try finds it gone. Throws kBusy then.
void ServiceImpl::end_half_open(const PeerCard& card) {
  std::shared_ptr<Link> half_open;
  {
    const std::lock_guard lock(mutex_);
    const auto known = peers_.find(card.name);
    if (known == peers_.end()) return;
    const Peer& peer = known->second;
    if (peer.session->peer().epoch != card.epoch || peer.initiator != epoch_ || peer.session->lost()) return;
    half_open = peer.link;
  }
  half_open->close(Error(ErrorCode::kPeerLost, card.name + " had lost the connection before this side knew it"));
  throw Error(ErrorCode::kBusy, "the end of an earlier connection to " + card.name + " is being noticed",
              {{"retry_after_us", kRetryAfterUs}});
}

// Whether a connection to a peer that is here already takes the place of the one that there is. Throws kState with the
// epoch of who is known under it at the other side, else. REQUIRES: mutex_ is held.
//
// The server refuses first, so two connections meet only when both sides call at the same moment, and each has admitted
// the other's before it hears of its own. Then both keep the one of the side with the lower epoch.
void ServiceImpl::check_rival(const Peer& known, const PeerCard& card, bool initiated_here) const {
  if (known.session->lost()) {
    if (known.session->writes_under_way() == 0) return;
    throw Error(ErrorCode::kBusy, "writes of an earlier connection to " + card.name + " are not over",
                {{"retry_after_us", kRetryAfterUs}});
  }
  if (initiated_here && known.initiator == card.epoch && epoch_ < card.epoch) return;
  throw Error(ErrorCode::kState, options_.name + " and " + card.name + " are connected already",
              {{"epoch", static_cast<std::int64_t>(initiated_here ? card.epoch : epoch_)}});
}

// --- parting ---

// Called when the link has ended: once for each session.
void ServiceImpl::on_session_lost(const SessionPointer& session, const std::shared_ptr<Link>& link,
                                  const std::shared_ptr<const GroupMeeting>& group) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;  // close() looks after it
  }
  // First this: should the peer come back, it is found among the peers or among the ghosts.
  if (group == nullptr) {
    ghosts_->add(session, link, routes_.exposure(session->peer(), *link));
  } else {
    // Who writes here are the peer's ranks, and each rank of this instance knows when they write no more.
    const Error why(ErrorCode::kPeerLost, session->peer().name + " is lost");
    rank_set().depart(group->meeting, why, [session] { session->on_writer_gone(); });
  }
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(session->peer().name);
    if (entry != peers_.end() && entry->second.session == session) {
      peers_.erase(entry);
      tell_lost(*session);
    }
    departed_.insert(session->peer().instance);
  }
  if (group != nullptr) return;
  // A pool of this process may have told that it writes no more before there was anybody to hear it.
  const PeerCard& peer = session->peer();
  const bool told = link->process() > 0;  // by the kernel; over TCP there is only the peer's word
  const bool here =
      told ? link->process() == getpid() : peer.pid == static_cast<std::uint64_t>(getpid()) && peer.host == host_id();
  if (here && !LocalServices::may_write(peer.epoch, epoch_)) ghosts_->on_writer_gone(peer.epoch);
}

bool ServiceImpl::may_write_to(std::uint64_t epoch) noexcept {
  if (write_lost_.load()) return true;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      const Session& session = *peer.session;
      if (session.peer().epoch == epoch && !(session.lost() && session.writes_under_way() == 0)) return true;
    }
  }
  return ghosts_->is_writing_to(epoch);
}

void ServiceImpl::disconnect(const std::string& name, const GivenUp& given_up) {
  Peer peer;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = peers_.find(name);
    if (entry == peers_.end()) throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'");
    peer = entry->second;
  }
  peer.session->stop_writing(Error(ErrorCode::kPeerLost, "the connection to " + name + " was closed here"));
  const Waiting waiting(monotonic_ns() + kDrainNs, given_up);
  const auto failure = failure_of([&] {
    while (peer.session->writes_under_way() > 0 && monotonic_ns() < waiting.until_ns) {
      usleep(1000);
      waiting.check();
    }
    if (peer.session->writes_under_way() == 0) peer.session->say_drained();
    // It answers when it writes nothing either; then nothing of it needs to be kept.
    const auto answered = [&] { return peer.session->peer_drained() || peer.session->link_ended(); };
    while (!peer.link->drive(waiting.slice_ns(monotonic_ns()), answered) && monotonic_ns() < waiting.until_ns) {
      waiting.check();
    }
  });
  peer.link->close(Error(ErrorCode::kPeerLost, "closed by " + options_.name));
  if (failure) throw Error(*failure);
}

void ServiceImpl::drained(Session& session) noexcept {
  // Should the link have ended, peers in other processes learn it from the end of this one, or when they meet us again.
  session.say_drained();
  if (session.by_ranks()) return;  // nobody believes it: see Session
  // Should they have met again, it would be taken for the end of that session's writes; its first word is the proof.
  if (!write_lost_.load() && !is_met_again(session)) LocalServices::tell_drained(session.peer().epoch, epoch_);
  ghosts_->on_drained(session);
}

bool ServiceImpl::is_met_again(const Session& session) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const auto& entry) {
    const Session& other = *entry.second.session;
    return &other != &session && other.peer().epoch == session.peer().epoch;
  });
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

}  // namespace kvpool
