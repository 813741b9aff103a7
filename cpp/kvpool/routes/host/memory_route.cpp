#include "kvpool/routes/host/memory_route.h"

#include <algorithm>
#include <utility>

#include "kvpool/net/reactor.h"
#include "kvpool/routes/host/copy_choice.h"
#include "kvpool/routes/host/host_route.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

// copy_pieces ends with a store fence where it needs one, and a message is a system call: no reader can be told of the
// bytes before it can see them.
class Copier final : public PieceMover {
 public:
  explicit Copier(CopyWay way) noexcept : way_(way) {}
  void move(std::span<const CopyPiece> pieces) override { copy_pieces(pieces, way_); }

 private:
  const CopyWay way_;
};

class MemoryRoute final : public HostRoute {
 public:
  MemoryRoute(const char* name, MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive, CopyTeam& team)
      : HostRoute(std::move(local), std::move(peer), std::move(keepalive), team, kMemoryPrior), name_(name) {
    // Who reads by himself looks for a block by its number.
    if (std::ranges::any_of(peer_, [](const MediumSpan& span) { return span.places != nullptr; })) return;
    using Kept = std::pair<std::shared_ptr<void>, MediaSpans>;
    const auto kept = std::make_shared<Kept>(keepalive_, peer_);
    readable_ = std::shared_ptr<const MediaSpans>(kept, &kept->second);
  }

  const char* name() const noexcept override { return name_; }
  RouteTraits traits() const noexcept override { return {.one_sided = true, .by_caller = true, .waits = false}; }

  std::shared_ptr<const MediaSpans> readable() const noexcept override { return readable_; }

  WriteOutcome write(const WriteRequest& request) override {
    WriteTimer timer(cost_, request);
    const CopyChoice::Pick pick = choice_.pick(strip_bytes(request.strips) * request.from.size());
    Copier copier(pick.way);
    const WriteOutcome outcome = write_in_parts(request, local_, peer_, copier, team_, name_, closed_);
    choice_.took(pick, outcome.bytes, timer.stop(outcome));
    return outcome;
  }

 private:
  const char* const name_;
  std::shared_ptr<const MediaSpans> readable_;
  CopyChoice choice_;
};

}  // namespace

std::unique_ptr<Route> make_loopback_route(MediaSpans local, MediaSpans peer, std::shared_ptr<void> keepalive,
                                           CopyTeam& team) {
  return std::make_unique<MemoryRoute>("loopback", std::move(local), std::move(peer), std::move(keepalive), team);
}

std::unique_ptr<Route> make_shm_route(MediaSpans local, std::shared_ptr<void> keepalive, const PeerMetadata& metadata,
                                      const MediaFiles& files, CopyTeam& team) {
  std::shared_ptr<MappedPeer> peer = MappedPeer::make(metadata, files);
  MediaSpans spans = peer->spans();
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<MappedPeer>>;
  auto both = std::make_shared<Both>(std::move(keepalive), std::move(peer));
  return std::make_unique<MemoryRoute>("shm", std::move(local), std::move(spans), std::move(both), team);
}

}  // namespace kvpool
