#include "kvpool/transport/frame_writer.h"

#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "kvpool/base/check.h"
#include "kvpool/transport/reactor.h"
#include "kvpool/transport/sock_pass.h"

namespace kvpool {
namespace {

constexpr std::int64_t kLookNs = 50'000'000;    // how often a thread that waits looks whether it was cancelled
constexpr std::int64_t kFinishNs = 40'000'000;  // a frame that was begun may take so much longer than it was meant to
constexpr std::size_t kFramesAtOnce = 64;       // a writer sends so many for others before it returns
// What one system call takes of a data frame: a quarter, so that the peer reads while the rest is checksummed; no less
// than a call is worth, and no more than stays in a core's cache from the checksum to the copy. Of 4 MiB, calls of 512
// KiB instead of 128 take two thirds of the time.
constexpr std::size_t kCallsPerFrame = 4;
constexpr std::size_t kCallBytesMin = std::size_t{128} << 10;
constexpr std::size_t kCallBytesMax = std::size_t{512} << 10;
constexpr std::size_t kCallPieces = 512;
static_assert(kCallPieces <= IOV_MAX);

// Said before the role is given up: who takes it next would write behind half a frame.
constexpr const char* kTorn = "a frame was given up in its middle";

void check_patience(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  if (cancelled != nullptr && cancelled->load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kCancelled, "cancelled before the data was sent");
  }
  if (monotonic_ns() >= deadline_ns)
    throw Error(ErrorCode::kDeadline, "the peer did not take the data by the deadline");
}

bool is_wanted(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) noexcept {
  return (cancelled == nullptr || !cancelled->load(std::memory_order_acquire)) && monotonic_ns() < deadline_ns;
}

std::int64_t look_ns(std::int64_t deadline_ns) {
  return std::clamp<std::int64_t>(deadline_ns - monotonic_ns(), 0, kLookNs);
}

void poll_room(int fd, std::int64_t until_ns) noexcept {
  pollfd room{fd, POLLOUT, 0};
  const timespec wait{0, look_ns(until_ns)};
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

std::size_t FrameWriter::frame_bytes(const OutFrame& frame) const noexcept {
  return frame.body.size() + (frame.rest ? 0 : sizeof(FrameHeader) + tag_.bytes());
}

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
      role_free_.wait_for(lock, std::chrono::nanoseconds(look_ns(deadline_ns)));
      check_open();
      check_patience(deadline_ns, cancelled);
    }
  } catch (...) {
    --waiting_;
    settle();  // the notification of the last writer may have been for this thread
    throw;
  }
  --waiting_;
  writing_ = true;
}

void FrameWriter::give_up_role() noexcept {
  const std::lock_guard lock(mutex_);
  writing_ = false;
  settle();
}

// Keeps invariant 3. REQUIRES: mutex_ is held.
void FrameWriter::settle() noexcept {
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
  settle();
}

// ---- messages

void FrameWriter::send(const FrameHeader& header, Bytes&& body) {
  std::unique_lock lock(mutex_);
  check_open();
  const std::size_t bytes = sizeof(FrameHeader) + body.size() + kTagBytes;
  if (queued_bytes_ > 0 && queued_bytes_ + bytes > queue_bytes_max_) {
    throw Error(ErrorCode::kBusy,
                "the peer takes messages more slowly than they are sent: " + std::to_string(queued_bytes_) +
                    " bytes wait for it",
                {{"retry_after_us", 1000}});
  }
  if (occupied_locked()) {
    queue_.emplace_back().header = header;
    queue_.back().body = std::move(body);
    queued_bytes_ += bytes;
    return;
  }
  writing_ = true;
  current_ = OutFrame{header, std::move(body)};
  current_is_ = true;
  queued_bytes_ += bytes;
  lock.unlock();
  drain(kFramesAtOnce);
  give_up_role();
  if (broken()) throw_ended();
}

void FrameWriter::flush() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (writing_ || ended_) {
      want_room_(false);  // who writes asks again when it stops
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
        current_ = std::move(queue_.front());
        queue_.pop_front();
        current_is_ = true;
      }
    }
    if (!write_current({})) return false;
  }
  return false;
}

