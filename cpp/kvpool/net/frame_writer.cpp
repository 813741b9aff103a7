#include "kvpool/net/frame_writer.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

constexpr std::int64_t kCancelPollNs = 50'000'000;  // how often a waiting thread checks whether it was cancelled
constexpr std::size_t kFramesAtOnce = 64;           // a writer sends so many for others before it returns

void check_patience(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  if (cancelled != nullptr && cancelled->load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kCancelled, "cancelled before the data was sent");
  }
  if (monotonic_ns() >= deadline_ns)
    throw Error(ErrorCode::kDeadline, "the peer did not take the data by the deadline");
}

std::int64_t poll_ns(std::int64_t deadline_ns) {
  return std::clamp<std::int64_t>(deadline_ns - monotonic_ns(), 0, kCancelPollNs);
}

void poll_room(int fd, std::int64_t until_ns) noexcept {
  pollfd room{fd, POLLOUT, 0};
  const timespec wait{0, poll_ns(until_ns)};
  ppoll(&room, 1, &wait, nullptr);
}

}  // namespace

FrameWriter::FrameWriter(int fd, TagKind tag, const Key& key, std::size_t queue_bytes_max,
                         std::function<void(bool)> want_room)
    : fd_(fd),
      queue_bytes_max_(queue_bytes_max),
      want_room_(std::move(want_room)),
      tag_(tag, key),
      sent_ns_(monotonic_ns()) {}

// REQUIRES: mutex_ is held.
void FrameWriter::check_open() const {
  if (ended_) throw Error(ErrorCode::kPeerLost, "the link is closed: " + why_ended_);
}

void FrameWriter::throw_ended() {
  const std::lock_guard lock(mutex_);
  check_open();
  throw Error(ErrorCode::kPeerLost, "the connection broke");
}

// ---- the role

// REQUIRES: `lock` holds mutex_; so it does afterwards.
void FrameWriter::take_role(std::unique_lock<std::mutex>& lock, std::int64_t deadline_ns,
                            const std::atomic<bool>* cancelled) {
  check_open();
  check_patience(deadline_ns, cancelled);
  if (!writing_) {
    writing_ = true;
    return;
  }
  ++waiting_;
  try {
    while (writing_) {
      role_free_.wait_for(lock, std::chrono::nanoseconds(poll_ns(deadline_ns)));
      check_open();
      check_patience(deadline_ns, cancelled);
    }
  } catch (...) {
    --waiting_;
    hand_over_role();  // the notification of the last writer may have been for this thread
    throw;
  }
  --waiting_;
  writing_ = true;
}

void FrameWriter::give_up_role() noexcept {
  const std::lock_guard lock(mutex_);
  writing_ = false;
  hand_over_role();
}

// Keeps invariant 3. REQUIRES: mutex_ is held.
void FrameWriter::hand_over_role() noexcept {
  if (writing_) return;
  if (waiting_ > 0) {
    role_free_.notify_one();
  } else {
    want_room_(queued() && !ended_);
  }
}

void FrameWriter::end(const char* text) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  ended_ = true;
  try {
    why_ended_ = text;
  } catch (...) {
    // Then it has no reason to tell.
  }
  queue_.clear();
  role_free_.notify_all();
  hand_over_role();
}

// ---- messages

void FrameWriter::send(const FrameHeader& header, Bytes&& body) {
  std::unique_lock lock(mutex_);
  check_open();
  Queued frame{header, {}};
  const std::size_t bytes = frame.bytes() + body.size();
  if (queued_bytes_ > 0 && queued_bytes_ + bytes > queue_bytes_max_) {
    throw Error(ErrorCode::kBusy,
                "the peer takes messages more slowly than they are sent: " + std::to_string(queued_bytes_) +
                    " bytes wait for it",
                {{"retry_after_us", 1000}});
  }
  if (occupied_locked()) {
    queue_.push_back(std::move(frame));
    queue_.back().content = std::move(body);
    queued_bytes_ += bytes;
    return;
  }
  writing_ = true;
  frame.content = std::move(body);
  queued_bytes_ += bytes;
  begin(std::move(frame));
  lock.unlock();
  drain(kFramesAtOnce);
  give_up_role();
  if (broken()) throw_ended();
}

