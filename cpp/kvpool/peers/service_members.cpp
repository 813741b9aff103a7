// The service in a cluster: whom the directory names is met when a verb needs it, whom it declares dead is parted from,
// and a pool that has lost its own lease keeps to itself.
//
//   M1  An incarnation that was expelled has no session here, and gets none, before the directory names it again.
//   M2  A pool that is fenced has no session, and gets none.
//   M3  A pool that calls a peer which has dropped it learns so: the refusal says so (kDropped), with the caller's own
//   epoch. A peer
//       that never had a session with it refuses without: it has taken nothing from the caller.
// Both are told under mutex_ before sessions are looked for, and admit() looks under it: nobody slips in between.
#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/late_writers.h"
#include "kvpool/peers/service_impl.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 100'000;
constexpr std::int64_t kFenceDrainNs = 100'000'000;

// What another address of the same peer will not mend, and who calls has to hear.
bool is_final(ErrorCode code) noexcept {
  return code == ErrorCode::kLayoutMismatch || code == ErrorCode::kClosed || code == ErrorCode::kFenced ||
         code == ErrorCode::kFork;
}

bool is_silence(ErrorCode code) noexcept {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kDeadline || code == ErrorCode::kBusy ||
         code == ErrorCode::kState;  // it has not noticed yet that an earlier connection has ended
}

}  // namespace

// --- meeting ---

ServiceImpl::SessionPointer ServiceImpl::find(const std::string& name) const {
  pool_.guard();  // when the content of all blocks is lost, that is what to say
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  if (fenced_) throw Error(*fenced_);
  const auto entry = peers_.find(name);
  return entry == peers_.end() ? nullptr : entry->second.session;
}

ServiceImpl::SessionPointer ServiceImpl::reach(const std::string& name, std::int64_t until_ns,
                                               const GivenUp& given_up) {
  SessionPointer session = find(name);
  if (session != nullptr && !session->lost()) [[likely]] {
    return session;
  }
  const auto member = book_.find(name);
  if (!member || member->epoch == epoch_) {
    if (session != nullptr) return session;  // which says why it was lost
    throw_unknown(name);
  }
  const Waiting waiting(until_ns, given_up);
  attempts_.run(name, waiting, [&] { call_on(*member, waiting); });
  session = find(name);
  if (session != nullptr) return session;
  throw Error(ErrorCode::kPeerLost, "peer " + name + " left as soon as it was met", {{"instance", member->instance}});
}

// Tries its addresses. Throws kPeerLost with what was tried.
void ServiceImpl::call_on(const ClusterMember& member, const Waiting& waiting) {
  std::string tried;
  std::optional<Error> told;  // by somebody who answered
  const auto gone = [&] { return !book_.lists(member) || (waiting.given_up && waiting.given_up()); };
  for (std::size_t i = 0; i < member.addresses.size(); ++i) {
    const std::string& address = member.addresses[i];
    const std::int64_t now = monotonic_ns();
    if (now >= waiting.until_ns && i > 0) break;
    // A host that is silent leaves time for the addresses after its own.
    const auto left = static_cast<std::int64_t>(member.addresses.size() - i);
    std::string met;
    const auto failure = failure_of(
        [&] { met = connect(address, {now + (waiting.until_ns - now) / left, gone}, /*wait_for_listener=*/false); });
    if (!failure && met == member.name) return;
    if (failure && is_final(failure->code())) throw Error(*failure);
    if (failure && failure->code() == ErrorCode::kCancelled) {
      if (book_.lists(member)) throw Error(*failure);  // by the caller
      tried += (tried.empty() ? "" : "; ") + std::string("meanwhile the cluster has told that it is gone");
      break;
    }
    if (failure && !is_silence(failure->code())) told = failure;
    tried += (tried.empty() ? "" : "; ") + address + ": " + (failure ? failure->what() : "there is " + met + " now");
  }
  if (told) throw Error(*told);
  throw Error(
      ErrorCode::kPeerLost,
      "peer " + member.name + " cannot be reached" + (tried.empty() ? ": it has no address" : " (" + tried + ")"),
      {{"instance", member.instance}});
}

void ServiceImpl::throw_unknown(const std::string& name) const {
  std::string known;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [other, peer] : peers_) known += (known.empty() ? "" : ", ") + other;
  }
  const std::string members = book_.names();
  throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'" +
                                        (known.empty() ? "; this pool has none" : "; there are: " + known) +
                                        (members.empty() ? "" : "; members of its cluster: " + members));
}