// Returns whether the current frame is through. REQUIRES: the role, and current_is_.
bool FrameWriter::write_current(std::span<const int> descriptors) noexcept {
  seal(current_);
  const std::size_t whole = frame_bytes(current_);
  while (current_.sent < whole) {
    iovec pieces[3];
    std::size_t count = 0;
    std::size_t skip = current_.sent;
    const auto add = [&](const void* data, std::size_t bytes) {
      if (skip < bytes) {
        pieces[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skip, bytes - skip};
        skip = 0;
      } else {
        skip -= bytes;
      }
    };
    if (!current_.rest) add(&current_.header, sizeof(FrameHeader));
    add(current_.body.data(), current_.body.size());
    if (!current_.rest) add(current_.tag.data(), tag_.bytes());
    const ssize_t sent = write_some(pieces, count, current_.sent == 0 ? descriptors : std::span<const int>{});
    if (sent <= 0) return false;
    current_.sent += static_cast<std::size_t>(sent);
  }
  const std::lock_guard lock(mutex_);
  queued_bytes_ -= sizeof(FrameHeader) + current_.body.size() + kTagBytes;
  current_is_ = false;
  current_.body = {};
  return true;
}

void FrameWriter::seal(OutFrame& frame) noexcept {
  if (frame.sealed) return;
  frame.sealed = true;
  frame.header.body_bytes = static_cast<std::uint32_t>(frame.body.size() - frame.header.payload_bytes);
  frame.header.sequence = ++sequence_;
  if (tag_.bytes() == 0) return;
  tag_.begin();
  tag_.update(&frame.header, sizeof(FrameHeader));
  tag_.update(frame.body.data(), frame.body.size());
  frame.tag = tag_.finish();
}

// Returns bytes sent, 0 when the socket is full, -1 when the connection is broken: then the writer has ended.
ssize_t FrameWriter::write_some(iovec* pieces, std::size_t count, std::span<const int> descriptors) noexcept {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
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
    current_ = OutFrame{first, std::move(body)};
    current_is_ = true;
    queued_bytes_ += sizeof(FrameHeader) + current_.body.size() + kTagBytes;
  }
  write_current(descriptors);
  const bool begun = current_.sent > 0;
  // Frames that are queued are sealed when they begin, so all but the first have the new tag.
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
    FrameHeader own = header;
    write_data(own, body, pieces, deadline_ns, cancelled);
  } catch (...) {
    if (torn()) end(kTorn);
    give_up_role();
    throw;
  }
  drain(kFramesAtOnce);
  give_up_role();
}

// Walks header, body, pieces and tag of a data frame.
class FrameWriter::DataCursor {
 public:
  DataCursor(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces, FrameTag& tag)
      : pieces_(pieces),
        tag_(tag),
        tag_left_(tag.bytes() > 0),
        call_bytes_(std::clamp<std::size_t>(header.payload_bytes / kCallsPerFrame, kCallBytesMin, kCallBytesMax)) {
    tag_.begin();
    add(&header, sizeof(header));
    add(body.data(), body.size());
    bytes_ = 0;  // they come on top of what a call takes
  }

  // What to send next; empty at the end of the frame.
  std::span<iovec> batch() {
    if (begin_ < count_) return {batch_ + begin_, count_ - begin_};
    begin_ = count_ = 0;
    bytes_ = 0;
    gather();
    return {batch_, count_};
  }

