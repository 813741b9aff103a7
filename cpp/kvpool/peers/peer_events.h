// Peers that came and went, and what they want back, until the application asks.
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
  std::optional<Error> why;  // of one that was lost
  // Of one that wants blocks back which it has lent: these, and when its patience ends. CLOCK_MONOTONIC.
  std::vector<Address> recalled = {};
  std::int64_t deadline_ns = 0;
};

class PeerEvents {
 public:
  PeerEvents() = default;
  ~PeerEvents();
  PeerEvents(const PeerEvents&) = delete;
  PeerEvents& operator=(const PeerEvents&) = delete;

  // So many may wait. Above it, a peer that came and went before anybody heard of it is left out, and so is a recall.
  static constexpr std::size_t kWaitingMax = 4096;

  // Events are kept from now on. Returns a descriptor that is readable while some wait, or nothing more comes; it lives
  // as long as this. Throws kState when the process has no descriptors left.
  int begin();
  void end() noexcept;
  // Drops the event when there is no memory for it.
  void push(PeerEvent&& event) noexcept;
  // Nullopt: none waits. Throws kClosed once closed and empty.
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
