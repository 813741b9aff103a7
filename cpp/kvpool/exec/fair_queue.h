// A queue of work for threads. The most urgent work comes first; among equals the peers take turns, so that a peer with
// much work delays another one only by the piece that is being done.
//
// Thread-safety: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <unordered_map>

#include "kvpool/base/priority.h"

namespace kvpool {

class FairQueue {
 public:
  using Work = std::function<void()>;

  // Adds work behind the same peer's work of that priority. `peer` is only an identity: it names the peer for which the
  // work is done. Throws std::bad_alloc; then it was not added.
  void add(std::uint64_t peer, Priority priority, Work work);
  // Takes the next work; returns an empty function when the queue is empty.
  Work take() noexcept;
  std::size_t size() const noexcept { return size_; }

 private:
  struct Queue {
    std::uint64_t peer;
    std::deque<Work> works;  // never empty between calls
  };
  struct Turns {
    std::list<Queue> order;  // whose turn it is, first
    std::unordered_map<std::uint64_t, std::list<Queue>::iterator> of_peer;
  };

  std::array<Turns, 3> turns_;  // by priority
  std::size_t size_ = 0;
};

}  // namespace kvpool
