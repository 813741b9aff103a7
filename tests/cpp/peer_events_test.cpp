#include "kvpool/peers/peer_events.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <string>

namespace kvpool {
namespace {

bool readable(int descriptor) {
  pollfd watched{descriptor, POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

using Kind = PeerEvent::Kind;

PeerEvent event(const std::string& name, std::uint64_t incarnation, bool joined) {
  return {name, 1, incarnation, joined ? Kind::kJoined : Kind::kLost, {}};
}

TEST_CASE("events are kept, in order, while someone listens") {
  PeerEvents events;
  events.push(event("early", 1, true));
  const int descriptor = events.begin();
  CHECK_FALSE(readable(descriptor));
  CHECK_FALSE(events.pop().has_value());
  events.push(event("a", 2, true));
  events.push(event("a", 2, false));
  CHECK(readable(descriptor));
  CHECK(events.pop()->kind == Kind::kJoined);
  CHECK(events.pop()->kind == Kind::kLost);
  CHECK_FALSE(events.pop().has_value());
  CHECK_FALSE(readable(descriptor));
  events.push(event("b", 3, true));
  events.end();
  CHECK_FALSE(events.pop().has_value());
  events.push(event("c", 4, true));
  CHECK(events.begin() == descriptor);
  CHECK_FALSE(events.pop().has_value());
}

TEST_CASE("pending events can be read after the end, and then the end is reported") {
  PeerEvents events;
  const int descriptor = events.begin();
  events.push(event("a", 2, true));
  events.close();
  events.push(event("b", 3, true));
  CHECK(readable(descriptor));
  CHECK(events.pop()->name == "a");
  CHECK(readable(descriptor));
  CHECK_THROWS_AS(events.pop(), Error);
}

TEST_CASE("recalls arrive in order, and are dropped when too many are pending") {
  PeerEvents events;
  events.begin();
  const PeerEvent recall{"a", 1, 2, Kind::kRecalled, {}, {5, 6}, 77};
  events.push(PeerEvent(recall));
  const auto heard = events.pop();
  REQUIRE(heard.has_value());
  CHECK(heard->kind == Kind::kRecalled);
  CHECK(heard->recalled == std::vector<Address>{5, 6});
  CHECK(heard->deadline_ns == 77);
  for (std::size_t i = 0; i < PeerEvents::kWaitingMax; ++i) events.push(event("a", 2, true));
  events.push(PeerEvent(recall));
  for (std::size_t i = 0; i < PeerEvents::kWaitingMax; ++i) CHECK(events.pop()->kind == Kind::kJoined);
  CHECK_FALSE(events.pop().has_value());
}

TEST_CASE("peers that come and go unnoticed do not pile up, and no reported peer is lost silently") {
  PeerEvents events;
  events.begin();
  events.push(event("heard", 1, true));
  CHECK(events.pop()->name == "heard");
  for (std::uint64_t incarnation = 2; incarnation < 3 * PeerEvents::kWaitingMax; ++incarnation) {
    events.push(event("flaps", incarnation, true));
    events.push(event("flaps", incarnation, false));
  }
  events.push(event("heard", 1, false));
  std::size_t waiting = 0;
  std::string last;
  while (const auto next = events.pop()) {
    ++waiting;
    last = next->name;
  }
  CHECK(waiting <= PeerEvents::kWaitingMax + 2);
  CHECK(last == "heard");
}

}  // namespace
}  // namespace kvpool