// For a caller who knows the owner of blocks by their addresses alone.
std::string ServiceImpl::owner_of(const std::vector<Address>& addresses) const {
  const bool all_own = std::all_of(addresses.begin(), addresses.end(), [&](Address address) {
    // From before this pool had an id, or with it; 0 is no address.
    return address != 0 && (instance_of(address) == 0 || instance_of(address) == pool_.instance());
  });
  if (all_own && !addresses.empty()) {
    throw Error(ErrorCode::kArgument, "these blocks are of this pool, and here already: there is nothing to fetch",
                {{"instance", pool_.instance()}});
  }
  const std::uint32_t instance = addresses.empty() ? 0 : instance_of(addresses[0]);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (instance_of(addresses[i]) == instance && instance != 0) continue;
    throw Error(ErrorCode::kArgument,
                "position " + std::to_string(i) + " belongs to instance " + std::to_string(instance_of(addresses[i])) +
                    ", the first to " + std::to_string(instance) + ": name the peer, or one owner's blocks",
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.session->peer().instance == instance) return name;
    }
  }
  std::string name = book_.name_of(instance);
  if (!name.empty()) return name;
  throw Error(ErrorCode::kPeerLost, "no peer and no member of the cluster has instance id " + std::to_string(instance),
              {{"instance", instance}});
}

// --- what the directory tells ---

void ServiceImpl::join(std::uint32_t instance) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  pool_.set_instance(instance);  // which it keeps, as any id that a peer has seen
  if (std::exchange(joining_, false)) fenced_.reset();
}

void ServiceImpl::set_members(std::vector<ClusterMember> members) {
  for (const std::uint64_t epoch : book_.set(std::move(members))) {
    part_from(epoch, Error(ErrorCode::kPeerLost, "a newer process has come under its name"));
  }
}

void ServiceImpl::expel(std::uint64_t epoch, const std::string& why) {
  book_.expel(epoch, why);
  part_from(epoch, Error(ErrorCode::kPeerLost, why));
}

void ServiceImpl::part_from(std::uint64_t epoch, const Error& why) {
  std::vector<std::shared_ptr<Link>> links;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.session->peer().epoch == epoch) links.push_back(peer.link);
    }
  }
  for (const auto& link : links) link->close(why);
}

void ServiceImpl::check_unfenced() const {
  const std::lock_guard lock(mutex_);
  if (fenced_) throw Error(*fenced_);
}

// Who is let in. REQUIRES: mutex_ is held.
void ServiceImpl::check_membership(const PeerMetadata& metadata, bool initiated_here) const {
  if (fenced_) {
    // Whoever called learns soon enough from the directory, or is let in when the lease is back.
    if (initiated_here) throw Error(*fenced_);
    throw Error(ErrorCode::kBusy, options_.name + " lets nobody in: " + fenced_->what(),
                {{"retry_after_us", kRetryAfterUs}});
  }
  const auto why = book_.expelled(metadata.epoch);
  if (!why) return;
  const Error refusal(initiated_here ? ErrorCode::kPeerLost : ErrorCode::kBusy,
                      "to " + options_.name + " this incarnation of " + metadata.name + " is dead (" + *why +
                          ") until its cluster names it again",
                      {{"retry_after_us", kRetryAfterUs}});
  // Whose blocks were promised here, and are not any more, has to know.
  if (departed_.contains(metadata.instance)) throw refusal.because(ErrorCause::kDropped, metadata.epoch);
  throw Error(refusal);
}

// Whether a peer that was called has dropped this incarnation.
void ServiceImpl::note_refusal(const Error& why) {
  if (why.code() != ErrorCode::kBusy || why.cause() != ErrorCause::kDropped || why.subject() != epoch_) return;
  const std::lock_guard lock(mutex_);
  if (!fenced_) dropped_by_ = why.what();
}

std::string ServiceImpl::dropped_by() const {
  const std::lock_guard lock(mutex_);
  return dropped_by_;
}

// --- this pool's own lease ---

void ServiceImpl::fence(const std::string& why) {
  std::vector<Peer> peers;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    fenced_.emplace(ErrorCode::kFenced, why);
    dropped_by_.clear();
    for (const auto& [name, peer] : peers_) peers.push_back(peer);
  }
  const Error lost(ErrorCode::kPeerLost, why);
  for (const Peer& peer : peers) peer.session->stop_writing(lost);
  // A peer that hears that nothing is written there any more needs no quarantine.
  const std::int64_t until = monotonic_ns() + kFenceDrainNs;
  for (const Peer& peer : peers) {
    if (wait_until(until, [&] { return peer.session->writes_under_way() == 0; })) peer.session->say_drained();
    peer.link->close(lost);
  }
}

void ServiceImpl::unfence() {
  const std::lock_guard lock(mutex_);
  dropped_by_.clear();
  if (!joining_) fenced_.reset();
}

}  // namespace kvpool
