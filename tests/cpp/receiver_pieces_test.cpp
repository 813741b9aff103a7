// Content that arrives for blocks in several pieces of a space: it goes into the pieces of reserved blocks or nowhere.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "session_kit.h"
#include "shared_space_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kUnits = 16;
constexpr std::uint32_t kBlockUnits = 4;  // in two pieces of two

// Three of four units are free, so that each block lies in two pieces, whose numbers may move by one.
struct Comb {
  Comb() {
    const Addresses all = alloc(*small, kUnits);
    Addresses free;
    for (const Address address : all) (block_of(address) % 4 < 3 ? free : held).push_back(address);
    small->free(free.data(), free.size());
  }
  Addresses reserve(std::uint64_t id, std::uint32_t blocks) {
    ReserveBody body = SessionKit::reservation(blocks);
    body.one_sided = false;
    return kit.reserve(id, body);
  }
  void abandon(std::uint64_t id) {
    kit.ask(kAbandonVerb, id);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }

  Space space{kUnits, kUnits, 2};
  std::shared_ptr<Pool> small = space.make_pool(1);
  SessionKit kit{space.make_pool(kBlockUnits, true, 2), /*one_sided=*/false};
  Addresses held;  // of `small`
};

}  // namespace

TEST_CASE("content for a reserved block goes to each of its pieces") {
  Comb comb;
  const Addresses blocks = comb.reserve(5, 2);
  const Placement placement = comb.kit.data(5, blocks);
  std::vector<iovec> wanted;
  for (const Address block : blocks) {
    for (const auto piece : comb.space.pieces_of(*comb.kit.pool, block, kBlockUnits)) {
      wanted.push_back({piece.data(), piece.size()});
    }
  }
  REQUIRE(placement.pieces.size() == 4);
  CHECK(std::ranges::equal(placement.pieces, wanted, [](const iovec& a, const iovec& b) {
    return a.iov_base == b.iov_base && a.iov_len == b.iov_len;
  }));
  comb.kit.session->on_placed(placement.token, true);
}

TEST_CASE("content for a stale block in pieces, or for another number than the reserved one, goes nowhere") {
  Comb comb;
  const Addresses old = comb.reserve(5, 1);
  comb.abandon(5);
  CHECK_FALSE(comb.kit.place(5, old));
  const Addresses moved = alloc(*comb.small, 1);  // the first unit
  const Addresses now = comb.reserve(6, 1);
  REQUIRE(block_of(now[0]) == block_of(old[0]) + 1);  // what is counted by block has one place for the two
  CHECK_FALSE(comb.kit.place(6, old));
  for (std::uint32_t number = 0; number <= kUnits - kBlockUnits; ++number) {
    if (number == block_of(now[0])) continue;
    for (const std::uint32_t generation : {generation_of(now[0]), generation_of(old[0])}) {
      CHECK_FALSE(comb.kit.place(6, {make_address(kOwnInstance, Medium::kHbm, generation, number)}));
    }
  }
  CHECK_FALSE(comb.kit.place(7, now));  // of no transfer that there is
  CHECK_FALSE(comb.kit.place(6, {comb.held[0]}));
  comb.abandon(6);
  CHECK(comb.kit.count(BlockState::kReserved) == 0);
}

}  // namespace kvpool::testing