void FrameWriter::flush() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (writing_ || ended_) {
      want_room_(false);  // the writing thread asks again when it stops
      return;
    }
    writing_ = true;
  }
  drain(kFramesAtOnce);
  give_up_role();
}

bool FrameWriter::occupied() noexcept {
  const std::lock_guard lock(mutex_);
  return occupied_locked();
}

// Sends what is queued, until the socket is full or so many frames are through. Returns whether nothing is left.
// REQUIRES: the role.
bool FrameWriter::drain(std::size_t frames_max) noexcept {
  for (std::size_t frames = 0; frames < frames_max; ++frames) {
    {
      const std::lock_guard lock(mutex_);
      if (!current_is_) {
        if (queue_.empty()) return true;
        begin(std::move(queue_.front()));
        queue_.pop_front();
      }
    }
    if (!write_current({})) return false;
  }
  return false;
}

// Makes it the current frame. It gets its number and its tag now: frames are numbered in the order in which they go
// out. REQUIRES: the role, mutex_, and no current frame; its bytes are counted.
void FrameWriter::begin(Queued&& frame) noexcept {
  current_bytes_ = frame.bytes();
  frame.header.sequence = sequence_ + 1;
  current_.begin(frame.header, std::move(frame.content));
  current_is_ = true;
}

// Returns whether the current frame is through. REQUIRES: the role, and current_is_.
bool FrameWriter::write_current(std::span<const int> descriptors) noexcept {
  for (auto batch = current_.batch(); !batch.empty(); batch = current_.batch()) {
    const ssize_t sent = write_some(batch, current_.bytes_sent() == 0 ? descriptors : std::span<const int>{});
    if (sent <= 0) return false;
    count_sent(static_cast<std::size_t>(sent));
  }
  current_.forget();
  const std::lock_guard lock(mutex_);
  queued_bytes_ -= std::exchange(current_bytes_, 0);
  current_is_ = false;
  return true;
}

void FrameWriter::count_sent(std::size_t bytes) noexcept {
  if (current_.bytes_sent() == 0) ++sequence_;
  current_.sent(bytes);
}

