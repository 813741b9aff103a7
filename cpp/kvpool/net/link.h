// An authenticated connection to one incarnation of a peer: messages in order, or an end.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/net/frame.h"
#include "kvpool/net/wire.h"

namespace kvpool {

struct Message {
  FrameKind kind = FrameKind::kDone;
  std::uint8_t flags = 0;
  std::uint64_t id = 0;
  Bytes body;
};

// Where a data frame's payload goes. Checked by the handler; an empty list drops the payload.
struct Placement {
  std::vector<iovec> pieces;  // their lengths add up to the frame's payload_bytes
  std::uint64_t token = 0;    // given back in placed()
};

// What a link tells. Called by the thread that happens to read: the reactor's, or one that waits for an answer. Calls
// of one link never overlap, except closed(), which comes once, last, and from any thread. A handler must not block.
class LinkHandler {
 public:
  virtual ~LinkHandler() = default;
  // Throwing Error kProtocol closes the link.
  virtual void on_message(Message&& message) = 0;
  // A data frame arrived; its body has been read and is authentic, its payload has not.
  virtual Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) = 0;
  // The payload lies where on_data said. Not intact: the sender gave it up, and the link goes on; or its checksum or
  // MAC was wrong, or the link ended within it, and the link closes next. Not called for a payload that was dropped.
  virtual void on_placed(std::uint64_t token, bool intact) = 0;
  virtual void on_closed(const Error& why) = 0;
};

class Link {
 public:
  virtual ~Link() = default;

  // Sends, or queues behind what is being sent; never blocks. Throws Error kPeerLost when the link is closed, kBusy
  // when more than the cap is queued; then nothing was sent. Thread-safe.
  virtual void send(Message&& message) = 0;

  // Sends one data frame from these pieces without copying them, waiting for room on the way. Thread-safe; frames of
  // several threads do not mix, and messages of send() get in between. Throws kPeerLost, kDeadline, kCancelled, and
  // kArgument for a frame of no bytes or too many. The pieces are read no more when it has returned or thrown: what is
  // left of a frame that was begun goes out as zeros, and the peer is told to drop it.
  //
  // From within a call of a handler it never waits, for then nobody would read: of two peers that write to each other
  // so, both would wait for room that neither makes. What does not go at once is copied and queued, and kBusy is thrown
  // as by send().
  virtual void send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                         std::int64_t deadline_ns, const std::atomic<bool>* cancelled) = 0;

  // This thread is in a call of a handler, and others' bytes go first: send_data would only add to what is queued.
  // Whoever can have another thread write had better do so.
  virtual bool would_queue() noexcept { return false; }
  // How long the payload of a data frame should be, so that others need not wait long behind it.
  virtual std::uint64_t payload_bytes_wanted() const noexcept { return kPayloadBytesMax; }

  // Reads and handles what arrives, in this thread, until done() or the deadline; so an answer costs no change of
  // threads. When another thread reads already, waits. `done` is looked at after each frame. Spins for at most 50 us,
  // then sleeps. May be called by several threads; from the reactor's thread, and once on_closed has come, it returns
  // at once. Returns done().
  virtual bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) = 0;
  // Another thread finished what a driver may wait for: its done() is looked at again. Thread-safe.
  virtual void wake() noexcept = 0;

  // The peer's descriptors, received with its metadata; -1 where there is none. Owned by the link.
  virtual int descriptor(std::size_t index) const noexcept = 0;
  // What this side's introduction came with, for whoever admits the peer.
  virtual std::shared_ptr<void> attachment() const { return nullptr; }
  // Readable when the peer's process is gone; -1 where the kernel cannot tell (another host, no pidfd). Owned by the
  // link.
  virtual int pidfd() const noexcept = 0;
  // The peer's process by the kernel's word, as this process would name it; 0 where the kernel does not tell (over TCP,
  // or from another PID namespace).
  virtual std::int64_t process() const noexcept { return 0; }
  // For people: "unix", "tcp 10.0.0.2:4000".
  virtual std::string describe() const = 0;

  // Ends the link; on_closed comes with this error if it has not come before. Idempotent, never blocks.
  virtual void close(const Error& why) noexcept = 0;
};

}  // namespace kvpool