  void sent(std::size_t bytes) noexcept {
    while (bytes > 0) {
      iovec& piece = batch_[begin_];
      const std::size_t here = std::min(bytes, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + here;
      piece.iov_len -= here;
      bytes -= here;
      if (piece.iov_len == 0) ++begin_;
    }
  }

  // To be called once before the first batch.
  void gather() {
    while (next_ < pieces_.size() && count_ < kCallPieces && bytes_ < call_bytes_) {
      const iovec& piece = pieces_[next_];
      const std::size_t length = std::min(piece.iov_len - offset_, call_bytes_ - bytes_);
      add(static_cast<const std::byte*>(piece.iov_base) + offset_, length);
      offset_ += length;
      if (offset_ == piece.iov_len) {
        ++next_;
        offset_ = 0;
      }
    }
    if (next_ == pieces_.size() && tag_left_) {
      tag_left_ = false;
      bytes_of_tag_ = tag_.finish();
      batch_[count_++] = {bytes_of_tag_.data(), bytes_of_tag_.size()};
    }
  }

 private:
  void add(const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    tag_.update(data, bytes);
    batch_[count_++] = {const_cast<void*>(data), bytes};
    bytes_ += bytes;
  }

  std::span<const iovec> pieces_;
  FrameTag& tag_;
  bool tag_left_;
  const std::size_t call_bytes_;
  Tag bytes_of_tag_{};
  std::size_t next_ = 0;    // the first piece that is not wholly in a batch yet
  std::size_t offset_ = 0;  // bytes of it that are
  iovec batch_[kCallPieces + 3];
  std::size_t begin_ = 0;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;  // of pieces
};

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
  FrameHeader own = header;
  own.sequence = ++sequence_;
  DataCursor cursor(own, body, pieces, tag_);
  cursor.gather();
  for (auto batch = cursor.batch(); !batch.empty(); batch = cursor.batch()) {
    const ssize_t sent = write_some(batch.data(), batch.size(), {});
    if (sent > 0) {
      cursor.sent(static_cast<std::size_t>(sent));
      continue;
    }
    if (sent < 0) break;
    try {
      keep_rest(cursor);
    } catch (...) {
      torn_.store(true, std::memory_order_release);
      end(kTorn);
      give_up_role();
      throw;
    }
    break;
  }
  drain(kFramesAtOnce);
  give_up_role();
  if (broken()) throw_ended();
}

// What a frame that was begun has not sent yet goes first, whenever there is room. REQUIRES: the role, and no current
// frame.
void FrameWriter::keep_rest(DataCursor& cursor) {
  OutFrame frame;
  for (auto batch = cursor.batch(); !batch.empty(); batch = cursor.batch()) {
    for (const iovec piece : batch) {  // a copy: sent() changes it
      const auto* const bytes = static_cast<const std::byte*>(piece.iov_base);
      frame.body.insert(frame.body.end(), bytes, bytes + piece.iov_len);
      cursor.sent(piece.iov_len);
    }
  }
  frame.sealed = frame.rest = true;
  const std::lock_guard lock(mutex_);
  queued_bytes_ += sizeof(FrameHeader) + frame.body.size() + kTagBytes;
  current_ = std::move(frame);
  current_is_ = true;
}

// Half a frame costs the whole link, and everybody else's requests with it. So one that was begun is finished even when
// nobody wants it any more, if the peer takes it within a moment.
//
// REQUIRES: the role, and no current frame.
void FrameWriter::write_data(FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces,
                             std::int64_t deadline_ns, const std::atomic<bool>* cancelled) {
  if (broken()) throw_ended();
  header.sequence = sequence_ + 1;
  DataCursor cursor(header, body, pieces, tag_);
  cursor.gather();
  std::int64_t finish_by_ns = 0;  // set when it is not wanted any more
  for (auto batch = cursor.batch(); !batch.empty(); batch = cursor.batch()) {
    const ssize_t sent = write_some(batch.data(), batch.size(), {});
    if (sent > 0) {
      sequence_ = header.sequence;
      cursor.sent(static_cast<std::size_t>(sent));
      continue;
    }
    const bool begun = sequence_ == header.sequence;
    try {
      if (sent < 0) throw_ended();
      if (!begun) {
        wait_for_room(deadline_ns, cancelled);
        continue;
      }
      if (finish_by_ns == 0 && !is_wanted(deadline_ns, cancelled)) finish_by_ns = monotonic_ns() + kFinishNs;
      if (finish_by_ns != 0) check_patience(finish_by_ns, nullptr);
      poll_room(fd_, finish_by_ns != 0 ? finish_by_ns : deadline_ns);
    } catch (...) {
      if (begun) torn_.store(true, std::memory_order_release);
      throw;
    }
  }
}

void FrameWriter::wait_for_room(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const {
  check_patience(deadline_ns, cancelled);
  poll_room(fd_, deadline_ns);
}

}  // namespace kvpool
