// The rules of the table of peers that need no peer: which id this pool proposes, and when it is fenced.
#include "kvpool/peers/peer_table.h"

#include <doctest/doctest.h>

#include <memory>
#include <optional>

#include "failing_alloc.h"
#include "kvpool/peers/writer_quarantine.h"
#include "pool_fixture.h"
#include "session_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

struct Kit {
  explicit Kit(bool joins = false) : table(*pool, events, book, "pool", 1, joins) {}
  std::optional<ErrorCode> fenced() {
    return code_of([&] { table.check_unfenced(); });
  }
  const std::shared_ptr<Pool> pool = std::make_shared<Pool>(small_options(4, 4));
  PeerEvents events;
  AddressBook book;
  PeerTable table;
};

using Proposal = PeerTable::Proposal;

// The peer of the other call would know this pool by the old id, and addresses from here would carry the new one.
TEST_CASE("an id that a peer has refused stays as it is while another call may tell it") {
  Kit kit;
  std::optional<PeerTable::Call> refused_call(std::in_place, kit.table);
  std::optional<PeerTable::Call> other_call(std::in_place, kit.table);
  const std::uint32_t refused = refused_call->instance();
  CHECK(other_call->instance() == refused);
  refused_call.reset();
  CHECK(kit.table.propose_instead_of(refused) == Proposal::kLater);
  CHECK(kit.table.instance() == refused);
  SUBCASE("the other is refused, too") {
    other_call.reset();
    CHECK(kit.table.propose_instead_of(refused) == Proposal::kChanged);
    const std::uint32_t next = kit.table.instance();
    CHECK(next != refused);
    CHECK(kit.table.propose_instead_of(refused) == Proposal::kChanged);
    CHECK(kit.table.instance() == next);  // one new id does for both
  }
  SUBCASE("the other is let in") {
    kit.pool->accept_instance(refused);
    other_call.reset();
    CHECK(kit.table.propose_instead_of(refused) == Proposal::kNever);
    CHECK(kit.table.instance() == refused);
  }
}

TEST_CASE("an id that callers may have seen is not given up") {
  Kit kit;
  const std::uint32_t proposed = kit.table.instance();
  kit.table.begin_listen();
  CHECK(kit.table.propose_instead_of(proposed) == Proposal::kNever);
  kit.table.end_listen(/*bound=*/true);
  CHECK(kit.table.propose_instead_of(proposed) == Proposal::kNever);
  CHECK(kit.table.instance() == proposed);
}

TEST_CASE("a pool that loses its lease before it has its id stays fenced until it has both") {
  Kit kit(/*joins=*/true);
  CHECK(kit.fenced() == ErrorCode::kFenced);
  SUBCASE("the id comes first") {
    static_cast<void>(kit.table.fence("the lease is lost"));
    kit.table.join(7);
    CHECK(kit.fenced() == ErrorCode::kFenced);
    kit.table.unfence();
  }
  SUBCASE("the lease comes first") {
    static_cast<void>(kit.table.fence("the lease is lost"));
    kit.table.unfence();
    CHECK(kit.fenced() == ErrorCode::kFenced);
    kit.table.join(7);
  }
  SUBCASE("the lease was never lost") { kit.table.join(7); }
  CHECK_FALSE(kit.fenced());
  CHECK(kit.table.instance() == 7);
}

// Sessions with two processes that have come under the same name.
struct Met {
  Met() {
    PeerMetadata metadata = first.session->peer();
    metadata.incarnation += 1;
    metadata.instance += 1;
    second = std::make_shared<Session>(first.host, metadata, true);
    second->start(link, {first.route});
    kit.events.begin();
    kit.table.admit({first.session, first.link, kPeerIncarnation, nullptr}, writer_quarantine);
    first.session->on_closed(Error(ErrorCode::kPeerLost, "the link has ended"));
  }
  ~Met() {
    second->on_closed(Error(ErrorCode::kPeerLost, "the test ends"));
    waits.stop();
    reactor.stop();
  }
  bool knows(std::uint32_t instance) const { return kit.table.lender(instance).has_value(); }
  Kit kit;
  SessionKit first;
  std::shared_ptr<Session> second;
  const std::shared_ptr<ScriptLink> link = std::make_shared<ScriptLink>();
  Reactor reactor{"test"};
  Executor executor;
  SerialExecutor waits{executor, {1, 1}};
  WriterQuarantine writer_quarantine{reactor, waits};
};

TEST_CASE("when memory runs out, a peer is let in, or the one before is still there") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    Met met;
    const bool thrown = fail(
        [&] { met.kit.table.admit({met.second, met.link, kPeerIncarnation + 1, nullptr}, met.writer_quarantine); });
    CHECK(met.kit.table.at("peer").session == (thrown ? met.first.session : met.second));
    CHECK(met.knows(kPeerInstance));
    CHECK(met.knows(kPeerInstance + 1) == !thrown);
    CHECK(met.kit.table.names() == "peer");
  });
  CHECK(threw > 0);
}

TEST_CASE("a lost peer leaves also when memory runs out, and its id is known as that of one who was here") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    Met met;
    fail([&] { met.kit.table.remove(met.first.session); });
    CHECK(met.kit.table.names().empty());
    CHECK(met.knows(kPeerInstance));
  });
  CHECK(threw == 0);
}

TEST_CASE("when memory runs out, a pool is fenced or free as before") {
  for (const bool joins : {false, true}) {
    const int threw = fail_each_allocation([&](auto&& fail) {
      Kit kit(joins);
      const bool fenced = !fail([&] { static_cast<void>(kit.table.fence("the lease of this pool was lost")); });
      const auto text = text_of([&] { kit.table.check_unfenced(); });
      CHECK((text == "the lease of this pool was lost") == fenced);
      CHECK(kit.fenced().has_value() == (fenced || joins));
    });
    CHECK(threw > 0);
    fail_each_allocation([&](auto&& fail) {
      Kit kit(joins);
      static_cast<void>(kit.table.fence("the lease of this pool was lost"));
      const bool freed = !fail([&] { kit.table.unfence(); });
      CHECK(kit.fenced().has_value() == (!freed || joins));
    });
  }
}

}  // namespace
}  // namespace kvpool::testing
