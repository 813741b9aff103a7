// Work that waits for a thread, and whose comes next: the most urgent, and among equals the peers take turns, so that
// one with much to do costs another no more than the piece that is being done.
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

  // Behind what the same peer has waiting of that priority. `peer` stands for whom it is done; it means nothing else.
  // Throws std::bad_alloc; then it was not added.
  void add(std::uint64_t peer, Priority priority, Work work);
  // What comes next; an empty function when nothing waits.
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
