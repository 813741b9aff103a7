#include "kvpool/peers/received_queue.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kRetryAfterUs = 1'000;

std::size_t weight_of(const Received& item) noexcept {
  return item.private_bytes.size() + item.tokens.size() * sizeof(Token);
}

}  // namespace

ReceivedQueue::~ReceivedQueue() {
  if (event_ >= 0) ::close(event_);
}

void ReceivedQueue::check_open_locked(const char* closed) const {
  if (why_failed_) throw Error(*why_failed_);
  if (closed_) throw Error(ErrorCode::kClosed, closed);
}

void ReceivedQueue::reserve(const std::string& peer, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  check_open_locked("the receiving pool is closed");
  const auto known = of_.find(peer);
  check_room_locked(known == of_.end() ? Load{} : known->second, bytes);
  kept_.emplace_back();
  try {
    Load& own = of_[peer];
    for (Load* const load : {&own, &all_}) {
      ++load->items;
      load->bytes += bytes;
    }
  } catch (...) {
    kept_.pop_back();
    throw;
  }
}

// Of what all may have together, or of what is the peer's own.
void ReceivedQueue::check_room_locked(const Load& own, std::size_t bytes) const {
  const auto fits = [bytes](const Load& load, std::size_t items_max, std::size_t bytes_max) {
    return load.items == 0 || (load.items < items_max && load.bytes + bytes <= bytes_max);
  };
  if (fits(all_, capacity_, kBytesMax) || fits(own, capacity_ / kShares, kBytesMax / kShares)) return;
  throw Error(ErrorCode::kBusy,
              std::to_string(all_.items) + " items with " + std::to_string(all_.bytes) +
                  " bytes wait for the receiving application, " + std::to_string(own.items) +
                  " of them from this peer: it does not call receive()",
              {{"limit", capacity_}, {"retry_after_us", kRetryAfterUs}});
}

void ReceivedQueue::let_go_locked(const std::string& peer, std::size_t bytes) noexcept {
  const auto own = of_.find(peer);
  for (Load* const load : {&own->second, &all_}) {
    --load->items;
    load->bytes -= bytes;
  }
  if (own->second.items == 0) of_.erase(own);
}

void ReceivedQueue::unreserve(const std::string& peer, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  kept_.pop_back();
  let_go_locked(peer, bytes);
}

void ReceivedQueue::push(std::unique_ptr<Received> item) noexcept {
  std::shared_ptr<Link> read;
  {
    const std::lock_guard lock(mutex_);
    kept_.front() = std::move(item);
    items_.splice(items_.end(), kept_, kept_.begin());
    waiting_.store(items_.size(), std::memory_order_release);
    if (event_ >= 0) static_cast<void>(eventfd_write(event_, 1));
    read = read_;
  }
  // One thread for an item: a second one would find none.
  if (read != nullptr) {
    read->wake();
  } else {
    arrived_.notify_one();
  }
}

std::unique_ptr<Received> ReceivedQueue::try_pop() {
  if (items_.empty()) return nullptr;
  last_peer_ = items_.front()->peer;
  std::unique_ptr<Received> item = std::move(items_.front());
  items_.pop_front();
  let_go_locked(item->peer, weight_of(*item));
  waiting_.store(items_.size(), std::memory_order_release);
  if (event_ >= 0 && items_.empty() && !ended_locked()) {
    eventfd_t count = 0;
    static_cast<void>(eventfd_read(event_, &count));
  }
  return item;
}

// Until is_ready(), `until_ns`, or the end of the link; returns whether is_ready() was seen. Returns at once if another
// thread reads a link, or no peer is known that may send the next item.
bool ReceivedQueue::read_link(std::int64_t until_ns, const FindLink& find_link) {
  std::unique_lock lock(mutex_);
  if (last_peer_.empty() || read_ != nullptr) return false;
  const std::string peer = last_peer_;
  lock.unlock();
  const std::shared_ptr<Link> link = find_link(peer);
  if (link == nullptr) return false;
  lock.lock();
  if (read_ != nullptr) return false;
  read_ = link;
  lock.unlock();
  const bool ready = link->drive(until_ns, [this] { return is_ready(); });
  lock.lock();
  read_.reset();
  return ready;
}

std::unique_ptr<Received> ReceivedQueue::pop(std::int64_t until_ns, const FindLink& find_link) {
  while (find_link && !is_ready() && monotonic_ns() < until_ns) {
    if (!read_link(until_ns, find_link)) break;
    const std::lock_guard lock(mutex_);
    if (!items_.empty() || ended_locked()) return take_locked();
    // Another thread has taken the item.
  }
  const std::int64_t spin_until = std::min(until_ns, monotonic_ns() + kSpinNs);
  while (!is_ready() && monotonic_ns() < spin_until) {
    sched_yield();  // the reactor, which delivers, may have no other processor
  }
  const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(until_ns)};
  std::unique_lock lock(mutex_);
  arrived_.wait_until(lock, until, [this] { return !items_.empty() || ended_locked(); });
  return take_locked();
}

// Items that came while this thread read a link have woken no other thread.
std::unique_ptr<Received> ReceivedQueue::take_locked() {
  std::unique_ptr<Received> item = try_pop();
  if (item == nullptr) check_open_locked("the pool is closed");
  if (!items_.empty()) arrived_.notify_one();
  return item;
}

int ReceivedQueue::descriptor() {
  const std::lock_guard lock(mutex_);
  if (event_ < 0) {
    event_ = eventfd(static_cast<unsigned>(items_.size()) + (ended_locked() ? 1 : 0), EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) throw Error(ErrorCode::kState, "no descriptor left to wait for what peers send with");
  }
  return event_;
}

// An application that polls the descriptor calls pop(), which throws why nothing more comes.
void ReceivedQueue::end_locked() noexcept {
  ended_.store(true);
  if (event_ >= 0) static_cast<void>(eventfd_write(event_, 1));
  arrived_.notify_all();
}

void ReceivedQueue::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  end_locked();
  const std::shared_ptr<Link> read = read_;
  lock.unlock();
  if (read != nullptr) read->wake();
}

void ReceivedQueue::fail(const Error& why) {
  std::unique_lock lock(mutex_);
  if (why_failed_) return;
  why_failed_ = why;
  end_locked();
  const std::shared_ptr<Link> read = read_;
  lock.unlock();
  if (read != nullptr) read->wake();
}

}  // namespace kvpool
