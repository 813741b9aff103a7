#include "kvpool/peers/late_writers.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>

#include <cerrno>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/peers/writer_quarantine.h"

namespace kvpool {
namespace {

constexpr std::int64_t kPlacingNs = 2'000'000'000;

// A new pidfd, because the link's is closed with the link. Invalid if the process has ended (ESRCH), or on an error.
Descriptor process_of(const PeerMetadata& peer, const Link& link) {
  if (link.pidfd() >= 0) return Descriptor::open([&] { return fcntl(link.pidfd(), F_DUPFD_CLOEXEC, 0); });
  return Descriptor::open([&] { return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0)); });
}

}  // namespace

void add_late_writer(const RouteMaker& routes, const std::shared_ptr<DepartingPeer>& party,
                     const std::shared_ptr<Link>& link, std::vector<LateWriter>& late) noexcept {
  LateWriter writer;
  bool may_write = false;
  // A thread of the application may be placing what came over the link.
  if (!wait_until(monotonic_ns() + kPlacingNs, [&] { return party->link_ended(); })) {
    writer.fence = [party] { return party->link_ended(); };
    may_write = true;
  }
  const Exposure exposure = routes.exposure(party->peer(), link);
  if (exposure.until_fence && !RouteMaker::fence(*link)) {
    writer.fence = [party, link] { return party->link_ended() && RouteMaker::fence(*link); };
    may_write = true;
  }
  if ((exposure.by_address && party->awaits_proof()) || exposure.may_hold(party->said_over())) {
    writer.process = process_of(party->peer(), *link);
    const bool ended = !writer.process && errno == ESRCH;
    if (!writer.process && !ended) {
      // No descriptor is left, or a sandbox forbids these. A process that took the number since only makes it later.
      writer.fence = [before = std::move(writer.fence), pid = static_cast<pid_t>(party->peer().pid)] {
        return (!before || before()) && kill(pid, 0) != 0 && errno == ESRCH;
      };
    }
    if (exposure.by_gpu) writer.grace_ns = WriterQuarantine::kGpuGraceNs;
    may_write = may_write || !ended || writer.grace_ns > 0;
  }
  if (may_write) late.push_back(std::move(writer));
}

}  // namespace kvpool
