// Writes frames to a stream socket, from any thread.
//
// One thread at a time has the role of the writer. A message is sent at once if no thread has the role and nothing is
// queued; otherwise it is queued, and the thread that has the role sends it between two frames. What the socket does
// not take stays queued for flush(). Only send_data waits; callers that must not wait use send_copy.
//
// Invariants
//   X2  A frame that was begun is finished. If it is no longer wanted (cancelled, or too late), the writer fills it up
//       with zeros and tells the receiver to drop it, so the link stays usable and the sender returns at once. Only a
//       broken connection leaves half a frame.
//   X3  After send_data or send_copy has returned or thrown, the writer no longer reads the sources of the data frame.
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

  // As Link::send. Takes the body only when it does not throw. `header`: all but sequence and body_bytes counts;
  // payload_bytes: the length of the payload at the end of the body.
  void send(const FrameHeader& header, Bytes&& body);
  // As Link::send_data.
  void send_data(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces,
                 std::int64_t deadline_ns, const std::atomic<bool>* cancelled);
  // The same without waiting: copies and queues what the socket does not take now. Throws as send(), and
  // std::bad_alloc.
  void send_copy(const FrameHeader& header, std::span<const std::byte> body, std::span<const iovec> pieces);
  // Whether earlier bytes are still to be sent.
  bool occupied() noexcept;
  // Sends queued bytes until the socket takes no more, and only a limited amount per call.
  void flush() noexcept;

  // Until release() or the end of the link, messages are only queued, so that `first` goes out before them. Returns
  // false if a thread is writing.
  bool hold();
  // REQUIRES: hold(). Sends `first`, with descriptors, and then what was queued. Throws kPeerLost.
  void release(const FrameHeader& first, Bytes&& body, std::span<const int> descriptors, bool checksum_from_then_on);

  // From now on every call throws kPeerLost, and waiting threads are woken. `text` is the reason.
  void end(const char* text) noexcept;
  // Whether a system call failed. The connection is broken then, and the reader will soon notice it, too.
  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }
  // When bytes last went out. CLOCK_MONOTONIC.
  std::int64_t sent_ns() const noexcept { return sent_ns_.load(std::memory_order_relaxed); }
  // How many bytes a payload should have, by the measured speed of the socket.
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
  void hand_over_role() noexcept;

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
  //   2. The bytes of one frame are contiguous on the wire: while current_is_, no other frame begins. When no thread
  //      has the role, every frame that was begun is complete, or current_is_.
  //   3. When no thread has the role and something is queued, a thread that waits for the role has been notified and
  //      has not returned, or the last call of want_room() was want_room(true).
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