// Returns bytes sent, 0 when the socket is full, -1 when the connection is broken: then the writer has ended.
ssize_t FrameWriter::write_some(std::span<iovec> pieces, std::span<const int> descriptors) noexcept {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  while (true) {
    const ssize_t sent = send_with_descriptors(fd_, message, descriptors);
    if (sent > 0) {
      sent_ns_.store(monotonic_ns(), std::memory_order_relaxed);
      return sent;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent == 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return 0;
    broken_.store(true, std::memory_order_release);
    end("the connection broke");
    return -1;
  }
}

// ---- while peers meet

bool FrameWriter::hold() {
  const std::lock_guard lock(mutex_);
  check_open();
  if (writing_ || queued()) return false;
  writing_ = true;
  return true;
}

void FrameWriter::release(const FrameHeader& first, Bytes&& body, std::span<const int> descriptors,
                          bool checksum_from_then_on) {
  {
    const std::lock_guard lock(mutex_);
    Queued frame{first, std::move(body)};
    queued_bytes_ += frame.bytes();
    begin(std::move(frame));
  }
  write_current(descriptors);
  const bool begun = current_.bytes_sent() > 0;
  // Frames get their tag when they begin, so all but the first have the new one.
  if (checksum_from_then_on) tag_.use_checksum();
  if (begun) drain(kFramesAtOnce);
  give_up_role();
  // The socket of two that have only just met takes the first byte, and with it the descriptors.
  if (!begun) throw Error(ErrorCode::kPeerLost, "the connection took no bytes while the peers met");
}

// ---- data

void FrameWriter::send_data(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces,
                            std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  std::size_t ahead = 0;
  {
    std::unique_lock lock(mutex_);
    take_role(lock, deadline_ns, cancelled);
    ahead = queue_.size() + (current_is_ ? 1 : 0);
  }
  try {
    // What was there before goes first; what comes meanwhile must not keep the data back for ever.
    for (; ahead > 0 && !drain(1); --ahead) {
      while (current_is_ && !broken()) {
        wait_for_room(deadline_ns, cancelled);
        write_current({});
      }
    }
    if (broken()) throw_ended();
    begin_data(header, body, pieces);
    write_data(deadline_ns, cancelled);
  } catch (...) {
    give_up_role();
    throw;
  }
  drain(kFramesAtOnce);
  give_up_role();
}

// Makes it the frame of current_, though not yet one that others would finish: until a byte of it was sent, it can be
// forgotten. REQUIRES: the role, and no current frame.
void FrameWriter::begin_data(const FrameHeader& header, std::span<const std::byte> body,
                             std::span<const iovec> pieces) {
  FrameHeader own = header;
  own.sequence = sequence_ + 1;
  current_.begin(own, Bytes(body.begin(), body.end()), pieces);
}

// Writes what begin_data() began. Throws what ends it early; a frame of which a byte was sent is given up then.
void FrameWriter::write_data(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  const std::int64_t began_ns = monotonic_ns();
  const auto measured = [&] { pace_.measured(current_.bytes_sent(), monotonic_ns() - began_ns); };
  try {
    for (auto batch = current_.batch(); !batch.empty(); batch = current_.batch()) {
      const ssize_t sent = write_some(batch, {});
      if (sent < 0) throw_ended();
      if (sent == 0) {
        wait_for_room(deadline_ns, cancelled);
        continue;
      }
      count_sent(static_cast<std::size_t>(sent));
    }
  } catch (...) {
    measured();
    if (current_.bytes_sent() > 0) {
      current_.give_up();
      leave_rest(0);
    }
    throw;
  }
  measured();
}

// What is left of the frame that was begun goes first, whenever there is room. `bytes`: what it keeps in memory.
// REQUIRES: the role, and no current frame.
void FrameWriter::leave_rest(std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  queued_bytes_ += bytes;
  current_bytes_ = bytes;
  current_is_ = true;
}

void FrameWriter::send_copy(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces) {
  bool at_once = false;
  {
    const std::lock_guard lock(mutex_);
    check_open();
    at_once = !occupied_locked();
    if (at_once) writing_ = true;
  }
  if (!at_once) {
    Bytes content;
    content.reserve(body.size() + header.payload_bytes);
    content.insert(content.end(), body.begin(), body.end());
    for (const iovec& piece : pieces) {
      const auto* const bytes = static_cast<const std::byte*>(piece.iov_base);
      content.insert(content.end(), bytes, bytes + piece.iov_len);
    }
    return send(header, std::move(content));
  }
  try {
    begin_data(header, body, pieces);
    write_at_once();
  } catch (...) {
    give_up_role();
    throw;
  }
  drain(kFramesAtOnce);
  give_up_role();
  if (broken()) throw_ended();
}

// Writes what begin_data() began as far as the socket takes it, and keeps a copy of the rest. Without memory for that
// the frame is given up.
void FrameWriter::write_at_once() {
  for (auto batch = current_.batch(); !batch.empty(); batch = current_.batch()) {
    const ssize_t sent = write_some(batch, {});
    if (sent < 0) return;
    if (sent > 0) {
      count_sent(static_cast<std::size_t>(sent));
      continue;
    }
    try {
      leave_rest(current_.copy_rest());
    } catch (...) {
      if (current_.bytes_sent() > 0) {
        current_.give_up();
        leave_rest(0);
      }
      throw;
    }
    return;
  }
}

void FrameWriter::wait_for_room(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const {
  check_patience(deadline_ns, cancelled);
  poll_room(fd_, deadline_ns);
}

}  // namespace kvpool
