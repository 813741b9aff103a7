#include "kvpool/net/keepalive.h"

#include <algorithm>
#include <string>

#include "kvpool/base/clock.h"

namespace kvpool {

void LinkKeepalive::add(const std::shared_ptr<SockLink>& link) {
  const std::lock_guard lock(mutex_);
  links_.push_back(link);
  if (!ticking_) tick_at(monotonic_ns() + lease_ns_ / 3);
}

// REQUIRES: mutex_ is held.
void LinkKeepalive::tick_at(std::int64_t at_ns) {
  reactor_.at(at_ns, [self = shared_from_this()] { self->tick(); });
  ticking_ = true;
}

void LinkKeepalive::tick() noexcept {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = monotonic_ns();
  std::int64_t next = now + lease_ns_ / 3;
  for (std::size_t i = 0; i < links_.size();) {
    const std::shared_ptr<SockLink> link = links_[i].lock();
    if (!link || link->closing()) {
      std::swap(links_[i], links_.back());
      links_.pop_back();
      continue;
    }
    next = std::min(next, look_at(*link, now));
    ++i;
  }
  ticking_ = false;
  if (links_.empty()) return;
  try {
    tick_at(next);
  } catch (...) {
    // The reactor has stopped, and its links with it; or there is no memory, and the next link starts it again.
  }
}

// Returns when the link is lost if nothing comes.
std::int64_t LinkKeepalive::look_at(SockLink& link, std::int64_t now) noexcept {
  const std::int64_t silent = now - link.heard_ns();
  if (silent >= lease_ns_) {
    const std::int64_t ms = silent / 1'000'000;
    try {
      link.close(
          Error(ErrorCode::kPeerLost, "the peer was silent for " + std::to_string(ms) + " ms", {{"silent_ms", ms}}));
    } catch (...) {
      return now + lease_ns_ / 3;  // no memory for the text: next time
    }
    return INT64_MAX;
  }
  if (link.half_broken()) {
    try {
      link.close(Error(ErrorCode::kPeerLost, "the connection broke"));
    } catch (...) {
      return now + lease_ns_ / 3;
    }
    return INT64_MAX;
  }
  // Less than the time between two checks, so that a ping is never late; more than half of it, so that one side's ping
  // and its answer serve both.
  const std::int64_t quiet_ns = lease_ns_ / 4;
  if (silent >= quiet_ns || now - link.sent_ns() >= quiet_ns) link.ping();
  return link.heard_ns() + lease_ns_;
}

}  // namespace kvpool
