// The rules of the table of peers that need no peer: which id this pool proposes.
#include "kvpool/peers/peer_table.h"

#include <doctest/doctest.h>

#include <memory>
#include <optional>

#include "pool_fixture.h"

namespace kvpool::testing {
namespace {

struct Kit {
  const std::shared_ptr<Pool> pool = std::make_shared<Pool>(small_options(4, 4));
  PeerEvents events;
  AddressBook book;
  PeerTable table{*pool, events, book, "pool", 1, /*joins=*/false};
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

}  // namespace
}  // namespace kvpool::testing
