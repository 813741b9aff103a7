// Visits: this side calls a peer, again and again until it is met or the time is over.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/service_impl.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr int kInstanceDraws = 8;
constexpr std::int64_t kPauseNs = 1'000'000;  // before connect() tries again; twice as long each time
constexpr std::int64_t kPauseNsMax = 50'000'000;

[[noreturn]] void throw_nobody_listened(const std::string& address, const Error& error, std::int64_t ns) {
  char seconds[32];
  snprintf(seconds, sizeof(seconds), "%.1f", static_cast<double>(ns) / 1e9);
  Error nobody(ErrorCode::kPeerLost,
               "nobody listened at " + address + " during " + seconds +
                   " s; is the other process running, and is this the address that its listen() returned?");
  for (const auto& [name, value] : error.fields()) nobody.add(name, value);
  throw Error(nobody);
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
      ranks_->check_complete();
      return meet(address, waiting);
    } catch (const Error& error) {
      note_refusal(error);
      const bool late = monotonic_ns() + pause_ns >= waiting.until_ns;
      if (error.code() == ErrorCode::kState && error.cause() == ErrorCause::kConnectedAlready) {
        // It calls us at this moment, or has not noticed yet that it has lost us. Until it has been heard, it may drop
        // the connection that it made, for another of the two or for none: then it is ours to call again.
        const std::string name = name_of(error.subject(), /*settled=*/!late);
        if (!name.empty()) return name;
        if (late) throw;
      } else if (error.code() == ErrorCode::kState && error.cause() == ErrorCause::kInstanceTaken) {
        // Another peer has our id by chance. As long as nobody has seen an address of ours, another will do.
        const std::lock_guard lock(mutex_);
        if (pool_.instance() != 0 || listening_ > 0 || draws++ == kInstanceDraws) throw;
        proposed_instance_ = InstanceId::draw();
      } else if (wait_for_listener && error.cause() == ErrorCause::kNobodyListens) {
        refused = error;
        if (late) throw_nobody_listened(address, *refused, monotonic_ns() - began_ns);
      } else if (refused && error.code() == ErrorCode::kDeadline) {
        throw_nobody_listened(address, *refused, monotonic_ns() - began_ns);  // it overslept
      } else if (late || (error.code() != ErrorCode::kBusy && error.cause() != ErrorCause::kUnanswered)) {
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
    // A rank answered, which takes this side for a rank as well.
    ranks_->refuse(link, meeting, Error(ErrorCode::kPeerLost, "it was another that was looked for"));
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

// After two schedulers have met by this link: lets the ranks of both meet. The side that has connected does it; when
// the link that stays is the other's, that one does.
void ServiceImpl::meet_ranks(const std::shared_ptr<Link>& link, const std::string& address, const Waiting& waiting) {
  std::shared_ptr<GroupConnection> group;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, peer] : peers_) {
      if (peer.link == link) group = peer.group;
    }
  }
  if (group == nullptr) return;
  try {
    group->meet(address, waiting);
  } catch (const Error& error) {
    link->close(error);
    throw;
  }
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

}  // namespace kvpool
