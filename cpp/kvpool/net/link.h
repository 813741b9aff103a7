// An authenticated connection to one incarnation of a peer. It delivers messages in order until it ends.
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
  FrameKind kind = FrameKind::kAnswer;
  std::uint16_t verb = 0;  // of a call, and of messages about it
  std::uint64_t id = 0;
  Bytes body;
  std::uint32_t lifetime_ms = 0;  // of a call
};

// Where to put a data frame's payload. The handler checks it; an empty list drops the payload.
struct Placement {
  std::vector<iovec> pieces;  // their lengths add up to the frame's payload_bytes
  std::uint64_t token = 0;    // given back in placed()
};

// Receives the events of a link. The thread that reads the link calls it: the reactor's thread, or a thread that waits
// for an answer. Calls for one link never overlap, except closed(), which is called once, last, from any thread. A
// handler must not block.
class LinkHandler {
 public:
  virtual ~LinkHandler() = default;
  // The longest body of a message of this kind. Asked when its header has come, so a longer one ends the link before
  // memory is given to it.
  virtual std::size_t body_bytes_max(FrameKind /*kind*/, std::uint16_t /*verb*/) const noexcept {
    return kBodyBytesMax;
  }
  // Throwing Error kProtocol closes the link.
  virtual void on_message(Message&& message) = 0;
  // A data frame arrived; its body has been read and is authentic, its payload has not.
  virtual Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) = 0;
  // The payload is where on_data put it. `intact` is false when the sender gave the payload up (the link stays open),
  // or when its checksum or MAC was wrong or the link ended within it (the link closes next). Not called for a payload
  // that was dropped.
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
  // Called from within a handler it never waits, because no thread would read the link meanwhile: two peers writing to
  // each other would both wait for room that neither makes. It copies and queues what the socket does not take at once,
  // and throws kBusy as send() does.
  virtual void send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces,
                         std::int64_t deadline_ns, const std::atomic<bool>* cancelled) = 0;

  // True when this thread is within a handler and earlier bytes are waiting: send_data would only add to the queue. A
  // caller that can let another thread write should do so.
  virtual bool would_queue() noexcept { return false; }
  // How many bytes the payload of a data frame should have, so that the frames behind it do not wait long.
  virtual std::uint64_t payload_bytes_wanted() const noexcept { return kPayloadBytesMax; }

  // Reads and handles frames in this thread until done() or the deadline, so that an answer costs no thread switch.
  // Waits while another thread reads. Calls `done` after each frame. Spins for at most 50 us, then sleeps. May be
  // called by several threads; from the reactor's thread, and once on_closed has come, it returns at once. Returns
  // done().
  virtual bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) = 0;
  // Makes every thread in drive() call its done() again, because another thread has changed the result. Thread-safe.
  virtual void wake() noexcept = 0;

  // A descriptor that the peer sent with its metadata; -1 if it sent none with this index. Owned by the link.
  virtual int descriptor(std::size_t index) const noexcept = 0;
  // What this side attached when it sent its metadata. The code that admits the peer reads it.
  virtual std::shared_ptr<void> attachment() const { return nullptr; }
  // Readable when the peer's process is gone; -1 where the kernel cannot tell (another host, no pidfd). Owned by the
  // link.
  virtual int pidfd() const noexcept = 0;
  // The peer's process id in this process's PID namespace, as the kernel reports it; 0 if the kernel does not report it
  // (over TCP, or from another PID namespace).
  virtual std::int64_t process() const noexcept { return 0; }
  // For messages and logs: "unix", "tcp 10.0.0.2:4000".
  virtual std::string describe() const = 0;

  // Ends the link and calls on_closed with this error, unless on_closed was called before. Idempotent, never blocks.
  virtual void close(const Error& why) noexcept = 0;
};

}  // namespace kvpool
