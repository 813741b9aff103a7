#include "kvpool/transfer/borrowed.h"

#include <doctest/doctest.h>

#include "kvpool/base/error.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::code_of;

constexpr std::uint32_t kPeer = 9;
Address block(std::uint32_t number, std::uint32_t generation = 4) {
  return make_address(kPeer, Medium::kHbm, generation, number);
}
using Addresses = std::vector<Address>;

TEST_CASE("a borrowed block is written by one transfer at a time, and returned when nobody writes it") {
  BorrowedBlocks blocks("peer", kPeer, {8, 8});
  const Addresses lent{block(1), block(2), make_address(kPeer, Medium::kDram, 1, 0)};
  blocks.add(lent);
  CHECK(blocks.count() == 3);
  blocks.begin_write({&lent[1], 2});
  CHECK(code_of([&] { blocks.begin_write(lent); }) == ErrorCode::kState);
  CHECK(code_of([&] { blocks.remove(lent); }) == ErrorCode::kState);
  blocks.begin_write({&lent[0], 1});  // the refused ones have left no mark
  blocks.end_write(lent);
  blocks.remove(lent);
  CHECK(blocks.count() == 0);
  CHECK(code_of([&] { blocks.remove(lent); }) == ErrorCode::kNotOwner);
}

TEST_CASE("a list that names a block twice, or one that was never lent, is refused") {
  BorrowedBlocks blocks("peer", kPeer, {8, 8});
  CHECK(code_of([&] { blocks.begin_write(Addresses{block(1)}); }) == ErrorCode::kNotOwner);
  blocks.add(Addresses{block(1)});
  CHECK(code_of([&] { blocks.begin_write(Addresses{block(1), block(1)}); }) == ErrorCode::kArgument);
  CHECK(code_of([&] { blocks.begin_write(Addresses{block(2)}); }) == ErrorCode::kNotOwner);
  CHECK(code_of([&] { blocks.begin_write(Addresses{block(1, 3)}); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { blocks.begin_write(Addresses{make_address(kPeer + 1, Medium::kHbm, 4, 1)}); }) ==
        ErrorCode::kNotOwner);
  blocks.begin_write(Addresses{block(1)});  // the refused ones have left no mark
  CHECK(code_of([&] { blocks.begin_write(Addresses{block(1), block(1)}); }) == ErrorCode::kState);
  blocks.drop_written(Addresses{block(1)});
  CHECK(blocks.count() == 0);
}

TEST_CASE("a peer that lends blocks that it does not have, or has lent, breaks the protocol, and nothing is noted") {
  BorrowedBlocks blocks("peer", kPeer, {8, 0});
  blocks.add(Addresses{block(0)});
  for (const Address wrong : {block(0), block(8), make_address(kPeer, Medium::kDram, 4, 0), Address{5},
                              make_address(kPeer + 1, Medium::kHbm, 4, 3)}) {
    CHECK(code_of([&] { blocks.add(Addresses{block(3), wrong}); }) == ErrorCode::kProtocol);
    CHECK(blocks.count() == 1);
    CHECK(code_of([&] { blocks.begin_write(Addresses{block(3)}); }) == ErrorCode::kNotOwner);
  }
  CHECK(code_of([&] { blocks.add(Addresses{block(3), block(3)}); }) == ErrorCode::kProtocol);
  blocks.remove(Addresses{block(0)});
}

}  // namespace
}  // namespace kvpool
