// A subscription to an index's events, and how its owner is reached.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>

#include "kvpool/index/event_log.h"

namespace kvpool::bindings {

// Owner is a pool or an index used alone; the subscription keeps it.
struct EventSource {
  std::shared_ptr<EventQueue> queue;
  std::function<EventQueue::Batch(EventQueue&)> drain;
  std::function<void(const std::shared_ptr<EventQueue>&)> unsubscribe;
};

template <class Owner>
EventSource event_source(const std::shared_ptr<Owner>& owner, std::size_t capacity_tokens, bool include_cached) {
  return EventSource{owner->subscribe(capacity_tokens, include_cached),
                     [owner](EventQueue& queue) { return owner->drain(queue); },
                     [owner](const std::shared_ptr<EventQueue>& queue) { owner->unsubscribe(queue); }};
}

}  // namespace kvpool::bindings
