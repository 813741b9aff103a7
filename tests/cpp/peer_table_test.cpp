// The rules of the table of peers that need no peer: which id this pool proposes, and when it is fenced.
#include "kvpool/peers/peer_table.h"

#include <doctest/doctest.h>

#include <memory>
#include <optional>

#include "pool_fixture.h"
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

}  // namespace
}  // namespace kvpool::testing
