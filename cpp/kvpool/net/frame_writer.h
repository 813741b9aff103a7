// Frames into a stream socket, from any thread.
//
// One thread at a time has the role of the writer. A message goes out at once when nobody writes and nothing is queued;
// else it is queued, and whoever writes sends it between two frames. What the socket does not take waits in the queue
// for flush(). Only send_data waits; callers that must not wait use send_copy.
//
// Invariants
//   X2  A frame that was begun is finished. One that is not wanted any more (cancelled, or too late) goes on as zeros,
//       and the receiver is told to drop it: so the link goes on, and its sender returns at once. Only a connection
//       that breaks leaves half a frame.
//   X3  The sources of a data frame are read no more when send_data or send_copy has returned or thrown.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/net/frame_cursor.h"
#include "kvpool/net/frame_pace.h"
#include "kvpool/net/frame_tag.h"
#include "kvpool/net/wire.h"

struct iovec;

namespace kvpool {

class FrameWriter {
 public:
  // want_room(bool): whether flush() is to be called once the socket takes bytes. Called with the writer's lock held.
  FrameWriter(int fd, TagKind tag, const Key& key, std::size_t queue_bytes_max, std::function<void(bool)> want_room);

  // As Link::send. Takes the body only when it does not throw. `header`: kind, flags and id count, and payload_bytes:
  // so many at the end of the body are the payload.
  void send(const FrameHeader& header, Bytes&& body);
  // As Link::send_data.
  void send_data(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces,
                 std::int64_t deadline_ns, const std::atomic<bool>* cancelled);
  // The same without waiting: what the socket does not take now is copied and queued. Throws as send(), and
  // std::bad_alloc.
  void send_copy(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces);
  // Whether others' bytes go first.
  bool occupied() noexcept;
  // Sends what is queued, as far as the socket takes it, and not too much at once.
  void flush() noexcept;

  // Queues what is sent, until release() or the end: so `first` comes before it. False when something is being written.
  bool hold();
  // REQUIRES: hold(). Sends `first`, with descriptors, and then what was queued. Throws kPeerLost.
  void release(const FrameHeader& first, Bytes&& body, std::span<const int> descriptors, bool checksum_from_then_on);

  // From now on everything throws kPeerLost; who waits is woken. `text` says why.
  void end(const char* text) noexcept;
  // A system call failed: the connection is broken, and reading will soon tell so, too.
  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }
  // When bytes last went out. CLOCK_MONOTONIC.
  std::int64_t sent_ns() const noexcept { return sent_ns_.load(std::memory_order_relaxed); }
  // How long a payload should be, by what the socket takes.
  std::uint64_t payload_bytes_wanted() const noexcept { return pace_.payload_bytes(); }

 private:
  struct Queued {
    FrameHeader header{};
    Bytes content;  // body, then payload
    std::size_t bytes() const noexcept { return sizeof(FrameHeader) + content.size() + kTagBytes; }
  };

  void check_open() const;
  [[noreturn]] void throw_ended();
  bool queued() const noexcept { return current_is_ || !queue_.empty(); }
  // REQUIRES: mutex_ is held.
  bool occupied_locked() const noexcept { return writing_ || waiting_ > 0 || queued(); }
  void take_role(std::unique_lock<std::mutex>& lock, std::int64_t deadline_ns, const std::atomic<bool>* cancelled);
  void give_up_role() noexcept;
  void settle() noexcept;

  bool drain(std::size_t frames_max) noexcept;
  void begin(Queued&& frame) noexcept;
  void begin_data(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces);
  bool write_current(std::span<const int> descriptors) noexcept;
  void count_sent(std::size_t bytes) noexcept;
  ssize_t write_some(std::span<iovec> pieces, std::span<const int> descriptors) noexcept;
  void wait_for_room(std::int64_t deadline_ns, const std::atomic<bool>* cancelled) const;
  void write_data(std::int64_t deadline_ns, const std::atomic<bool>* cancelled);
  void write_at_once();
  void leave_rest(std::size_t bytes) noexcept;

  const int fd_;
  const std::size_t queue_bytes_max_;
  const std::function<void(bool)> want_room_;

  // Invariants:
  //   1. `writing_`: one thread has the role. It alone uses tag_, sequence_, current_ and pace_, and writes to the
  //      socket. The role is taken and given up under mutex_.
  //   2. Bytes of one frame follow each other: while current_is_, no other frame begins. When nobody has the role, a
  //      frame that was begun is whole, or current_is_.
  //   3. When nobody has the role and something is queued, then a thread that waits for the role has been notified and
  //      has not returned, or want_room(true) was the last that was said.
  std::mutex mutex_;
  std::condition_variable role_free_;
  bool writing_ = false;
  int waiting_ = 0;  // threads that wait for the role to send data
  std::deque<Queued> queue_;
  std::size_t queued_bytes_ = 0;   // of queue_ and current_
  bool current_is_ = false;        // current_ is to be written; changed by the writer, under mutex_
  std::size_t current_bytes_ = 0;  // what current_ has of queued_bytes_
  bool ended_ = false;
  std::string why_ended_;

  FrameTag tag_;
  FrameCursor current_{tag_};
  std::uint64_t sequence_ = 0;  // of the last frame of which a byte was sent
  FramePace pace_;
  std::atomic<bool> broken_{false};
  std::atomic<std::int64_t> sent_ns_{0};
};

}  // namespace kvpool
