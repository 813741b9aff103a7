#include "kvpool/peers/peer_events.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvpool {

PeerEvents::~PeerEvents() {
  if (event_ >= 0) ::close(event_);
}

int PeerEvents::begin() {
  const std::lock_guard lock(mutex_);
  if (event_ < 0) {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) throw Error(ErrorCode::kState, "no descriptor left to hear of peers with");
    if (closed_) signal();
  }
  keeping_ = true;
  return event_;
}

void PeerEvents::end() noexcept {
  const std::lock_guard lock(mutex_);
  keeping_ = false;
  waiting_.clear();
}

// REQUIRES: mutex_ is held.
void PeerEvents::signal() noexcept {
  if (event_ >= 0) static_cast<void>(eventfd_write(event_, 1));
}

void PeerEvents::push(PeerEvent&& event) noexcept {
  const std::lock_guard lock(mutex_);
  if (!keeping_ || closed_) return;
  const bool full = waiting_.size() >= kWaitingMax;
  if (full && event.kind == PeerEvent::Kind::kRecalled) return;
  if (full && event.kind == PeerEvent::Kind::kLost) {
    const auto unheard = std::find_if(waiting_.begin(), waiting_.end(), [&](const PeerEvent& other) {
      return other.kind == PeerEvent::Kind::kJoined && other.incarnation == event.incarnation;
    });
    if (unheard != waiting_.end()) {
      waiting_.erase(unheard);
      return;
    }
  }
  try {
    waiting_.push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    return;
  }
  signal();
}

std::optional<PeerEvent> PeerEvents::pop() {
  const std::lock_guard lock(mutex_);
  if (waiting_.empty()) {
    if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
    eventfd_t count = 0;
    if (event_ >= 0) static_cast<void>(eventfd_read(event_, &count));
    return std::nullopt;
  }
  PeerEvent event = std::move(waiting_.front());
  waiting_.pop_front();
  return event;
}

void PeerEvents::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  signal();
}

}  // namespace kvpool
