// Blocks that a peer holds for a sequence: until when, and what becomes of them when they are recalled, given back or
// read through a mapping, or when the link ends.
#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "remote_attend_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

TEST_CASE("a peer holds what is viewed until the sequence is closed or the borrower is gone") {
  Three three(8);
  const auto lent = [&] { return 8 - free_blocks(three.b.pool()); };
  const Addresses first = three.a.borrow("b", 2);
  const auto sequence = sequence_of(*three.a.node, first);
  three.a.service->free(first.data(), 2, soon());
  CHECK(lent() == 2);
  sequence->close();
  CHECK(comes_true([&] { return lent() == 0; }));
  const Addresses second = three.a.borrow("b", 3);
  const auto leaked = sequence_of(*three.a.node, second);
  CHECK(lent() == 3);
  three.a.node->close();
  CHECK(comes_true([&] { return lent() == 0; }));
  three.b.pool().audit();
}

TEST_CASE("blocks that are let go are let go however busy the peer is") {
  const AttendMember a("a", 8);
  const AttendMember b("b", 64, 64, "", 1);  // admits one call of each verb at a time
  a.meet(b);
  const Addresses at_b = a.borrow("b", 40);
  std::vector<std::shared_ptr<Sequence>> sequences;
  for (const Address address : at_b) sequences.push_back(sequence_of(*a.node, Addresses{address}));
  a.service->free(at_b.data(), at_b.size(), soon());
  CHECK(free_blocks(b.pool()) == 24);
  for (const auto& sequence : sequences) sequence->close();
  CHECK(comes_true([&] { return free_blocks(b.pool()) == 64; }));
}

TEST_CASE("a handle that is kept when its attention is over holds nothing at the peer") {
  const Three three(8);
  const Addresses at_b = three.a.borrow("b", 3);
  const auto sequence = sequence_of(*three.a.node, at_b);
  Attend::Request there = request_of({sequence});
  there.where = AttendWhere::kThere;
  const auto kept = Attend::start(*three.a.node, std::move(there), soon());
  REQUIRE(kept->wait(soon()));
  kept->rethrow_if_failed();
  sequence->close();
  three.a.service->free(at_b.data(), at_b.size(), soon());
  CHECK(comes_true([&] { return free_blocks(three.b.pool()) == 8; }));
  CHECK(kept->done());
}

TEST_CASE("blocks that were given back before a recall was over stay in the views of them") {
  const Three three(8, "sock");
  const Addresses at_b = three.a.borrow("b", 2);
  fill_values(three.b.pool(), at_b, 0, 0.5F);
  const auto sequence = sequence_of(*three.a.node, at_b);
  three.a.service->begin_peer_events();
  std::thread recalling([&] {
    const RecallResult result = three.b.service->recall("a", at_b, Waiting(soon()));
    CHECK(result.returned == 2);
    CHECK(result.freed + result.quarantined == 0);
  });
  CHECK(comes_true([&] {
    const auto event = three.a.service->next_peer_event();
    return event && event->kind == PeerEvent::Kind::kRecalled;
  }));
  three.a.service->free(at_b.data(), at_b.size(), soon());
  recalling.join();
  const auto attend = Attend::start(*three.a.node, request_of({sequence}), soon());
  REQUIRE(attend->wait(soon()));
  attend->rethrow_if_failed();
  CHECK(finished(*attend).front() == all_of_value(0.5F));
}

