// The changes of cached prompts, as events for readers that keep a copy of the index (routers).
//
// An event carries the whole prefix, so a reader can apply it without other data: `tokens` are all tokens from the
// prompt's start to the end of the pages that changed, and the pages [first_page, tokens / page_tokens) changed.
// A reader that falls behind loses its oldest events and learns how many it lost. It then subscribes again, and begins
// with the current content of the index.
//
// Thread-safety: none; the index's owner locks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/token_run.h"

namespace kvpool {

enum class EventKind : std::uint8_t { kStored, kRemoved, kMoved };

struct Event {
  EventKind kind;
  std::uint64_t sequence;  // grows by one with each event of the index
  std::string name_space;
  std::vector<Token> tokens;
  std::uint32_t first_page;
  std::vector<Address> values;      // of the changed pages: stored, removed, or where they moved to
  std::vector<Address> old_values;  // moved: where they were
};

class EventQueue {
 public:
  explicit EventQueue(std::uint64_t capacity_tokens) : capacity_tokens_(capacity_tokens), room_(capacity_tokens) {}

  // Takes all events, and the number of events that were lost before the first of them. Throws std::bad_alloc and takes
  // nothing.
  struct Batch {
    std::deque<std::shared_ptr<const Event>> events;
    std::uint64_t lost = 0;
  };
  Batch drain() {
    Batch batch;
    batch.events.swap(events_);
    batch.lost = lost_;
    lost_ = 0;
    tokens_ = 0;
    room_ = capacity_tokens_;
    return batch;
  }

  // Adds an initial event, regardless of the capacity. Throws std::bad_alloc.
  void begin_with(std::shared_ptr<const Event> event) {
    const std::uint64_t tokens = event->tokens.size();
    events_.push_back(std::move(event));
    tokens_ += tokens;
    room_ += tokens;
  }

  void push(const std::shared_ptr<const Event>& event) noexcept {
    try {
      events_.push_back(event);
    } catch (const std::bad_alloc&) {
      count_lost();
      return;
    }
    tokens_ += event->tokens.size();
    while (tokens_ > room_ && events_.size() > 1) {
      tokens_ -= events_.front()->tokens.size();
      events_.pop_front();
      ++lost_;
    }
  }
  // Loses one event and all events before it, so that a reader never sees a gap in the middle.
  void count_lost() noexcept {
    lost_ += events_.size() + 1;
    events_.clear();
    tokens_ = 0;
  }

 private:
  std::uint64_t capacity_tokens_;
  std::uint64_t room_;  // the capacity, plus the initial events until they are drained
  std::uint64_t tokens_ = 0;
  std::uint64_t lost_ = 0;
  std::deque<std::shared_ptr<const Event>> events_;
};

// The readers of one index. A reader ends by dropping its queue.
class EventLog {
 public:
  bool has_readers() const noexcept { return !queues_.empty(); }

  std::shared_ptr<EventQueue> subscribe(std::uint64_t capacity_tokens) {
    queues_.reserve(queues_.size() + 1);
    auto queue = std::make_shared<EventQueue>(capacity_tokens);
    queues_.push_back(queue);
    return queue;
  }

  // Ends a subscription at once; without this call, a subscription whose reader is gone ends with the next event.
  void unsubscribe(const std::shared_ptr<EventQueue>& queue) noexcept {
    std::erase_if(queues_, [&](const std::weak_ptr<EventQueue>& own) { return own.lock() == queue; });
  }

  std::uint64_t next_sequence() noexcept { return ++sequence_; }
  std::uint64_t sequence() const noexcept { return sequence_; }  // of the last event

  void publish(const std::shared_ptr<const Event>& event) noexcept {
    for_each_reader([&](EventQueue& queue) { queue.push(event); });
  }
  void count_lost() noexcept {
    for_each_reader([](EventQueue& queue) { queue.count_lost(); });
  }

 private:
  template <class Visit>
  void for_each_reader(Visit&& visit) noexcept {
    std::erase_if(queues_, [&](const std::weak_ptr<EventQueue>& own) {
      const auto queue = own.lock();
      if (queue != nullptr) visit(*queue);
      return queue == nullptr;
    });
  }

  std::uint64_t sequence_ = 0;
  std::vector<std::weak_ptr<EventQueue>> queues_;
};

}  // namespace kvpool
