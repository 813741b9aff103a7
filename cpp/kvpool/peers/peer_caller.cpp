#include "kvpool/peers/peer_caller.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/incarnation.h"
#include "kvpool/peers/peer_table.h"
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

std::string PeerCaller::connect(const std::string& address, const Waiting& waiting, bool wait_for_listener) {
  const CountedCall call(calls_);
  std::string name = visit(address, waiting, wait_for_listener);
  measure_routes(name, waiting);
  return name;
}

// Before the first transfer. Whatever has happened meanwhile is heard when one is asked for.
void PeerCaller::measure_routes(const std::string& peer, const Waiting& waiting) {
  std::shared_ptr<Session> session;
  if (failure_of([&] { session = table_.find(peer); }) || session == nullptr) return;
  session->measure_routes(waiting);
}

std::string PeerCaller::visit(const std::string& address, const Waiting& waiting, bool wait_for_listener) {
  const std::int64_t began_ns = monotonic_ns();
  int draws = 1;
  std::uint32_t told = 0;  // this pool's id
  std::optional<Error> refused;
  for (std::int64_t pause_ns = kPauseNs;; pause_ns = std::min(2 * pause_ns, kPauseNsMax)) {
    try {
      pool_.guard();  // whose GPU may be lost
      table_.check_unfenced();
      ranks_.check_complete();
      const PeerTable::Call call(table_);
      told = call.instance();
      return meet(address, waiting);
    } catch (const Error& error) {
      table_.note_refusal(error);
      const bool late = monotonic_ns() + pause_ns >= waiting.until_ns;
      if (error.code() == ErrorCode::kState && error.cause() == ErrorCause::kConnectedAlready) {
        // It calls us at this moment, or has not noticed yet that it has lost us. Until it has been heard, it may drop
        // the connection that it made, for another of the two or for none: then it is ours to call again.
        const std::string name = table_.name_of(error.subject(), /*confirmed=*/!late);
        if (!name.empty()) return name;
        if (late) throw;
      } else if (error.code() == ErrorCode::kState && error.cause() == ErrorCause::kInstanceTaken) {
        // Another peer has our id by chance. As long as nobody has seen an address of ours, another will do.
        if (draws++ == kInstanceDraws || !take_another_id(told, waiting)) throw;
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

// False: peers may have seen addresses with the refused id. Until other calls of this pool that may tell it have ended,
// none is made with it again.
bool PeerCaller::take_another_id(std::uint32_t refused, const Waiting& waiting) {
  for (;;) {
    const PeerTable::Proposal proposal = table_.propose_instead_of(refused);
    if (proposal != PeerTable::Proposal::kLater) return proposal == PeerTable::Proposal::kChanged;
    waiting.check();
    if (monotonic_ns() + kPauseNs >= waiting.until_ns) return false;
    usleep(static_cast<useconds_t>(kPauseNs / 1000));
  }
}

// One visit. Throws what Endpoint::connect throws, and kPeerLost.
std::string PeerCaller::meet(const std::string& address, const Waiting& waiting) {
  const std::uint64_t meeting = random_incarnation();
  const std::shared_ptr<Link> link = endpoint_.connect(address, waiting, meeting);
  const std::uint64_t incarnation = table_.take_met(link);
  if (incarnation == 0) {
    // A rank answered, which takes this side for a rank as well.
    ranks_.refuse(link, meeting, Error(ErrorCode::kPeerLost, "it was another that was looked for"));
    throw Error(ErrorCode::kArgument, "at " + address + " is a rank of a logical instance: connect to its scheduler");
  }
  meet_ranks(link, address, waiting);
  // Not only by this link: the peer may have called at the same time, and its connection be the one that stays.
  std::string name = table_.name_of(incarnation);
  const std::shared_ptr<Session> session = name.empty() ? nullptr : table_.find(name);
  if (session == nullptr) throw Error(ErrorCode::kPeerLost, "the peer at " + address + " left as soon as it was met");
  session->greet();
  return name;
}

// After two schedulers have met by this link: lets the ranks of both meet. The side that has connected does it; when
// the link that stays is the other's, that one does.
void PeerCaller::meet_ranks(const std::shared_ptr<Link>& link, const std::string& address, const Waiting& waiting) {
  const std::shared_ptr<GroupConnection> group = table_.group_by(link);
  if (group == nullptr) return;
  try {
    group->meet(address, waiting);
  } catch (const Error& error) {
    link->close(error);
    throw;
  }
}

}  // namespace kvpool
