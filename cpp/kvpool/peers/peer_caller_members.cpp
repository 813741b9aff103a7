// Members of a cluster are met when a verb needs them.
#include <algorithm>
#include <optional>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/peer_caller.h"
#include "kvpool/peers/peer_table.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

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

std::shared_ptr<Session> PeerCaller::reach(const std::string& name, std::int64_t until_ns, const GivenUp& given_up) {
  std::shared_ptr<Session> session = table_.find(name);
  if (session != nullptr && !session->lost()) [[likely]] {
    return session;
  }
  const auto member = book_.find(name);
  if (!member || member->incarnation == incarnation_) {
    if (session != nullptr) return session;  // which says why it was lost
    throw_unknown(name);
  }
  const Waiting waiting(until_ns, given_up);
  attempts_.run(name, waiting, [&] { call_on(*member, waiting); });
  session = table_.find(name);
  if (session != nullptr) return session;
  throw Error(ErrorCode::kPeerLost, "peer " + name + " left as soon as it was met", {{"instance", member->instance}});
}

// Tries its addresses. Throws kPeerLost with what was tried.
void PeerCaller::call_on(const ClusterMember& member, const Waiting& waiting) {
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

void PeerCaller::throw_unknown(const std::string& name) const {
  const std::string known = table_.names();
  const std::string members = book_.names();
  throw Error(ErrorCode::kPeerLost, "there is no peer called '" + name + "'" +
                                        (known.empty() ? "; this pool has none" : "; there are: " + known) +
                                        (members.empty() ? "" : "; members of its cluster: " + members));
}

// For a caller who knows the owner of blocks by their addresses alone.
std::string PeerCaller::owner_of(const std::vector<Address>& addresses) const {
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
  std::string name = table_.name_of_instance(instance);
  if (name.empty()) name = book_.name_of(instance);
  if (!name.empty()) return name;
  throw Error(ErrorCode::kPeerLost, "no peer and no member of the cluster has instance id " + std::to_string(instance),
              {{"instance", instance}});
}

}  // namespace kvpool
