#include "kvpool/peers/writer_quarantine.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;
constexpr std::int64_t kAskAgainNs = 1'000'000'000;

}  // namespace

void WriterQuarantine::add(const std::shared_ptr<DepartingPeer>& session, const std::shared_ptr<Link>& link,
                           Exposure exposure) {
  // Or has memory open that must not be freed before.
  const bool may_write = session->awaits_proof() || exposure.may_hold(session->said_over());
  if (!may_write && !exposure.until_fence && session->writes_under_way() == 0) return;
  const int proofs = (exposure.by_process ? 1 : 0) + (exposure.until_fence ? 1 : 0);
  Peers added;
  added.push_back({session, link, may_write ? proofs : 0, exposure.until_fence, exposure.by_gpu, 0, nullptr});
  {
    const std::lock_guard lock(mutex_);
    writer_quarantine_.splice(writer_quarantine_.end(), added);
  }
  if (exposure.until_fence) fence(session, link);
  if (may_write && exposure.by_process) watch(session, link);
  if (session->writes_under_way() == 0) on_drained(*session);  // it may have said so before it was here
}

// A transport may be unable to prove now what it can prove soon: while this process was stopped, its time ran out. So
// it is asked until it has.
void WriterQuarantine::fence(const std::shared_ptr<DepartingPeer>& session,
                             const std::shared_ptr<Link>& link) noexcept {
  const auto again = [this, session, link] { fence(session, link); };
  try {
    watches_.run(session.get(), Priority::kBackground, [this, session, link, again] {
      RouteMaker::fence(*link) ? on_proof(*session, /*fenced=*/true) : run_soon(again);
    });
  } catch (const std::exception&) {
    run_soon(again);
  }
}

void WriterQuarantine::watch(const std::shared_ptr<DepartingPeer>& session,
                             const std::shared_ptr<Link>& link) noexcept {
  try {
    link->pidfd() >= 0 ? watch_process(session, link->pidfd()) : find_process(session);
  } catch (const std::exception&) {  // no memory, or too many watches
    run_soon([this, session, link] { watch(session, link); });
  }
}

template <class Work>
void WriterQuarantine::run_soon(const Work& work) noexcept {
  try {
    reactor_.at(monotonic_ns() + kAskAgainNs, work);
  } catch (const std::exception&) {
    // The reactor stops, or memory ran out: no proof, and the blocks stay where they are until the pool closes.
  }
}

// A link over TCP has no pidfd. The peer is on this host and has proved that it knows the secret: its word for its pid
// is good enough. Another process that has the pid by now only delays the proof.
void WriterQuarantine::find_process(const std::shared_ptr<DepartingPeer>& session) {
  const long pidfd = syscall(SYS_pidfd_open, static_cast<pid_t>(session->peer().pid), 0);
  if (pidfd < 0) {
    if (errno == ESRCH) on_exit(session);
    return;
  }
  const auto close_it = [](void* fd) { close(static_cast<int>(reinterpret_cast<std::intptr_t>(fd))); };
  std::shared_ptr<void> owner(reinterpret_cast<void*>(pidfd), close_it);  // NOLINT(performance-no-int-to-ptr)
  {
    const std::lock_guard lock(mutex_);
    for (QuarantinedPeer& quarantined_peer : writer_quarantine_) {
      if (quarantined_peer.session == session) quarantined_peer.process = owner;
    }
  }
  watch_process(session, static_cast<int>(pidfd));
}

void WriterQuarantine::watch_process(const std::shared_ptr<DepartingPeer>& session, int pidfd) {
  const auto noted = std::make_shared<std::atomic<std::uint64_t>>(0);
  const std::uint64_t watch = reactor_.watch(pidfd, [this, session, noted](std::uint32_t events) {
    if ((events & EPOLLIN) == 0) return;  // the reactor stops: no proof
    const std::uint64_t self = noted->load();
    if (self == 0) return;  // not noted yet: it comes again
    reactor_.unwatch(self);
    on_exit(session);
  });
  {
    const std::lock_guard lock(mutex_);
    for (QuarantinedPeer& quarantined_peer : writer_quarantine_) {
      if (quarantined_peer.session != session) continue;
      quarantined_peer.watch = watch;
      return noted->store(watch);
    }
  }
  reactor_.unwatch(watch);  // it has left meanwhile
}

