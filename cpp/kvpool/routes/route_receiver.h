// The receiving half of a route in which the receiver takes part: the sender announces content on the link, and a
// thread of this side receives it by other means than the link, into blocks that were checked before.
//
// So content may still be arriving while the link already carries the next messages, or ends. Work that would free
// blocks waits here until nothing is written into them any more: see defer() and close().
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/net/link.h"

namespace kvpool {

// Runs work that may wait for a peer or the GPU, one piece after another for each key. The executor runs all work
// before it ends; later work runs in the caller's thread. Throws std::bad_alloc; then the work does not run.
using RouteRun = std::function<void(const void* key, std::function<void()> work)>;

class RouteReceiver {
 public:
  // As LinkHandler::on_data and on_placed: returns where content of transfer `id` goes; is told that it has arrived, or
  // never will.
  using Admit = std::function<Placement(std::uint64_t id, std::span<const std::byte> body, std::uint64_t bytes)>;
  using Placed = std::function<void(std::uint64_t token, bool intact)>;
  // Called when the GPU of this side is lost, with all memory on it.
  using Lost = std::function<void(const Error& why)>;

  virtual ~RouteReceiver() = default;
  // Before the first message.
  virtual void begin(Admit admit, Placed placed, Lost lost) = 0;
  void begin(Admit admit, Placed placed) {
    begin(std::move(admit), std::move(placed), [](const Error&) {});
  }
  // Of the kinds for which takes() is true; called as LinkHandler::on_message. Throws Error kProtocol.
  virtual void on_message(Message&& message) = 0;
  static bool takes(FrameKind kind) noexcept {
    return kind == FrameKind::kChannel || kind == FrameKind::kPass || kind == FrameKind::kHalt ||
           kind == FrameKind::kPassed;
  }

  // Runs the work once all content announced so far has arrived, or was given up and is no longer written. If that is
  // so already, returns false without taking the work, and the caller runs it.
  virtual bool defer(std::function<void()>& work) = 0;
  // Call when the link has ended. Gives up what is arriving, then calls `on_closed` once, perhaps before it returns;
  // from then on the peer writes nothing here.
  virtual void close(std::function<void()> on_closed) noexcept = 0;
};

}  // namespace kvpool