TEST_CASE("a view that a peer refuses leaves nothing held anywhere") {
  const Three three(8);
  const Addresses at_b = three.a.borrow("b", 1);
  const Addresses at_c = three.a.borrow("c", 2);
  three.a.service->free(&at_c[1], 1, soon());
  const Addresses here = alloc(three.a.pool(), 1);
  const Addresses with_stale = Addresses{here[0], at_b[0], at_c[0], at_c[1]};
  CHECK(code_of([&] { sequence_of(*three.a.node, with_stale); }) == ErrorCode::kStaleAddress);
  const auto sequence = sequence_of(*three.a.node, here);
  CHECK(code_of([&] { sequence->append({&with_stale[1], 3}, 4 * kPage, soon()); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { sequence->append({&with_stale[1], 2}, 4 * kPage, soon()); }) == ErrorCode::kArgument);
  CHECK(sequence->addresses() == here);
  for (const Address address : {at_b[0], at_c[0]}) three.a.service->free(&address, 1, soon());
  CHECK(comes_true([&] { return free_blocks(three.b.pool()) == 8 && free_blocks(three.c.pool()) == 8; }));
}

TEST_CASE("blocks that were recalled are stale to the attention, and free for their owner") {
  for (const char* const route : {"", "sock"}) {  // with sock, the peer has nothing mapped
    CAPTURE(route);
    const Three three(8, route);
    const Addresses at_b = three.a.borrow("b", 3);
    fill_values(three.b.pool(), at_b, 0, 1.0F);
    const auto sequence = sequence_of(*three.a.node, at_b);
    const auto other = sequence_of(*three.a.node, Addresses{at_b[0]});
    const RecallResult result = three.b.service->recall("a", Addresses{at_b[1]}, Waiting(monotonic_ns() + 20'000'000));
    CHECK(result.freed + result.quarantined == 1);
    CHECK(comes_true([&] { return free_blocks(three.b.pool()) == 6; }));
    const auto attend = Attend::start(*three.a.node, request_of({sequence}), soon());
    REQUIRE(attend->wait(soon()));
    CHECK(code_of([&] { attend->rethrow_if_failed(); }) == ErrorCode::kStaleAddress);
    CHECK(sequence->lost() == std::vector<TokenRange>{{kPage, 2 * kPage}});
    const Addresses again = three.a.borrow("b", 1);  // the same peer
    fill_values(three.b.pool(), again, 0, 1.0F);
    CHECK(sequence->replace(1, again, soon()) == Addresses{at_b[1]});
    for (int i = 0; i < 2; ++i) {
      const auto mended = Attend::start(*three.a.node, request_of({sequence}), soon());
      REQUIRE(mended->wait(soon()));
      mended->rethrow_if_failed();
      CHECK(finished(*mended).front() == all_of_value(1.0F));
    }
    CHECK(sequence->lost().empty());
    const auto intact = Attend::start(*three.a.node, request_of({other}), soon());
    REQUIRE(intact->wait(soon()));
    CHECK(finished(*intact).front() == all_of_value(1.0F));
  }
}

TEST_CASE("blocks that are being read from here stay as they are when they are recalled, or the link ends") {
  for (const bool recall : {true, false}) {
    CAPTURE(recall);
    Three three(8);
    const Addresses at_b = three.a.borrow("b", 2);
    fill_values(three.b.pool(), at_b, 0, 1.25F);
    const auto sequence = sequence_of(*three.a.node, at_b);
    Attend::Request request = request_of({sequence});
    request.where = AttendWhere::kHere;
    auto reading = std::make_unique<Attend>(*three.a.node, std::move(request));  // nobody computes yet
    std::thread parting;
    if (recall) {
      const RecallResult result = three.b.service->recall("a", at_b, Waiting(monotonic_ns() + 20'000'000));
      CHECK(result.quarantined == 2);
      CHECK(result.freed == 0);
    } else {
      parting = std::thread([&] { three.b.service->disconnect("a"); });
      CHECK(comes_true([&] { return sequence->lost().size() == 1; }));
    }
    CHECK(free_blocks(three.b.pool()) == 6);
    CHECK(reading->wait(soon()));
    reading->rethrow_if_failed();
    CHECK(finished(*reading).front() == all_of_value(1.25F));
    reading.reset();
    CHECK(comes_true([&] { return free_blocks(three.b.pool()) == 8; }));
    if (parting.joinable()) parting.join();
    three.b.pool().audit();
  }
}

TEST_CASE("tokens are not set back into a block that lies with a peer") {
  const Three three(8);
  const Addresses here = alloc(three.a.pool(), 4);
  const auto sequence = sequence_of(*three.a.node, here, 3 * kPage + 1);
  sequence->replace(0, three.a.borrow("b", 2), soon());
  CHECK(code_of([&] { sequence->set_tokens(kPage + 1); }) == ErrorCode::kState);
  CHECK(sequence->tokens() == 3 * kPage + 1);
  sequence->set_tokens(2 * kPage);  // block 2 is here
  CHECK(sequence->tokens() == 2 * kPage);
  sequence->replace(1, Addresses{here[1]}, soon());
  sequence->set_tokens(kPage + 1);
  CHECK(sequence->tokens() == kPage + 1);
}

TEST_CASE("a block that may have been written while it was copied does not move") {
  const Three three(8);
  const Addresses here = alloc(three.a.pool(), 4);
  const auto sequence = sequence_of(*three.a.node, here, 3 * kPage + 1);
  const Addresses lent = three.a.borrow("b", 2);
  const std::uint64_t copied_at = sequence->set_backs();
  const std::vector<std::uint64_t> blocks = {0, 1};
  sequence->set_tokens(kPage + 1);  // what was speculated is rejected, and written anew
  sequence->set_tokens(3 * kPage + 1);
  const auto move = [&](std::size_t n) {
    sequence->switch_blocks({blocks.data(), n}, {here.data(), n}, {lent.data(), n}, copied_at, soon());
  };
  CHECK(code_of([&] { move(2); }) == ErrorCode::kState);
  CHECK(sequence->addresses() == here);
  move(1);  // that one was not written
  CHECK(sequence->addresses() == Addresses{lent[0], here[1], here[2], here[3]});
}

}  // namespace
}  // namespace kvpool::testing
