#include "kvpool/ranks/rank_messages.h"

#include <doctest/doctest.h>

#include <cstring>

#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "kvpool/transfer/messages.h"
#include "message_length.h"

namespace kvpool {
namespace {

using testing::check_length;

OrderBody some_order() {
  OrderBody body;
  body.meeting = 77;
  body.merge = false;
  body.lifetime_ms = 1234;
  body.channels = {{2, 96, {{0, 64, 32}, {64, 0, 64}}}, {5, 8, {{96, 8, 8}}}};
  body.from = {1, 2, 3};
  body.to = {4, 5, 6};
  return body;
}

TEST_CASE("a scheduler's messages to its ranks are read as they were written, and with no other length") {
  const MeetBody meet{9, "peer", 300, {{0, 11, "unix:@a"}, {3, 12, "tcp:[::1]:80"}}};
  const MeetBody met = read_meet(write_body(meet));
  CHECK(met.meeting == 9);
  CHECK(met.peer == "peer");
  CHECK(met.lifetime_ms == 300);
  REQUIRE(met.ranks.size() == 2);
  CHECK(met.ranks[1].rank == 3);
  CHECK(met.ranks[1].incarnation == 12);
  CHECK(met.ranks[1].address == "tcp:[::1]:80");
  check_length(write_body(meet), read_meet);

  const OrderBody order = read_order(write_body(some_order()));
  CHECK(order.meeting == 77);
  CHECK_FALSE(order.merge);
  CHECK(order.lifetime_ms == 1234);
  REQUIRE(order.channels.size() == 2);
  CHECK(order.channels[0].to_rank == 2);
  CHECK(order.channels[0].bytes == 96);  // added up by the reader
  CHECK(order.channels[1].strips[0].from == 96);
  CHECK(order.from == some_order().from);
  CHECK(order.to == some_order().to);
  check_length(write_body(some_order()), read_order);

  CHECK(read_report(write_body(ReportBody{3, 1ULL << 40})).bytes == 1ULL << 40);
  check_length(write_body(ReportBody{3, 4}), read_report);
  CHECK(read_depart(write_body(DepartBody{8})).meeting == 8);
  check_length(write_body(DepartBody{8}), read_depart);
  CHECK(read_copy(write_body(CopyBody{{1, 2}, {3, 4}})).to == std::vector<Address>{3, 4});
  check_length(write_body(CopyBody{{1, 2}, {3, 4}}), read_copy);
}

TEST_CASE("senseless orders and copies are refused") {
  OrderBody order = some_order();
  order.to.pop_back();
  CHECK_THROWS_AS(read_order(write_body(order)), Error);
  CHECK_THROWS_AS(read_copy(write_body(CopyBody{{1, 2}, {3}})), Error);
  order = some_order();
  order.channels[0].strips = {{0, 0, UINT64_MAX}, {0, 0, 2}};  // their sum is beyond 64 bits
  CHECK_THROWS_AS(read_order(write_body(order)), Error);
  Bytes flags = write_body(some_order());
  flags[8] = std::byte{2};
  CHECK_THROWS_AS(read_order(flags), Error);
  MeetBody crowd;
  crowd.ranks.resize(kRanksMax + 1);
  CHECK_THROWS_AS(read_meet(write_body(crowd)), Error);
}

TEST_CASE("the number of strips of an order is limited, over all channels together") {
  OrderBody order = some_order();
  order.channels[0].strips.assign(kOrderStripsMax - 1, BlockStrip{0, 0, 1});
  CHECK(read_order(write_body(order)).channels[0].strips.size() == kOrderStripsMax - 1);
  order.channels[0].strips.push_back({0, 0, 1});
  try {
    write_body(order);
    FAIL("it was written");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
  }
}

TEST_CASE("fuzz: readers of a rank's messages return them or throw a protocol error") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("rank messages", seed);
    testing::Dice dice(seed);
    const std::vector<Bytes> good = {write_body(some_order()), write_body(MeetBody{9, "p", 3, {{0, 11, "unix:@a"}}}),
                                     write_body(CopyBody{{1, 2}, {3, 4}}), write_body(ReportBody{1, 2}),
                                     write_body(DepartBody{1})};
    for (int step = 0; step < testing::fuzz_length(20000); ++step) {
      Bytes bytes = good[dice.below(good.size())];
      for (std::uint32_t change = dice.below(3); change-- > 0;) {
        const std::uint64_t number = dice.one_in(2) ? dice.any() : std::uint64_t{1} << dice.below(64);
        const std::size_t width = std::min<std::size_t>(bytes.size(), dice.one_in(2) ? 4 : 8);
        if (width > 0) std::memcpy(&bytes[dice.below(bytes.size() - width + 1)], &number, width);
        if (dice.one_in(4)) bytes.resize(dice.below(bytes.size() + 8));
      }
      try {
        switch (dice.below(5)) {
          case 0: {
            const OrderBody order = read_order(bytes);
            REQUIRE(order.from.size() == order.to.size());
            std::size_t strips = 0;
            for (const ChannelWrite& channel : order.channels) strips += channel.strips.size();
            REQUIRE(strips <= kOrderStripsMax);
            break;
          }
          case 1: {
            const MeetBody meet = read_meet(bytes);
            REQUIRE(meet.ranks.size() <= kRanksMax);
            break;
          }
          case 2: {
            const CopyBody copy = read_copy(bytes);
            REQUIRE(copy.from.size() == copy.to.size());
            break;
          }
          case 3:
            static_cast<void>(read_report(bytes));
            break;
          default:
            static_cast<void>(read_depart(bytes));
        }
      } catch (const Error& error) {
        REQUIRE(error.code() == ErrorCode::kProtocol);
      }
    }
  }
}

}  // namespace
}  // namespace kvpool