// The process has ended. What a GPU was doing for it the driver stops on the way to that end; when it is known to have
// stopped, nothing says, so it has some time.
void WriterQuarantine::on_exit(const std::shared_ptr<DepartingPeer>& session) {
  bool by_gpu = false;
  {
    const std::lock_guard lock(mutex_);
    for (QuarantinedPeer& quarantined_peer : writer_quarantine_) {
      if (quarantined_peer.session != session) continue;
      by_gpu = quarantined_peer.by_gpu;
      quarantined_peer.watch = 0;
    }
  }
  if (!by_gpu) return on_proof(*session, /*fenced=*/false);
  try {
    reactor_.at(monotonic_ns() + kGpuGraceNs, [this, session] { on_proof(*session, /*fenced=*/false); });
  } catch (const std::exception&) {
    // The reactor stops, or memory ran out: no proof, and the blocks stay where they are until the pool closes.
  }
}

void WriterQuarantine::on_proof(const DepartingPeer& session, bool fenced) noexcept {
  auto proved = take([&](QuarantinedPeer& quarantined_peer) {
    if (quarantined_peer.session.get() != &session) return false;
    if (fenced) {
      quarantined_peer.fencing = false;
    } else {
      quarantined_peer.watch = 0;
    }
    if (quarantined_peer.missing > 0) --quarantined_peer.missing;
    return quarantined_peer.missing == 0 && !quarantined_peer.fencing;
  });
  let_go(std::move(proved));
}

void WriterQuarantine::check_return(std::uint64_t incarnation) const {
  const std::lock_guard lock(mutex_);
  for (const QuarantinedPeer& quarantined_peer : writer_quarantine_) {
    if (quarantined_peer.session->peer().incarnation != incarnation ||
        (quarantined_peer.session->writes_under_way() == 0 && !quarantined_peer.fencing))
      continue;
    throw Error(ErrorCode::kBusy,
                "writes of an earlier connection to " + quarantined_peer.session->peer().name + " are not over",
                {{"retry_after_us", kRetryAfterUs}});
  }
}

bool WriterQuarantine::is_writing_to(std::uint64_t incarnation) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::any_of(writer_quarantine_.begin(), writer_quarantine_.end(),
                     [&](const QuarantinedPeer& quarantined_peer) {
                       return quarantined_peer.session->peer().incarnation == incarnation &&
                              quarantined_peer.session->writes_under_way() > 0;
                     });
}

std::vector<std::string> WriterQuarantine::awaited() const {
  std::vector<std::shared_ptr<DepartingPeer>> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const QuarantinedPeer& quarantined_peer : writer_quarantine_) sessions.push_back(quarantined_peer.session);
  }
  std::vector<std::string> names;
  for (const auto& session : sessions) {
    if (session->awaits_proof()) names.push_back(session->peer().name);
  }
  return names;
}

void WriterQuarantine::on_writer_gone(std::uint64_t incarnation) noexcept {
  let_go(take([&](const QuarantinedPeer& quarantined_peer) {
    return quarantined_peer.session->peer().incarnation == incarnation && !quarantined_peer.fencing;
  }));
}

void WriterQuarantine::on_drained(const DepartingPeer& session) noexcept {
  static_cast<void>(take([&](const QuarantinedPeer& quarantined_peer) {
    return quarantined_peer.session.get() == &session && quarantined_peer.missing == 0 && !quarantined_peer.fencing;
  }));
}

template <class Which>
WriterQuarantine::Peers WriterQuarantine::take(Which&& which) noexcept {
  Peers taken;
  const std::lock_guard lock(mutex_);
  for (auto at = writer_quarantine_.begin(); at != writer_quarantine_.end();) {
    const auto one = at++;
    if (which(*one)) taken.splice(taken.end(), writer_quarantine_, one);
  }
  return taken;
}

void WriterQuarantine::let_go(Peers&& peers) noexcept {
  for (const QuarantinedPeer& quarantined_peer : peers) {
    if (quarantined_peer.watch != 0) reactor_.unwatch(quarantined_peer.watch);
    quarantined_peer.session->on_writer_gone();
  }
}

WriterQuarantine::Peers WriterQuarantine::take_all() noexcept {
  return take([](const QuarantinedPeer&) { return true; });
}

}  // namespace kvpool
