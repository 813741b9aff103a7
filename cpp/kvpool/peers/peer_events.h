// A queue for the application: peers that joined and were lost, and their recalls.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {

struct PeerEvent {
  enum class Kind : std::uint8_t { kJoined, kLost, kRecalled };
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  Kind kind = Kind::kJoined;
  std::optional<Error> why;  // why the peer was lost
  // Of a recall: the lent blocks that the peer wants back, and the deadline (CLOCK_MONOTONIC).
  std::vector<Address> recalled = {};
  std::int64_t deadline_ns = 0;
};

class PeerEvents {
 public:
  PeerEvents() = default;
  ~PeerEvents();
  PeerEvents(const PeerEvents&) = delete;
  PeerEvents& operator=(const PeerEvents&) = delete;

  // How many events may wait. Above that, drops recalls, and peers that joined and were lost before the application
  // learned of them.
  static constexpr std::size_t kWaitingMax = 4096;

  // Keeps events from now on. Returns a descriptor that is readable while events wait, or after the last one; it lives
  // as long as this object. Throws kState when the process has no descriptors left.
  int begin();
  void end() noexcept;
  // Drops the event if there is no memory for it.
  void push(PeerEvent&& event) noexcept;
  // The next event; nullopt if none waits. Throws kClosed once closed and empty.
  std::optional<PeerEvent> pop();
  void close() noexcept;

 private:
  void signal() noexcept;

  std::mutex mutex_;
  std::deque<PeerEvent> waiting_;
  int event_ = -1;
  bool keeping_ = false;
  bool closed_ = false;
};

}  // namespace kvpool
