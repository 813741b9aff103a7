// The callers of a listener at one stage of the handshake. Chooses which caller to disconnect when there are too many.
//
// Pure: no socket, no clock, no memory after the constructor. A silent caller holds a descriptor until its handshake
// times out, so a stranger could fill any fixed number of places. Here a new caller always gets a place, at the expense
// of the source that holds the most.
//
// Invariants:
//   J1  size() <= limit.
//   J2  A newcomer gets in. If the queue was full, one caller leaves: the oldest of the source that has the most
//       callers here, the newcomer counted. Among sources with equally many it is the oldest caller.
//   J3  So a source with fewer callers here than another source loses none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvpool {

class CallerQueue {
 public:
  // REQUIRES: limit > 0.
  explicit CallerQueue(std::size_t limit);

  // Returns the caller that must go to make room. REQUIRES: `id` is not here.
  std::optional<std::uint64_t> enter(std::uint64_t id, std::uint64_t source) noexcept;
  // Nothing happens when it is not here.
  void leave(std::uint64_t id) noexcept;
  // The caller that enter() would disconnect if the queue were full. Nothing if the queue is empty.
  std::optional<std::uint64_t> first_to_go() noexcept;
  std::size_t size() const noexcept { return callers_.size(); }

 private:
  struct Caller {
    std::uint64_t id;
    std::uint64_t source;
  };
  struct Count {
    std::uint64_t source;
    std::size_t callers;
  };

  const std::size_t limit_;
  std::vector<Caller> callers_;  // the oldest first
  std::vector<Count> counts_;    // of first_to_go() alone: in order of each source's oldest caller
};

}  // namespace kvpool
