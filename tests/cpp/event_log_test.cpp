// Events reach every reader in order, and a reader that falls behind learns how much it missed.
#include "kvpool/index/event_log.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "failing_alloc.h"

namespace {

using kvpool::Event;
using kvpool::EventKind;
using kvpool::EventLog;
using kvpool::EventQueue;
using kvpool::testing::fail_each_allocation;

std::shared_ptr<const Event> event_of(EventLog& log, std::size_t tokens) {
  auto event = std::make_shared<Event>();
  event->kind = EventKind::kStored;
  event->sequence = log.next_sequence();
  event->tokens.resize(tokens);
  return event;
}

std::vector<std::uint64_t> sequences(const EventQueue::Batch& batch) {
  std::vector<std::uint64_t> out;
  for (const auto& event : batch.events) out.push_back(event->sequence);
  return out;
}

using Sequences = std::vector<std::uint64_t>;

TEST_CASE("every reader receives every event in order") {
  EventLog log;
  const auto a = log.subscribe(1000);
  log.publish(event_of(log, 1));
  const auto b = log.subscribe(1000);
  log.publish(event_of(log, 1));
  log.publish(event_of(log, 1));
  CHECK(sequences(a->drain()) == Sequences{1, 2, 3});
  CHECK(sequences(b->drain()) == Sequences{2, 3});
  CHECK(a->drain().events.empty());
  log.publish(event_of(log, 1));
  CHECK(sequences(a->drain()) == Sequences{4});
}

TEST_CASE("a reader that falls behind loses the oldest events and is told how many") {
  EventLog log;
  const auto reader = log.subscribe(10);
  for (int i = 0; i < 5; ++i) log.publish(event_of(log, 4));
  EventQueue::Batch batch = reader->drain();
  CHECK(sequences(batch) == Sequences{4, 5});
  CHECK(batch.lost == 3);
  for (int i = 0; i < 2; ++i) log.publish(event_of(log, 5));
  batch = reader->drain();
  CHECK(sequences(batch) == Sequences{6, 7});  // the capacity is free again
  CHECK(batch.lost == 0);
}

TEST_CASE("an event larger than the capacity is kept while it is the newest") {
  EventLog log;
  const auto reader = log.subscribe(10);
  log.publish(event_of(log, 1));
  log.publish(event_of(log, 100));
  CHECK(sequences(reader->drain()) == Sequences{2});
  log.publish(event_of(log, 100));
  log.publish(event_of(log, 1));
  const EventQueue::Batch batch = reader->drain();
  CHECK(sequences(batch) == Sequences{4});
  CHECK(batch.lost == 1);
}

TEST_CASE("a subscription ends at once when asked, and with the next event when its reader is gone") {
  EventLog log;
  CHECK_FALSE(log.has_readers());
  auto a = log.subscribe(10);
  auto b = log.subscribe(10);
  log.unsubscribe(a);
  CHECK(log.has_readers());
  log.publish(event_of(log, 1));
  CHECK(a->drain().events.empty());
  CHECK(b->drain().events.size() == 1);
  b.reset();
  log.publish(event_of(log, 1));
  CHECK_FALSE(log.has_readers());
}

TEST_CASE("an event that could not be made counts as lost, with all events before it") {
  EventLog log;
  const auto reader = log.subscribe(10);
  log.publish(event_of(log, 1));
  log.publish(event_of(log, 1));
  log.count_lost();
  log.publish(event_of(log, 1));
  EventQueue::Batch batch = reader->drain();
  CHECK(sequences(batch) == Sequences{3});
  CHECK(batch.lost == 3);
  batch = reader->drain();
  CHECK(batch.lost == 0);
}

TEST_CASE("running out of memory for a reader's queue loses events but never leaves a gap between them") {
  // Enough events that the queue has to grow more than once.
  constexpr std::uint64_t kEvents = 200;
  bool lost_some = false;
  fail_each_allocation([&](auto&& fail) {
    EventLog log;
    const auto reader = log.subscribe(1000);
    std::vector<std::shared_ptr<const Event>> events;
    for (std::uint64_t i = 0; i < kEvents; ++i) events.push_back(event_of(log, 1));
    CHECK_FALSE(fail([&] {
      for (const auto& event : events) log.publish(event);
    }));
    const EventQueue::Batch batch = reader->drain();
    CHECK(batch.lost + batch.events.size() == kEvents);
    for (std::size_t i = 0; i < batch.events.size(); ++i) CHECK(batch.events[i]->sequence == batch.lost + i + 1);
    lost_some = lost_some || batch.lost > 0;
  });
  CHECK(lost_some);
}

TEST_CASE("running out of memory while events are taken out leaves them in place") {
  const int threw = fail_each_allocation([](auto&& fail) {
    EventLog log;
    const auto reader = log.subscribe(2);
    for (int i = 0; i < 3; ++i) log.publish(event_of(log, 1));
    EventQueue::Batch batch;
    const bool thrown = fail([&] { batch = reader->drain(); });
    if (thrown) batch = reader->drain();
    CHECK(sequences(batch) == Sequences{2, 3});
    CHECK(batch.lost == 1);
  });
  CHECK(threw > 0);
}

TEST_CASE("running out of memory while subscribing leaves no reader behind") {
  const int threw = fail_each_allocation([](auto&& fail) {
    EventLog log;
    std::shared_ptr<EventQueue> reader;
    const bool thrown = fail([&] { reader = log.subscribe(10); });
    CHECK(log.has_readers() == !thrown);
  });
  CHECK(threw > 1);
}

}  // namespace
