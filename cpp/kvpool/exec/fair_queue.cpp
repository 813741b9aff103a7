#include "kvpool/exec/fair_queue.h"

#include <utility>

namespace kvpool {

void FairQueue::add(std::uint64_t peer, Priority priority, Work work) {
  Turns& turns = turns_[static_cast<std::size_t>(priority)];
  if (const auto known = turns.of_peer.find(peer); known != turns.of_peer.end()) {
    known->second->works.push_back(std::move(work));
  } else {
    std::list<Queue> added;
    added.push_back({peer, {}});
    added.front().works.push_back(std::move(work));
    turns.of_peer.emplace(peer, added.begin());
    turns.order.splice(turns.order.end(), added);
  }
  ++size_;
}

// Who has more to do goes to the end, as does who comes again.
FairQueue::Work FairQueue::take() noexcept {
  for (Turns& turns : turns_) {
    if (turns.order.empty()) continue;
    Queue& queue = turns.order.front();
    Work work = std::move(queue.works.front());
    queue.works.pop_front();
    if (queue.works.empty()) {
      turns.of_peer.erase(queue.peer);
      turns.order.pop_front();
    } else {
      turns.order.splice(turns.order.end(), turns.order, turns.order.begin());
    }
    --size_;
    return work;
  }
  return {};
}

}  // namespace kvpool
