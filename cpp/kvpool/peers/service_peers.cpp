// Who is admitted as a peer, by which connection, and what it is told of this pool.
#include <algorithm>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/same_blocks.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

// Between a link and its session: tells the service when the link has ended.
class ServiceImpl::LinkWatcher final : public LinkHandler {
 public:
  LinkWatcher(ServiceImpl& service, std::shared_ptr<Session> session, std::shared_ptr<Link> link,
              std::shared_ptr<GroupConnection> group)
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
    service_.writer_quarantine_->on_writer_gone(session_->peer().epoch);
    if (before_ != nullptr) before_->on_writer_gone();
    before_.reset();
  }

 private:
  ServiceImpl& service_;
  bool heard_ = false;  // by whoever handles what arrives, or admits
  SessionPointer before_;
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<GroupConnection> group_;
  std::shared_ptr<Link> link_;
};

std::string ServiceImpl::listen(const std::string& address) {
  pool_.guard();
  {
    const std::lock_guard lock(mutex_);
    ++listening_;
  }
  std::string bound;
  const auto failure = failure_of([&] { bound = endpoint_->listen(address); });
  const std::lock_guard lock(mutex_);
  --listening_;
  if (failure) throw Error(*failure);
  // From now on the pool's addresses carry its id, and the id stays.
  if (!joining_ && pool_.instance() == 0) pool_.set_instance(proposed_instance_.value());
  return bound;
}

Introduction ServiceImpl::introduce() {
  Introduction introduction = routes_.introduce();
  introduction.metadata.name = options_.name;
  introduction.metadata.epoch = epoch_;
  introduction.metadata.model = options_.model;
  ranks_->introduce(introduction.metadata);
  const std::lock_guard lock(mutex_);
  introduction.metadata.instance = pool_.instance() != 0 ? pool_.instance() : proposed_instance_.value();
  return introduction;
}

void ServiceImpl::check_name(const PeerMetadata& metadata) const {
  if (metadata.model != options_.model) {
    throw Error(ErrorCode::kLayoutMismatch, "the models differ: " + metadata.name + " has '" + metadata.model + "', " +
                                                options_.name + " has '" + options_.model + "'");
  }
  if (metadata.epoch == epoch_) throw Error(ErrorCode::kArgument, "a pool cannot be its own peer");
  if (metadata.name == options_.name) {
    throw Error(ErrorCode::kArgument, "both pools are called '" + metadata.name + "': give one of them another name");
  }
}

// REQUIRES: mutex_ is held.
void ServiceImpl::check_instance(const PeerMetadata& metadata) const {
  const std::uint32_t own = pool_.instance() != 0 ? pool_.instance() : proposed_instance_.value();
  bool taken = metadata.instance == own;
  for (const auto& [name, peer] : peers_) {
    const PeerMetadata& other = peer.session->peer();
    // Blocks are known by their owner's epoch: nobody gets another one's.
    taken = taken || (name != metadata.name && (other.instance == metadata.instance || other.epoch == metadata.epoch));
  }
  if (taken) {
    throw Error(ErrorCode::kState, "instance id " + std::to_string(metadata.instance) + " is taken by another peer",
                {{"instance", metadata.instance}})
        .because(ErrorCause::kInstanceTaken);
  }
}

std::shared_ptr<LinkHandler> ServiceImpl::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                                bool initiated_here) {
  if (metadata.rank_of != 0) return ranks_->admit(link, metadata);
  if (const auto lost = failure_of([&] { pool_.guard(); })) throw for_peer(*lost);
  check_name(metadata);
  // Of the whole block, also where it is shared among ranks: tensor and pipeline parallelism may differ, nothing else.
  check_same_blocks(metadata, metadata.name, blocks_.layout(), options_.name);
  const auto group = ranks_->plan(metadata);
  const bool writes_directly = group != nullptr || routes_.exposure(metadata, link).any();
  const auto session =
      std::make_shared<Session>(static_cast<SessionHost&>(*this), metadata, writes_directly, group != nullptr);
  session->start(link, group != nullptr ? group->routes() : routes_.make(metadata, link));
  const auto handler = std::make_shared<LinkWatcher>(*this, session, link, group);

  const std::uint64_t initiator = initiated_here ? epoch_ : metadata.epoch;
  if (initiated_here) end_half_open(metadata);
  Peer before;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(initiated_here ? ErrorCode::kClosed : ErrorCode::kPeerLost, "the pool is closed");
    check_membership(metadata, initiated_here);
    check_instance(metadata);
    const auto known = peers_.find(metadata.name);
    if (known != peers_.end() && known->second.session->peer().epoch == metadata.epoch) {
      check_rival(known->second, metadata, initiated_here);
    }
    // A peer that comes back has ended what it wrote before, and so have we: it is met again only then.
    writer_quarantine_->check_return(metadata.epoch);
    if (known != peers_.end()) before = std::move(known->second);
    if (initiated_here) {
      std::erase_if(met_, [](const auto& entry) { return entry.first.expired(); });
      met_[link] = metadata.epoch;
    }
    if (pool_.instance() == 0) pool_.set_instance(proposed_instance_.value());
    departed_.erase(metadata.instance);
    const bool goes_on =
        before.session != nullptr && before.session->peer().epoch == metadata.epoch && !before.session->lost();
    if (before.session != nullptr && !goes_on) tell_lost(*before.session);
    peers_.insert_or_assign(metadata.name, Peer{session, link, initiator, group});
    if (!goes_on) tell_joined(metadata);
  }
  if (before.link != nullptr) {
    const bool same = before.session->peer().epoch == metadata.epoch;
    // That it meets us again says something of a connection, too, whose end has not been noticed here.
    if (same && !before.session->by_ranks()) handler->replaces(before.session);
    before.link->close(Error(ErrorCode::kPeerLost, same ? metadata.name + " has connected again"
                                                        : "a newer process has come under the name " + metadata.name));
  }
  if (initiated_here) handler->hear();  // it has admitted this side before
  return handler;
}

// The peer has just admitted a connection of this side. So it has lost the one that this side made before, and which
// still looks alive here: the peer's goodbye is late, as after a partition. It ends now, and with it what is written by
// it; the next try finds it gone. Throws kBusy then.
void ServiceImpl::end_half_open(const PeerMetadata& metadata) {
  std::shared_ptr<Link> half_open;
  {
    const std::lock_guard lock(mutex_);
    const auto known = peers_.find(metadata.name);
    if (known == peers_.end()) return;
    const Peer& peer = known->second;
    if (peer.session->peer().epoch != metadata.epoch || peer.initiator != epoch_ || peer.session->lost()) return;
    half_open = peer.link;
  }
  half_open->close(Error(ErrorCode::kPeerLost, metadata.name + " had lost the connection before this side knew it"));
  throw Error(ErrorCode::kBusy, "the end of an earlier connection to " + metadata.name + " is being noticed",
              {{"retry_after_us", kRetryAfterUs}});
}

// Whether a connection to a peer that is here already takes the place of the one that there is. Throws kState
// (kConnectedAlready) with the epoch by which the other side knows it, else. REQUIRES: mutex_ is held.
//
// The server refuses first, so two connections meet only when both sides call at the same moment, and each has admitted
// the other's before it hears of its own. Then both keep the one of the side with the lower epoch.
void ServiceImpl::check_rival(const Peer& known, const PeerMetadata& metadata, bool initiated_here) const {
  if (known.session->lost()) {
    if (known.session->writes_under_way() == 0) return;
    throw Error(ErrorCode::kBusy, "writes of an earlier connection to " + metadata.name + " are not over",
                {{"retry_after_us", kRetryAfterUs}});
  }
  if (initiated_here && known.initiator == metadata.epoch && epoch_ < metadata.epoch) return;
  throw Error(ErrorCode::kState, options_.name + " and " + metadata.name + " are connected already")
      .because(ErrorCause::kConnectedAlready, initiated_here ? metadata.epoch : epoch_);
}

}  // namespace kvpool
